"""Keys, bounds, deadlines, disconnects and the end of a server."""

import json
import shutil
import signal
import socket
import subprocess
import time

import pytest

from tests.server.conftest import serving

LONG = {"prompt": "Once upon a time", "max_tokens": 8000, "ignore_eos": True}
KEY = {"Authorization": "Bearer alpha"}


def begin_stream(url: str, body: dict, **headers: str) -> socket.socket:
    """Send a streamed completion and return the socket, which nobody reads yet."""
    host, port = url.removeprefix("http://").split(":")
    raw = json.dumps({"stream": True} | body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Length: {len(raw)}\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in headers.items()) + "\r\n"
    connection = socket.create_connection((host, int(port)), timeout=60)
    connection.sendall(head.encode() + raw)
    return connection


def read_to_end(connection: socket.socket) -> str:
    said = b""
    while b"[DONE]" not in said and (part := connection.recv(65536)):
        said += part
    connection.close()
    return said.decode(errors="replace")


def hung_up(server, since: int) -> list[str]:
    """The lines of the access log, from line ``since`` on, of requests whose clients hung up."""
    return [line for line in server.lines[since:] if " error=client_disconnected " in line]


@pytest.mark.parametrize("streamed", [True, False])
def test_a_disconnect_frees_its_blocks(server, streamed):
    used, said = server.metric("kv_cache_usage_perc"), len(server.lines)
    connections = [begin_stream(server.url, LONG | {"n": 2, "stream": streamed}) for _ in range(3)]
    server.wait_until(lambda info: info["open_requests"] == 6)
    for connection in connections:
        if streamed:
            connection.recv(100)
        connection.close()
    server.wait_until(lambda info: info["open_requests"] == 0)
    server.wait_until(lambda info: len(hung_up(server, said)) == 3)
    assert server.metric("num_requests_running") == 0
    assert server.metric("kv_cache_usage_perc") <= used + 0.02  # nothing held but, perhaps, cached


@pytest.mark.parametrize("streamed", [True, False])
def test_a_disconnect_is_detected_behind_pipelined_requests(server, streamed):
    host, port = server.url.removeprefix("http://").split(":")
    raw = json.dumps(LONG | {"stream": streamed}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(raw)}\r\n\r\n".encode()
    said = len(server.lines)
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall((head + raw) * 3)
        server.wait_until(lambda info: info["open_requests"] == 1)
    server.wait_until(lambda info: info["open_requests"] == 0)
    server.wait_until(lambda info: hung_up(server, said))
    time.sleep(0.1)  # what the others would need to begin
    assert server.metric("num_requests_running") == 0
    assert all(" INFO    access " in line for line in server.lines[said:])


def test_each_request_can_be_explained(server):
    answer = server.post(
        "/v1/completions",
        {"prompt": "Once", "max_tokens": 3, "metadata": {"trace": "7"}, "request_id": "mine"},
    ).json()
    assert answer["id"] == "cmpl-mine"
    reported = server.get("/v1/requests/cmpl-mine").json()
    assert reported["state"] == "finished"
    assert reported["output_tokens"] == answer["usage"]["completion_tokens"]
    assert reported["metadata"] == {"trace": "7"}
    both = server.post("/v1/completions", {"prompt": "Once", "max_tokens": 3, "n": 2}).json()
    assert len(server.get(f"/v1/requests/{both['id']}").json()["sequences"]) == 2


def test_a_request_id_cannot_be_used_twice_at_once(server):
    connection = begin_stream(server.url, LONG | {"request_id": "twin"})
    server.wait_until(lambda info: info["open_requests"] == 1)
    answer = server.post("/v1/completions", {"prompt": "x", "request_id": "twin"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "request_id")
    connection.close()
    server.wait_until(lambda info: info["open_requests"] == 0)


def test_a_prefix_is_shared_by_salt_and_forgotten_on_demand(server):
    def cached(**more):
        body = {"prompt": "A prompt that is long enough to fill some blocks. " * 8, "max_tokens": 1} | more
        return server.post("/v1/completions", body).json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    server.post("/reset_prefix_cache")
    assert cached() == 0
    assert cached() > 16
    assert cached(user="somebody else") == 0
    assert cached(cache_salt="secret") == 0
    assert cached(cache_salt="secret") > 16
    assert server.post("/reset_prefix_cache").json() == {"reset": True}
    assert cached() == 0


def test_request_ids_are_echoed_or_made(server):
    assert server.get("/health", headers={"X-Request-Id": "abc"}).headers["x-request-id"] == "abc"
    assert server.get("/nothing").headers["x-request-id"].startswith("req_")


def test_without_a_key_only_liveness_answers(strict_server):
    for path in ("/health", "/ping", "/version"):
        assert strict_server.get(path).status_code == 200
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "alpha"}):
        for path in ("/v1/models", "/metrics", "/server_info", "/nothing"):
            answer = strict_server.get(path, headers=headers)
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert "www-authenticate" in answer.headers
    for key in ("alpha", "beta"):
        assert strict_server.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200


def test_a_request_is_shown_only_to_its_key(strict_server):
    body = {"prompt": "x", "max_tokens": 1, "request_id": "shown"}
    strict_server.post("/v1/completions", body, headers=KEY)  # on a busy machine its deadline may come first
    path = "/v1/requests/cmpl-shown"
    reported = strict_server.get(path, headers=KEY)
    assert reported.status_code == 200
    assert "alpha" not in reported.text
    assert strict_server.get(path, headers={"Authorization": "Bearer beta"}).status_code == 404


def test_the_deadline_is_a_408_or_an_error_event(strict_server):
    long = LONG | {"n": 2}  # one after the other in the only slot
    answer = strict_server.post("/v1/completions", long, headers=KEY)
    assert answer.status_code == 408
    assert answer.json()["error"]["code"] == "deadline_exceeded"
    for _ in range(30):
        said = read_to_end(begin_stream(strict_server.url, long, **KEY))
        if said.startswith("HTTP/1.1 200"):  # on a busy machine the deadline may come before the first token
            break
    *chunks, error, done = [line[6:] for line in said.split("\n") if line.startswith("data: ")]
    assert json.loads(error)["error"]["code"] == "deadline_exceeded"
    assert done.strip() == "[DONE]"
    assert chunks


def test_a_full_queue_is_a_503_that_says_when_to_come_again(strict_server):
    refused, connections = None, []
    for _ in range(20):
        # Again each time: on a busy machine these may end, after two seconds, before the next request arrives.
        connections += [begin_stream(strict_server.url, LONG, **KEY) for _ in range(3)]
        answer = strict_server.post("/v1/completions", {"prompt": "x"} | {"n": 2}, headers=KEY)
        if answer.status_code == 503:
            refused = answer
            break
        time.sleep(0.01)
    assert refused is not None
    assert refused.json()["error"]["type"] == "overloaded"
    assert int(refused.headers["retry-after"]) >= 1
    for connection in connections:
        connection.close()


def test_a_body_over_the_limit_is_a_413(strict_server):
    answer = strict_server.post("/v1/completions", {"prompt": "x" * 20_000}, headers=KEY)
    assert answer.status_code == 413


def test_sigterm_lets_requests_finish_and_refuses_new_ones():
    with serving("--drain-timeout", "60") as server:
        body = {"prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True}
        connection, longer = begin_stream(server.url, body), begin_stream(server.url, LONG | {"n": 2})
        connection.recv(100)
        longer.recv(100)
        server.process.send_signal(signal.SIGTERM)
        server.wait_until(lambda info: info["draining"])
        assert server.get("/health").status_code == 200
        assert server.get("/health/ready").status_code == 503
        refused = server.post("/v1/completions", {"prompt": "x"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert "retry-after" in refused.headers
        longer.close()
        said = read_to_end(connection)
        assert '"finish_reason":"length"' in said
        assert server.process.wait(60) == 0


def test_after_the_drain_each_client_gets_an_error():
    with serving("--drain-timeout", "0.3") as server:
        connection = begin_stream(server.url, LONG)
        connection.recv(100)
        server.process.send_signal(signal.SIGINT)
        said = read_to_end(connection)
        assert '"code": "draining"' in said
        assert "[DONE]" in said
        assert server.process.wait(60) == 0


def test_a_second_signal_ends_it_at_once():
    with serving("--drain-timeout", "600", "--max-num-seqs", "1") as server:
        connection = begin_stream(server.url, LONG | {"n": 16})  # minutes of work
        connection.recv(100)
        server.process.send_signal(signal.SIGTERM)
        server.wait_until(lambda info: info["draining"])
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(60)
        connection.close()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_tls(tmp_path):
    key, cert = str(tmp_path / "key.pem"), str(tmp_path / "cert.pem")
    made = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-subj",
        "/CN=localhost",
        "-days",
        "1",
    ]
    subprocess.run([*made, "-keyout", key, "-out", cert], check=True, capture_output=True)
    with serving("--ssl-keyfile", key, "--ssl-certfile", cert) as server:
        assert server.url.startswith("https://")
        assert server.post("/v1/completions", {"prompt": "Once", "max_tokens": 2}).status_code == 200
