"""Requests drawn from the server's own OpenAPI document: none is an error of the server, and nothing is left behind."""

import httpx
import pytest

from tests.judges.api_fuzz import TIMEOUT_SECONDS, Fuzz, flags
from tests.server.conftest import serving

CASES = 600
"""``python -m tests.judges.api_fuzz`` sends thousands."""


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    with (
        serving(*flags(tmp_path_factory.mktemp("fuzz"))) as running,
        httpx.Client(base_url=running.url, timeout=TIMEOUT_SECONDS, trust_env=False) as client,
    ):
        yield client


def test_every_request_is_answered_or_refused_by_name(client):
    fuzz = Fuzz(client)
    fuzz.run(CASES, drawn_by=27)
    assert not fuzz.findings.wrong
    assert fuzz.findings.cases >= CASES * 0.9
    statuses = fuzz.findings.statuses
    for route in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"):
        assert statuses[f"POST {route}"][200], f"{route} computed nothing"
    assert fuzz.wait_until_idle() == ""
