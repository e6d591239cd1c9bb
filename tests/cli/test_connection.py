from __future__ import annotations

import httpx
import pytest

from headrace.cli.connection import ServerError, call, open_client, server_root


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_an_address_as_openai_clients_write_it_is_one_of_a_server(url: str) -> None:
    assert server_root(url) == "http://h:1"
    with open_client(url) as client:
        assert str(client.base_url) == "http://h:1"


def test_an_answer_that_is_no_object_is_an_error() -> None:
    for text in ("<html>", "[]"):
        transport = httpx.MockTransport(lambda _, text=text: httpx.Response(200, text=text))
        with (
            httpx.Client(transport=transport, base_url="http://x") as client,
            pytest.raises(ServerError, match="the server at http://x is not a Headrace server"),
        ):
            call(client, "GET", "/v1/cache/warm")
