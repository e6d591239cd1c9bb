from __future__ import annotations

import pytest

from headrace.cli.connection import open_client, server_root


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_an_address_as_openai_clients_write_it_is_one_of_a_server(url: str) -> None:
    assert server_root(url) == "http://h:1"
    with open_client(url) as client:
        assert str(client.base_url) == "http://h:1"
