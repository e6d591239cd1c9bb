"""Whole and streamed responses."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.api import replies
from headrace.api.compile.bodies import ChatBody
from headrace.api.compile.call import Call, Choice, Prompt
from headrace.api.exchange import PARTS, Turn
from headrace.api.openai.writers import ChatWriter
from headrace.api.replies import (
    DONE,
    PIECE_VALUES,
    encode,
    encode_lines,
    encode_text,
    error_event,
    pieces,
    written,
)
from headrace.core.events import Emitted, Finished, arrival
from headrace.core.request import FinishReason, Request, SamplingParams
from headrace.service.answer import Answer
from headrace.text.stream import TextStream, TextStreams
from tests.api.conftest import time_runs_out
from tests.text.vocabularies import byte_level

PATH = "/v1/completions"


def ends(house) -> list[FinishReason]:
    return [event.reason for event in house.counted() if isinstance(event, Finished)]


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
    house.quiet()
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
    house.quiet()
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
    house.quiet()
    assert ends(house) == [FinishReason.CANCELLED]


@pytest.mark.parametrize("options", [{"queued_requests": 2}])
def test_a_call_with_more_answers_than_the_queue_holds_is_refused_whole(house):
    answer = house.client.post(PATH, json={"prompt": "x", "n": 3})
    assert answer.status_code == 400  # coming again would not help
    assert answer.json()["error"]["code"] == "invalid_value"
    assert ends(house) == [FinishReason.REJECTED] * 3  # told to those who count, not to the engine
    assert house.service.open_requests() == 0


def test_each_request_ends_exactly_once(house):
    for body in ({"n": 3}, {"stop": "fox"}, {"stop": "fox", "stream": True, "n": 2}, {"prompt": ["a", "b"]}):
        assert house.client.post(PATH, json={"prompt": "x", "max_tokens": 50} | body).status_code == 200
    house.quiet()
    finished = [event.request_id for event in house.counted() if isinstance(event, Finished)]
    assert len(finished) == len(set(finished)) == 8


def test_an_error_event_ends_its_stream():
    assert error_event(b'{"error": 1}') == b'data: {"error": 1}\n\n' + DONE


class Parts:
    """`exchange.ResponseParts` that collect; ``ready`` as it is set."""

    def __init__(self, written: list[bytes]) -> None:
        self.ready = True
        self.sent = 0
        self._written = written

    def update(self) -> None:
        pass

    def write(self, part: bytes) -> None:
        assert self.ready
        self.sent += len(part)
        self._written.append(part)

    def soon(self, turn: Turn) -> None:
        asyncio.get_running_loop().call_soon(turn.turn)

    async def join(self, sending: Awaitable[None]) -> None:
        await sending

    def watch(self, gone: Callable[[], None]) -> None:
        pass

    def unwatch(self) -> None:
        pass


class Ends:
    """The part of `Answers` that a call uses while it is read."""

    def __init__(self) -> None:
        self.stopped = 0

    def close(self, answer: Answer, why: FinishReason = FinishReason.CANCELLED) -> None:
        pass

    def stop_sequence(self, answer: Answer, index: int) -> None:
        self.stopped += 1


STREAMS = TextStreams(byte_level())
TOKENS = byte_level().encode('The naïve fox 😀 jumps over 日本語\u2028 "END" of it', add_special_tokens=False)


def steps_of(seed: int) -> list[tuple[list[Emitted | Finished], bool]]:
    """The events of the steps of one stream, and whether its client reads in time at each."""
    draw = random.Random(seed)
    steps: list[tuple[list[Emitted | Finished], bool]] = []
    for _ in range(30):
        tokens = [
            draw.choice([*TOKENS, byte_level().eos_token_id]) for _ in range(draw.choice([1, 1, 1, 2, 40]))
        ]
        emitted = [Emitted("r", tuple(tokens))] * draw.choice([1, 1, 1, 2])
        steps.append((list(emitted), draw.random() < 0.8))
    stop = draw.random() < 0.5
    last = Finished(
        "r", FinishReason.STOP if stop else FinishReason.LENGTH, 1, 1, 0, "", TOKENS[0] if stop else None
    )
    return [*steps, ([Emitted("r", (TOKENS[0],)), last], True)]


def streamed(seed: int, around_text: bool, fields: dict[str, Any]) -> tuple[list[bytes], int]:
    """What a stream writes, and the bytes of it that were written as parts."""
    body = ChatBody.model_validate({"model": "m", "messages": [{"role": "user", "content": "x"}]} | fields)
    params = SamplingParams(stop=("over",) if body.stop else (), stop_token_ids=frozenset({TOKENS[0]}))
    request = Request("r", (1,), params)
    answer = Answer([request], 1)
    choice = Choice(0, request, STREAMS.open(stop=params.stop))
    model: Any = SimpleNamespace(fingerprint="f", sharing=SimpleNamespace(answer=lambda asked: {}), cost=None)
    call = Call("c", model, "m", [Prompt((1,), params, False)], [choice], Ends(), answer, 1.0, stream=True)
    call.created = 0
    writer = ChatWriter(call, body)
    if not around_text:
        writer.around_text = lambda choice: None  # type: ignore[method-assign]
    written: list[bytes] = []
    parts = Parts(written)

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            written.append(message["body"])

    async def run() -> None:
        async def receive() -> Any:
            await asyncio.sleep(60)

        task = asyncio.create_task(replies.StreamedAnswer(call, writer, {})({PARTS: parts}, receive, send))
        for events, ready in steps_of(seed):
            parts.ready = ready
            for event in events:
                answer.tell(0, event)
            await turns(6)
        await task

    asyncio.run(run())
    assert choice.output_tokens == call.tokens()["completion_tokens"]
    return written, parts.sent


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    "fields",
    [{}, {"stream_options": {"include_usage": True}}, {"stop": "over"}, {"return_token_ids": True}],
    ids=["plain", "usage", "stop", "ids"],
)
def test_a_token_that_only_adds_text_is_written_as_any_other(seed, fields, monkeypatch):
    monkeypatch.setattr(replies, "LARGE_TOKENS", 1 << 30)  # on a thread, steps would join as they come
    fields = {"stream": True} | fields
    short, sent = streamed(seed, True, fields)
    long, _ = streamed(seed, False, fields)
    assert short == long
    assert sent or "stop" in fields
    text = "".join(
        json.loads(line.removeprefix("data: "))["choices"][0]["delta"].get("content", "")
        for line in b"".join(short).decode().split("\n\n")
        if '"delta"' in line
    )
    assert text


def test_an_error_in_a_turn_ends_only_its_stream(caplog):
    """What a turn raises is raised by its stream's task."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Choice, "plain_text", lambda self, tokens: 1 / 0)
        written, _ = streamed(0, True, {"stream": True})
    assert written[-1].endswith(DONE)
    assert b"server_error" in written[-1]
    assert "ZeroDivisionError" in caplog.text


def values_of(value: Any) -> int:
    """The values in ``value``, keys included; a text counts by its length."""
    if isinstance(value, str):
        return 1 + len(value) // replies.VALUE_CHARACTERS
    if isinstance(value, dict):
        return 1 + len(value) + sum(map(values_of, value.values()))
    return 1 + sum(map(values_of, value)) if isinstance(value, (list, tuple)) else 1


ENTRY = {"token": "a", "logprob": -0.5, "bytes": [97, 98]}
LONG = [
    {"content": [ENTRY | {"top_logprobs": [ENTRY] * 20} for _ in range(300)], "refusal": None},
    [{"index": index, "logprobs": {"content": [ENTRY] * 2_000}} for index in range(16)],
    {"prompt_logprobs": [None, *({str(at): ENTRY for at in range(21)} for _ in range(500))]},
    {"token_ids": tuple(range(100_000)), "none": [], "empty": {}},
    [0] * 50 + [[1] * 20_000] + [0] * 50,
    {"text": 'é"\\\u2028\U0001f600' * 200_000},
    [["x" * 200_000] * 3, {"a": "y" * 600_000}],
    [[]] * 10_000,
]


@pytest.mark.parametrize("value", LONG)
def test_no_call_of_the_encoder_writes_many_values(value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def counted(part: Any) -> str:
        calls.append(values_of(part))
        return encode(part)

    monkeypatch.setattr(replies, "encode", counted)
    assert written(value) == encode(value).encode()
    assert max(calls) <= PIECE_VALUES
    assert len(calls) < 8 + 8 * values_of(value) / PIECE_VALUES + 3 * 500  # few of them are short


@pytest.mark.parametrize("value", [None, 1.5, "a", [], {}, [1, {"a": [None, True]}], "é\u2028"])
def test_what_is_short_is_written_in_one_call(value: Any) -> None:
    assert list(pieces(value)) == [encode(value)]


def test_lines_have_no_line_breaks() -> None:
    value = {"a\u2028": ["b\x85"] * 10_000}
    shown = encode_lines(value)
    assert json.loads(shown) == value
    assert len(shown.splitlines()) == 1


@pytest.mark.parametrize(
    "text", ['plain "quoted" \\ text', "a\nb\r\tc\x00\x1f", "naïve 日本 😀", "a\u2028b\u2029c\x85d é"]
)
def test_text_survives_and_stays_on_its_line(text):
    shown = encode_text(text)
    assert json.loads(shown) == text
    assert len(shown.splitlines()) == 1


def test_text_is_not_escaped_without_need():
    assert encode_text("日本") == '"日本"'


def test_what_json_cannot_say_is_never_written():
    with pytest.raises(ValueError, match="JSON"):
        encode({"x": float("nan")})
