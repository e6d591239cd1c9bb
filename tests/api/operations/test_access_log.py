"""What the access log records of each request, and what it leaves out."""

from __future__ import annotations

import asyncio
import json
import logging
from unittest.mock import AsyncMock, Mock

import pytest
from httpx import ASGITransport, AsyncClient
from starlette.datastructures import Headers

from headrace.api.app import create_app, lifespan_of
from headrace.api.auth.api_keys import Keys
from headrace.api.exchange import Exchange, Hooks
from headrace.api.operations import access_log
from headrace.api.operations.access_log import FIELDS, AccessLog, cache_layer
from headrace.core.request import RejectReason
from tests.api.caching import with_memory
from tests.api.conftest import time_runs_out

PATH = "/v1/completions"
BODY = {"prompt": "x", "max_tokens": 3}


@pytest.fixture(autouse=True)
def _levels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "headrace")


def records(caplog) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name == "headrace.access"]


def logged(caplog) -> list[dict]:
    return [{k: v for k, v in record.fields.items() if v is not None} for record in records(caplog)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_is_logged_with_its_tokens_and_times(house, caplog, stream):
    headers = {"X-Request-Id": "mine", "X-Tenant-Id": "acme"}
    answer = house.client.post(PATH, json=BODY | {"stream": stream}, headers=headers)
    (fields,) = logged(caplog)
    assert 0 < fields.pop("ttft_seconds") <= fields.pop("duration_seconds")
    call_id = json.loads(answer.text.split("data: ")[1])["id"] if stream else answer.json()["id"]
    assert fields == {
        "method": "POST",
        "path": PATH,
        "status": 200,
        "request_id": "mine",
        "id": call_id,
        "tenant": "acme",
        "model": "fox",
        "service_class": "default",
        "stream": stream,
        "prompt_tokens": 1,
        "completion_tokens": 3,
        "cached_tokens": 0,
        "finish_reason": "length",
    }
    assert records(caplog)[0].levelno == logging.INFO


def test_every_field_is_described_in_its_order(house, caplog):
    house.client.post(PATH, json=BODY)
    assert set(records(caplog)[0].fields) <= set(FIELDS)


@pytest.mark.parametrize("options", [{"lookup": with_memory}])
def test_the_cache_layer_is_logged(house, caplog):
    for _ in range(2):
        house.client.post(PATH, json=BODY | {"temperature": 0})
        house.quiet()
    assert [fields["cache"] for fields in logged(caplog)] == ["miss", "exact"]
    assert logged(caplog)[1]["completion_tokens"] == 3


@pytest.mark.parametrize(
    ("note", "layer"),
    [
        ("", ""),
        ("miss", "miss"),
        ("coalesced", "coalesced"),
        ("hit; layer=exact; age=3", "exact"),
        ("hit; layer=semantic; age=3; similarity=0.990", "semantic"),
        ("bypass; reason=not-repeatable", "bypass"),
    ],
)
def test_the_header_s_layer_is_one_word(note, layer):
    assert cache_layer(note) == layer


@pytest.mark.parametrize("options", [{"queued_requests": 1}])
def test_a_rejected_request_is_logged_with_its_code_and_tenant(house, caplog):
    body = {"prompt": ["x", "y"], "max_tokens": 1, "user": "ann"}
    assert house.client.post(PATH, json=body).status_code == 400
    (fields,) = logged(caplog)
    assert (fields["status"], fields["tenant"], "prompt_tokens" in fields) == (400, "ann", False)
    house.service.draining = True
    assert house.client.post(PATH, json=BODY).status_code == 503
    assert logged(caplog)[1]["error"] == RejectReason.DRAINING


def test_errors_have_the_code_of_their_body(house, caplog):
    house.client.get("/nothing?key=secret")
    house.client.get(PATH)
    house.client.post(PATH, json={"prompt": "x", "no_such_field": 1})
    house.client.post(PATH, json={"prompt": "x", "temperature": -1})
    assert [(fields["path"], fields["status"], fields["error"]) for fields in logged(caplog)] == [
        ("/nothing", 404, "route_not_found"),
        (PATH, 405, "method_not_allowed"),
        (PATH, 400, "unknown_parameter"),
        (PATH, 400, "invalid_value"),
    ]


@pytest.mark.parametrize("options", [{"keys": ("alpha-secret",)}])
def test_a_wrong_key_is_logged_as_such_and_not_shown(house, caplog):
    house.client.post(PATH, json=BODY, headers={"Authorization": "Bearer beta-secret"})
    house.client.post(PATH, json=BODY, headers={"Authorization": "Bearer alpha-secret"})
    first, second = logged(caplog)
    assert (first["status"], first["error"], "tenant" in first) == (401, "invalid_api_key", False)
    assert second["tenant"].startswith("key-")
    assert not any("secret" in str(record.__dict__) for record in caplog.records)


def test_a_stream_that_fails_in_the_middle_is_logged_with_its_error(house, caplog, monkeypatch):
    time_runs_out(house, monkeypatch)
    answer = house.client.post(PATH, json={"prompt": "x", "max_tokens": 30, "stream": True})
    assert answer.status_code == 200
    (fields,) = logged(caplog)
    assert fields["error"] == "deadline_exceeded"
    assert "finish_reason" not in fields


def test_probes_are_logged_at_debug_level_only(house, caplog):
    for path in (
        "/health",
        "/health/ready",
        "/livez",
        "/readyz",
        "/healthz",
        "/ping",
        "/metrics",
        "/version",
    ):
        house.client.get(path)
    assert {record.levelno for record in records(caplog)} == {logging.DEBUG}
    assert len(records(caplog)) == 8


def test_a_trace_is_logged_and_passed_on(house, caplog):
    given = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    answer = house.client.get("/v1/models", headers={"traceparent": given})
    assert answer.headers["traceparent"] == given
    assert logged(caplog)[0]["trace_id"] == "0af7651916cd43dd8448eb211c80319c"


@pytest.mark.parametrize(
    "given",
    [
        "",
        "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331",
        "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "00-00000000000000000000000000000000-b7ad6b7169203331-01",
        "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
        "00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01",
    ],
)
def test_a_trace_context_that_is_none_is_ignored(house, caplog, given):
    answer = house.client.get("/v1/models", headers={"traceparent": given})
    assert "traceparent" not in answer.headers
    assert "trace_id" not in logged(caplog)[0]


def test_responses_are_counted_by_route(house):
    house.client.get("/v1/models/fox")
    house.client.get("/v1/models/none")
    house.client.get("/no/such/path")
    text = house.client.get("/metrics").text
    for labels in (
        'method="GET",model_name="",route="/v1/models/{model:path}",status="2xx"',
        'method="GET",model_name="",route="/v1/models/{model:path}",status="4xx"',
        'method="GET",model_name="",route="unmatched",status="4xx"',
    ):
        assert f"headrace:http_requests_total{{{labels}}} 1.0" in text


def ended(number: int) -> Exchange:
    """An exchange that has ended."""
    headers = Headers({"x-request-id": f"request-{number}"})
    return Exchange({"method": "GET", "path": "/v1/models"}, headers, 0.0, Hooks())


def test_exchanges_are_logged_together_and_with_the_time_of_their_end(caplog, monkeypatch):
    monkeypatch.setattr(access_log, "BATCH_SECONDS", 0.0)
    times = iter([100.25, 100.5])
    monkeypatch.setattr(access_log.time, "time", lambda: next(times, 200.0))

    async def add_two() -> None:
        log = AccessLog()
        log.add(ended(1))
        log.add(ended(2))
        assert logged(caplog) == []
        while len(logged(caplog)) < 2:
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(add_two(), 60))
    assert [record.created for record in records(caplog)] == [100.25, 100.5]
    assert [fields["request_id"] for fields in logged(caplog)] == ["request-1", "request-2"]


def test_a_full_batch_is_logged_at_once_and_nothing_twice(caplog):
    async def add_many() -> None:
        log = AccessLog()
        for number in range(access_log.MAX_HELD + 1):
            log.add(ended(number))
        assert len(logged(caplog)) == access_log.MAX_HELD
        log.flush()
        log.flush()

    asyncio.run(add_many())
    assert len(logged(caplog)) == access_log.MAX_HELD + 1


def test_the_end_of_the_application_logs_what_still_waits(caplog):
    log = AccessLog()

    async def serve() -> None:
        lookup = Mock(start=AsyncMock(), stop=AsyncMock())
        app = create_app(lookup, [], Keys({}), hooks=Hooks(ended=(log.add,), stopped=(log.flush,)))
        async with lifespan_of(app), AsyncClient(transport=ASGITransport(app), base_url="http://x") as client:
            await client.get("/none")
            assert logged(caplog) == []

    asyncio.run(serve())
    assert [fields["path"] for fields in logged(caplog)] == ["/none"]
