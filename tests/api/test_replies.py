"""Whole and streamed responses."""

from __future__ import annotations

import asyncio
import json
import threading
import time

import pytest

from headrace.api import replies
from headrace.api.replies import DONE, error_event
from headrace.core.events import Finished, arrival
from headrace.core.request import FinishReason, Request
from headrace.text.stream import TextStream
from tests.api.conftest import time_runs_out

PATH = "/v1/completions"


def ends(house) -> list[FinishReason]:
    return [event.reason for event in house.seen if isinstance(event, Finished)]


def quiet(house) -> None:
    """Wait until the engine holds nothing any more and all that happened has been counted."""
    until = time.monotonic() + 60
    while house.service.open_requests():
        assert time.monotonic() < until
        time.sleep(0.005)
    asyncio.run_coroutine_threadsafe(turns(3), house.service._loop).result(60)  # told, written, counted


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@pytest.mark.parametrize("stream", [False, True])
def test_one_failed_request_fails_alone_and_tells_nothing_of_the_inside(house, stream, caplog):
    house.runner.poison = {"cmpl-bad"}
    answer = house.client.post(PATH, json={"prompt": "x", "request_id": "bad", "stream": stream})
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    assert "secret" not in answer.text
    assert "cmpl-bad failed" in caplog.text
    assert "secret" in caplog.text
    assert house.client.post(PATH, json={"prompt": "x"}).status_code == 200


def test_what_the_engine_rejects_is_the_callers_fault(house):
    house.engine.scheduler.max_model_len = 4
    answer = house.client.post(PATH, json={"prompt": [70] * 10, "stream": True})
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "request_rejected"


@pytest.mark.parametrize("stream", [False, True])
def test_a_failed_engine_is_a_503_for_all_and_for_probes(house, stream):
    house.runner.crash = True
    for _ in range(2):
        answer = house.client.post(PATH, json={"prompt": "x", "stream": stream})
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_failed"
        assert "bus" not in answer.text
    assert house.client.get("/health").status_code == 503
    assert house.client.get("/health/ready").status_code == 503


@pytest.mark.parametrize("options", [{"request_timeout": 0.1}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_before_the_first_token_is_a_408(house, stream):
    house.runner.gate.clear()
    answer = house.client.post(PATH, json={"prompt": "x", "stream": stream})
    assert answer.status_code == 408
    assert "0.1 seconds" in answer.json()["error"]["message"]
    house.runner.gate.set()
    quiet(house)
    assert ends(house) == [FinishReason.TIMEOUT]


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_that_cannot_be_met_is_a_408_at_once(house, stream, monkeypatch):
    def refuse(request: Request, now: float) -> None:
        house.engine._events += (
            arrival(request),
            Finished(request.id, FinishReason.UNREACHABLE, 1, 0, 0, "it needs 9 s"),
        )

    monkeypatch.setattr(house.engine, "submit", refuse)
    answer = house.client.post(PATH, json={"prompt": "x", "stream": stream, "deadline_ms": 500})
    assert answer.status_code == 408
    assert answer.json()["error"]["code"] == "deadline_unreachable"
    assert "it needs 9 s" in answer.json()["error"]["message"]


def test_a_deadline_in_the_middle_is_an_event(house, monkeypatch):
    time_runs_out(house, monkeypatch)
    answer = house.client.post(
        PATH, json={"prompt": "x", "stream": True, "max_tokens": 200, "ignore_eos": True}
    )
    assert answer.status_code == 200
    *chunks, error, done, _ = answer.text.split("\n\n")
    assert chunks
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
    assert done == "data: [DONE]"


def open_after_pings(house, monkeypatch, count: int) -> None:
    """Hold the runner back until a stream has written so many comments, however long that takes."""
    monkeypatch.setattr(replies, "PING_SECONDS", 0.02)
    house.runner.gate.clear()
    write, pings = replies.StreamedAnswer._write, []

    async def counting(self, data: bytes, more: bool = True) -> None:
        await write(self, data, more)
        pings.extend([data] if data == replies.PING else [])
        if len(pings) >= count:
            house.runner.gate.set()

    monkeypatch.setattr(replies.StreamedAnswer, "_write", counting)


def test_silence_is_filled_with_comments(house, monkeypatch):
    open_after_pings(house, monkeypatch, 2)
    answer = house.client.post(PATH, json={"prompt": "x", "stream": True})
    assert answer.text.startswith(": ping\n\n: ping\n\n")
    assert answer.text.endswith("data: [DONE]\n\n")


def test_what_fails_after_a_comment_is_an_event(house, monkeypatch):
    open_after_pings(house, monkeypatch, 1)
    house.runner.crash = True
    answer = house.client.post(PATH, json={"prompt": "x", "stream": True})
    assert answer.status_code == 200
    assert '"type": "server_error"' in answer.text
    assert answer.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("stream", [False, True])
def test_an_exception_in_detokenizing_fails_that_request_alone(house, stream, monkeypatch):
    def broken(self, tokens):
        raise ZeroDivisionError("inside")

    with monkeypatch.context() as patch:
        patch.setattr(TextStream, "push", broken)
        answer = house.client.post(PATH, json={"prompt": "x", "stream": stream, "max_tokens": 100})
    assert answer.status_code == 500
    assert "inside" not in answer.text
    quiet(house)
    assert house.client.post(PATH, json={"prompt": "x"}).status_code == 200


def test_draining_ends_unfinished_streams_with_an_error(house):
    def close_all() -> None:
        while not house.service.open_requests():
            time.sleep(0.005)
        house.service._loop.call_soon_threadsafe(house.service.close_all)

    house.runner.gate.clear()
    threading.Thread(target=close_all, daemon=True).start()
    answer = house.client.post(PATH, json={"prompt": "x", "max_tokens": 200, "ignore_eos": True})
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "draining"
    assert "retry-after" in answer.headers
    house.runner.gate.set()
    quiet(house)
    assert ends(house) == [FinishReason.CANCELLED]


@pytest.mark.parametrize("options", [{"queued_requests": 2}])
def test_a_call_with_more_answers_than_the_queue_holds_is_refused_whole(house):
    answer = house.client.post(PATH, json={"prompt": "x", "n": 3})
    assert answer.status_code == 400  # coming again would not help
    assert answer.json()["error"]["code"] == "invalid_value"
    house.lookup.service.count()
    assert ends(house) == [FinishReason.REJECTED] * 3  # told to those who count, not to the engine
    assert house.service.open_requests() == 0


def test_each_request_ends_exactly_once(house):
    for body in ({"n": 3}, {"stop": "fox"}, {"stop": "fox", "stream": True, "n": 2}, {"prompt": ["a", "b"]}):
        assert house.client.post(PATH, json={"prompt": "x", "max_tokens": 50} | body).status_code == 200
    quiet(house)
    finished = [event.request_id for event in house.seen if isinstance(event, Finished)]
    assert len(finished) == len(set(finished)) == 8


def test_an_error_event_ends_its_stream():
    assert error_event(b'{"error": 1}') == b'data: {"error": 1}\n\n' + DONE
