import httpx
import pytest

from headrace.cli.connection import ServerError, open_client, printable, served_model, stream, uses_proxies


def client(response: httpx.Response) -> httpx.Client:
    return httpx.Client(transport=httpx.MockTransport(lambda _: response), base_url="http://fake")


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (httpx.Response(200, text="<html>"), "no OpenAI-compatible server"),
        (httpx.Response(200, json={"data": []}), "no OpenAI-compatible server"),
        (httpx.Response(401, json={"error": {"message": "wrong key"}}), "wrong key"),
        (httpx.Response(502, text="bad gateway"), "502 Bad Gateway: bad gateway"),
    ],
)
def test_what_is_no_server_of_ours_is_told(response: httpx.Response, message: str) -> None:
    with pytest.raises(ServerError, match=message):
        served_model(client(response))


def test_a_connection_that_breaks_is_told() -> None:
    def break_off(request: httpx.Request) -> httpx.Response:
        raise httpx.RemoteProtocolError("peer closed")

    broken = httpx.Client(transport=httpx.MockTransport(break_off), base_url="http://fake")
    with pytest.raises(ServerError, match="the connection broke: peer closed"):
        list(stream(broken, "/v1/completions", {}))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ('{"error": {"message": "too late"}}', "too late"),
        ('{"error": "too late"}', "too late"),
        ("<p>", "<p>"),
    ],
)
def test_an_error_in_the_stream_is_told(data: str, message: str) -> None:
    with pytest.raises(ServerError, match=message):
        list(stream(client(httpx.Response(200, text=f"data: {data}\n\n")), "/x", {}))


@pytest.mark.parametrize("url", ["http://[", "http://a:b", "http://a\n"])
def test_what_is_no_address_is_told(url: str) -> None:
    with pytest.raises(ServerError, match="no address"):
        open_client(url)


def test_comments_of_the_stream_are_passed_over() -> None:
    text = ': ping\n\ndata: {"n": 1}\n\n: ping\n\ndata: {"n": 2}\n\ndata: [DONE]\n\ndata: {"n": 3}\n\n'
    assert list(stream(client(httpx.Response(200, text=text)), "/x", {})) == [{"n": 1}, {"n": 2}]


def test_this_machine_is_reached_without_a_proxy() -> None:
    assert not uses_proxies("http://127.0.0.1:8000")
    assert not uses_proxies("http://[::1]:8000")
    assert uses_proxies("https://api.example.com")


def test_control_characters_are_not_printed() -> None:
    assert printable("a\x1b[1m\r\n\tü\x9b\u200d日") == "a[1m\n\tü\u200d日"
