from __future__ import annotations

import pytest

from headrace.api.compile.policies import Rules
from headrace.api.rate_limit_headers import duration, rate_headers
from headrace.core.tenancy.quota import Limit, Room
from headrace.core.tenancy.tenants import TenantLimits, Tenants, TenantTerms

PATH = "/v1/completions"
BODY = {"prompt": "abc", "max_tokens": 5}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0ms"), (0.12, "120ms"), (1.0, "1s"), (1.51, "1.6s"), (360.0, "6m0s"), (3602.0, "1h0m2s")],
)
def test_durations_as_openai_writes_them(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_headers_say_what_is_limited_and_nothing_else() -> None:
    assert rate_headers({}) == {}
    reported = rate_headers(
        {
            Limit.REQUESTS_PER_MINUTE: Room(5, 2, 30.0),
            Limit.TOKENS_PER_MINUTE: Room(100, 80, 1.0),
            Limit.TOKENS_PER_DAY: Room(1000, 7, 3600.0),
            Limit.CONCURRENT_REQUESTS: Room(3, 1, 0.0),
        }
    )
    assert reported == {
        "x-ratelimit-limit-requests": "5",
        "x-ratelimit-remaining-requests": "2",
        "x-ratelimit-reset-requests": "30s",
        "x-ratelimit-limit-tokens": "1000",
        "x-ratelimit-remaining-tokens": "7",
        "x-ratelimit-reset-tokens": "1h0m0s",
    }


def limited(**limits: int) -> dict:
    terms = TenantTerms(limits=TenantLimits(**limits))
    return {"rules": Rules(tenants=Tenants({"acme": terms}))}


ACME = {"X-Tenant-Id": "acme"}


@pytest.mark.parametrize("options", [limited(requests_per_minute=2)])
@pytest.mark.parametrize("stream", [False, True])
def test_the_third_call_is_a_429_and_other_tenants_are_not_concerned(house, stream):
    body = BODY | {"stream": stream}
    for left in ("1", "0"):
        answer = house.client.post(PATH, json=body, headers=ACME)
        assert answer.status_code == 200
        assert answer.headers["x-ratelimit-limit-requests"] == "2"
        assert answer.headers["x-ratelimit-remaining-requests"] == left
    refused = house.client.post(PATH, json=body, headers=ACME)
    assert refused.status_code == 429
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert "2 requests per minute" in refused.json()["error"]["message"]
    assert 50 <= int(refused.headers["retry-after"]) <= 61
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    other = house.client.post(PATH, json=body, headers={"X-Tenant-Id": "else"})
    assert other.status_code == 200
    assert "x-ratelimit-limit-requests" not in other.headers


@pytest.mark.parametrize("options", [limited(tokens_per_minute=100)])
def test_tokens_are_held_at_first_and_what_was_not_computed_is_given_back(house):
    answer = house.client.post(PATH, json=BODY | {"max_tokens": 90}, headers=ACME)
    assert answer.headers["x-ratelimit-remaining-tokens"] == "7"
    used = answer.json()["usage"]
    house.quiet()
    left = 100 - (used["total_tokens"] - used["prompt_tokens_details"]["cached_tokens"])
    again = house.client.post(PATH, json=BODY, headers=ACME)
    assert again.headers["x-ratelimit-remaining-tokens"] == str(left - 8)


@pytest.mark.parametrize("options", [limited(tokens_per_minute=100)])
def test_a_call_beyond_the_limit_at_any_time_is_a_400(house):
    answer = house.client.post(PATH, json=BODY | {"max_tokens": 98}, headers=ACME)
    assert answer.status_code == 400
    assert "100 tokens per minute" in answer.json()["error"]["message"]


@pytest.mark.parametrize("options", [limited(concurrent_requests=1)])
def test_a_call_ends_its_concurrency_with_itself(house):
    assert house.client.post(PATH, json=BODY | {"n": 3}, headers=ACME).status_code == 200
    house.quiet()
    assert house.client.post(PATH, json=BODY, headers=ACME).status_code == 200


@pytest.mark.parametrize("options", [{"rules": Rules()}])
def test_the_tier_that_was_used_is_echoed(house):
    for tier, used in (("auto", "default"), ("flex", "flex"), ("priority", "priority")):
        answer = house.client.post(PATH, json=BODY | {"service_tier": tier})
        assert answer.json()["service_tier"] == used
    assert "service_tier" not in house.client.post(PATH, json=BODY).json()
