"""A server that computes in few bits answers, and says in which."""

import pytest

from tests.server.conftest import serving


@pytest.mark.parametrize(
    ("name", "linears"),
    [
        ("int8", "13 W8A8"),
        ("int4", "12 W4A16 in groups of 128, 1 W8A8"),
        ("w4a8", "12 W4A8 in groups of 128, 1 W8A8"),
    ],
)
def test_a_server_computes_in_few_bits(name, linears):
    with serving("--quantization", name) as server:
        info = server.get("/server_info").json()
        assert info["quantization"] == linears
        body = {"prompt": "Once upon a time", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        first, second = (server.post("/v1/completions", body).json() for _ in range(2))
        assert first["usage"]["completion_tokens"] == 24
        assert len(first["choices"][0]["text"].split()) > 8
        assert first["choices"][0]["text"] == second["choices"][0]["text"]
