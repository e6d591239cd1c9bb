"""Defaults of the model apply on every endpoint, and a request's own values count more."""

from __future__ import annotations

import pytest

from headrace.core.request import SamplingParams
from headrace.service.sampling_defaults import SamplingDefaults
from tests.api.caching import RequestsNoted

VALUES = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05}
PARAMS = SamplingParams(**VALUES, max_tokens=5)
HI = [{"role": "user", "content": "hi"}]
DOORS = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 9},
}
MODEL = {"lookup": RequestsNoted, "defaults": SamplingDefaults(PARAMS)}
LIMITED = {"lookup": RequestsNoted, "defaults": SamplingDefaults(PARAMS, most_tokens=5)}


def asked(house, path: str, **more) -> SamplingParams:
    answer = house.client.post(path, json={"model": "fox"} | DOORS[path] | more)
    assert answer.status_code == 200, answer.text
    return house.lookup.requests[-1].params


def values(params: SamplingParams) -> dict[str, float]:
    return {name: getattr(params, name) for name in VALUES}


@pytest.mark.parametrize("options", [MODEL])
@pytest.mark.parametrize("path", DOORS)
def test_values_that_a_request_does_not_give_are_the_models(house, path):
    assert values(asked(house, path)) == VALUES
    assert values(asked(house, path, temperature=None, top_p=None)) == VALUES
    assert values(asked(house, path, temperature=0, top_p=1)) == VALUES | {"temperature": 0, "top_p": 1}


@pytest.mark.parametrize("options", [MODEL])
def test_the_models_length_is_a_default_only(house):
    chat, completion = "/v1/chat/completions", "/v1/completions"
    assert asked(house, chat).max_tokens == 5
    assert asked(house, chat, max_tokens=9).max_tokens == 9
    assert asked(house, chat, max_tokens=-1).max_tokens is None
    assert asked(house, completion).max_tokens == 16  # the default of this endpoint


@pytest.mark.parametrize("options", [LIMITED])
@pytest.mark.parametrize("path", DOORS)
def test_a_limit_holds_for_every_request(house, path):
    field = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    assert asked(house, path, **{field: 50}).max_tokens == 5
    assert asked(house, path, **{field: 3}).max_tokens == 3
    if path.startswith("/v1/c"):
        assert asked(house, path, max_tokens=-1).max_tokens == 5


@pytest.mark.parametrize("options", [MODEL])
def test_a_response_shows_the_values_that_applied(house):
    shown = house.client.post("/v1/responses", json={"input": "hi"}).json()
    assert (shown["temperature"], shown["top_p"]) == (0.6, 0.9)
