"""The cost of a call in its usage, its header and the access log, in every dialect."""

from __future__ import annotations

import json
import logging

import pytest

from headrace.api.auth.api_keys import Grant, Keys
from headrace.observe.cost.prices import Pricing, TokenPrices

ASK = {"X-Headrace-Cost": "true"}


COMPLETION = ("/v1/completions", {"prompt": "abc", "max_tokens": 5})


CALLS = [
    COMPLETION,
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}),
    ("/v1/messages", {"model": "fox", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 5}),
]


BY_TOKENS = Pricing(1.0, TokenPrices(1e6, 0.0, 1e7), "EUR")


BY_DEVICE = Pricing(2.0, currency="EUR")


def output_tokens(usage: dict) -> int:
    return usage.get("completion_tokens", usage.get("output_tokens"))


def input_tokens(usage: dict) -> int:
    return usage.get("prompt_tokens", usage.get("input_tokens"))


@pytest.mark.parametrize("options", [{"pricing": BY_TOKENS}])
@pytest.mark.parametrize(("path", "body"), CALLS)
def test_every_dialect_has_the_cost_of_its_tokens(house, path, body):
    answer = house.client.post(path, json=body, headers=ASK)
    used = answer.json()["usage"]
    assert used["cost"] == pytest.approx(input_tokens(used) + 10 * output_tokens(used))
    details = used["cost_details"]
    assert details["currency"] == "EUR"
    assert details["token_cost"] == used["cost"]
    assert details["device_cost"] == details["device_seconds"] > 0
    amount, currency = answer.headers["X-Headrace-Cost"].split()
    assert (float(amount), currency) == (pytest.approx(used["cost"]), "EUR")


@pytest.mark.parametrize("options", [{"pricing": BY_DEVICE, "overlap": 0}])
@pytest.mark.parametrize(("path", "body"), CALLS)
def test_the_last_step_is_part_of_the_cost(house, path, body):
    used = house.client.post(path, json=body, headers=ASK).json()["usage"]
    house.quiet()
    (tenant,) = house.client.get("/v1/usage").json()["data"]
    assert used["cost"] == pytest.approx(tenant["cost"], rel=1e-9)
    assert used["cost"] == 2 * used["cost_details"]["device_seconds"] > 0


@pytest.mark.parametrize("options", [{"pricing": BY_DEVICE}])
@pytest.mark.parametrize(("path", "body"), CALLS)
def test_a_call_that_does_not_ask_is_as_it_was(house, path, body):
    for headers in ({}, {"X-Headrace-Cost": "false"}):
        answer = house.client.post(path, json=body, headers=headers)
        assert answer.json()["usage"].keys().isdisjoint({"cost", "cost_details"})
        assert "X-Headrace-Cost" not in answer.headers


@pytest.mark.parametrize("options", [{"pricing": BY_TOKENS}])
def test_the_thread_that_writes_the_log_counts_no_steps(house, caplog, monkeypatch):
    path, body = COMPLETION
    with caplog.at_level(logging.INFO, "headrace.access"):
        cost = house.client.post(path, json=body, headers=ASK).json()["usage"]["cost"]
    (record,) = [each for each in caplog.records if each.name == "headrace.access"]
    monkeypatch.setattr(house.lookup.service, "count", lambda: pytest.fail("steps are counted for a line"))
    assert record.fields["cost"] == cost
    assert record.fields["completion_tokens"] == 5


@pytest.mark.parametrize("options", [{"pricing": BY_TOKENS}])
def test_the_field_asks_too_and_streams_end_with_the_cost(house):
    path, body = COMPLETION
    assert house.client.post(path, json=body | {"include_cost": True}).json()["usage"]["cost"] == 53.0
    streamed = body | {"stream": True, "stream_options": {"include_usage": True}, "include_cost": True}
    lines = house.client.post(path, json=streamed).text.splitlines()
    last = json.loads(lines[-4].removeprefix("data: "))
    assert last["usage"]["cost"] == 50.0 + 3 - last["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("options", [{}])
def test_a_server_without_prices_refuses_to_tell_a_cost(house):
    path, body = COMPLETION
    for more, headers, name in (({}, ASK, "X-Headrace-Cost"), ({"include_cost": True}, {}, "include_cost")):
        answer = house.client.post(path, json=body | more, headers=headers)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == name
        assert "--device-price" in answer.json()["error"]["message"]
    assert house.client.post(path, json=body | {"include_cost": False}).status_code == 200


@pytest.mark.parametrize("options", [{"pricing": BY_TOKENS}])
def test_the_header_is_true_or_false(house):
    path, body = COMPLETION
    answer = house.client.post(path, json=body, headers={"X-Headrace-Cost": "maybe"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "X-Headrace-Cost"


@pytest.mark.parametrize("options", [{"pricing": BY_TOKENS}])
def test_the_access_log_has_the_cost(house, caplog):
    path, body = COMPLETION
    with caplog.at_level(logging.INFO, "headrace.access"):
        house.client.post(path, json=body)
    (record,) = [each for each in caplog.records if each.name == "headrace.access"]
    assert record.fields["cost"] == 53.0


@pytest.mark.parametrize("options", [{"pricing": BY_TOKENS, "keys": ("alpha", "beta")}])
def test_a_key_sees_its_own_cost_alone(house):
    path, body = COMPLETION
    keys = Keys({"alpha": Grant(), "beta": Grant()})
    alpha, beta = ({"Authorization": f"Bearer {key}"} for key in ("alpha", "beta"))
    for headers in (alpha, beta, beta):
        house.client.post(path, json=body, headers=headers)
    house.quiet()
    name = keys.identify(alpha["Authorization"]).name
    for query in ("", f"?tenant={keys.identify(beta['Authorization']).name}"):
        page = house.client.get("/v1/usage" + query, headers=alpha).json()
        assert [(each["tenant"], each["cost"]) for each in page["data"]] == [(name, 53.0)]
        assert "device" not in page  # idle time would show what others do
        csv = house.client.get(f"/v1/usage?format=focus&{query[1:]}", headers=alpha).text
        assert "device-idle" not in csv
        assert len(csv.splitlines()) == 4
        assert all(name in line for line in csv.splitlines()[1:])


@pytest.mark.parametrize("options", [{"pricing": BY_DEVICE}])
def test_the_time_of_the_device_adds_up(house):
    path, body = COMPLETION
    for tenant in ("acme", "else"):
        house.client.post(path, json=body, headers={"X-Tenant-Id": tenant})
    house.quiet()
    page = house.client.get("/v1/usage").json()
    device = page["device"]
    parts = sum(device[f"{name}_seconds"] for name in ("attributed", "idle", "overhead"))
    assert parts == pytest.approx(device["wall_seconds"], rel=1e-3)
    assert device["conservation_error"] < 1e-3
    assert sum(each["cost"] for each in page["data"]) == pytest.approx(device["attributed_cost"])
    answer = house.client.get("/v1/usage?format=focus")
    assert answer.headers["content-type"].startswith("text/csv")
    assert "device-idle" in answer.text
    assert house.client.get("/v1/usage?format=xml").status_code == 400
