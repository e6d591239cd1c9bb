"""Tenants, tiers and deadlines, as a client of a real server meets them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.server.conftest import Server, serving

TERMS = """
default:
  requests_per_minute: 1000
tenants:
  acme:
    default_class: flex
    classes: [default]
    requests_per_minute: 2
  spender:
    tokens_per_minute: 60
"""
KEYS = "alpha acme\nbeta spender\ngamma\n"
BODY = {"prompt": "Once upon a time", "max_tokens": 4}


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("shop")
    terms, keys = Path(folder / "tenants.yaml"), Path(folder / "keys")
    terms.write_text(TERMS)
    keys.write_text(KEYS)
    with serving("--tenants", str(terms), "--api-key-file", str(keys)) as running:
        yield running


def key(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}"}


def test_the_table_is_printed_at_the_start(shop):
    said = "".join(shop.lines)
    assert "tenant       acme: weight 1, class flex, may use default, 2 requests per minute" in said
    assert "tenant       (others): weight 1, class default, 1,000 requests per minute" in said
    assert "class        priority: weight 8" in said


def test_a_tenant_beyond_its_requests_hears_when_to_come_again(shop):
    for left in ("1", "0"):
        answer = shop.post("/v1/completions", BODY, headers=key("alpha"))
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-ratelimit-remaining-requests"] == left
    refused = shop.post("/v1/completions", BODY, headers=key("alpha"))
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(refused.headers["retry-after"]) <= 61
    client = openai.OpenAI(base_url=f"{shop.url}/v1", api_key="alpha", max_retries=0)
    with pytest.raises(openai.RateLimitError):
        client.completions.create(model="builtin", **BODY)
    assert shop.post("/v1/completions", BODY, headers=key("gamma")).status_code == 200
    (reported,) = shop.get("/v1/usage", headers=key("alpha")).json()["data"]
    assert (reported["tenant"], reported["requests"], reported["refused"]) == ("acme", 2, {"tenant_limit": 2})


def test_tokens_are_charged_by_what_was_computed(shop):
    long = BODY | {"max_tokens": 40, "ignore_eos": True}
    first = shop.post("/v1/completions", long, headers=key("beta"))
    used = first.json()["usage"]["completion_tokens"]
    refused = shop.post("/v1/completions", long, headers=key("beta"))
    assert refused.status_code == 429
    assert int(refused.headers["x-ratelimit-remaining-tokens"]) <= 60 - used
    too_large = shop.post("/v1/completions", BODY | {"max_tokens": 60}, headers=key("beta"))
    assert too_large.status_code == 400
    assert "60 tokens per minute" in too_large.json()["error"]["message"]


def test_the_tier_that_was_used_is_echoed_and_another_is_refused(shop):
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    client = openai.OpenAI(base_url=f"{shop.url}/v1", api_key="gamma")
    for tier, used in (("auto", "default"), ("default", "default"), ("priority", "priority")):
        answer = client.chat.completions.create(model="builtin", service_tier=tier, **body)
        assert answer.service_tier == used
    refused = shop.post(
        "/v1/chat/completions", body | {"service_tier": "priority"}, headers=key("alpha")
    ).json()
    assert refused["error"]["param"] == "service_tier"
    assert "acme" in refused["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_of_the_callers_is_a_408(server, stream):
    body = {"prompt": "x", "max_tokens": 1500, "ignore_eos": True, "deadline_ms": 1, "stream": stream}
    answer = server.post("/v1/completions", body)
    assert answer.status_code == 408
    assert answer.json()["error"]["code"] in ("deadline_exceeded", "deadline_unreachable")


def test_a_request_shows_its_class_targets_and_cost(server):
    body = BODY | {
        "service_tier": "flex",
        "slo": {"ttft_ms": 750},
        "request_id": "urgent",
        "ignore_eos": True,
    }
    assert server.post("/v1/completions", body).status_code == 200
    reported = server.get("/v1/requests/cmpl-urgent").json()
    assert (reported["service_class"], reported["slo"]["ttft_seconds"]) == ("flex", 0.75)
    assert reported["cost"]["generated_tokens"] == 4
    assert all(each["why"] for each in reported["history"])


def test_a_file_that_makes_no_sense_stops_the_server_at_the_start(tmp_path):
    file = tmp_path / "tenants.yaml"
    file.write_text("tenants: {acme: {weight: 0}}")
    with pytest.raises(AssertionError, match=r"tenants\.acme\.weight"), serving("--tenants", str(file)):
        pass
