"""The client against a small server that speaks the wire, well and badly."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from aiohttp import web

from headrace.lab.bench.client import Answer, Endpoint, offer, run_loop
from headrace.lab.bench.stats import Record, meets
from headrace.lab.workload.work import Message, Work


class FakeServer:
    """Streams ``max_tokens`` chunks to whoever asks; a prompt text may ask it to misbehave."""

    def __init__(self) -> None:
        self.bodies: list[tuple[str, dict[str, Any]]] = []
        self.connections: set[Any] = set()
        self.open = self.most_open = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append((request.path, body))
        self.connections.add(request.transport)
        if body.get("prompt") == "refuse":
            return web.json_response({"error": {"message": "queue is full"}}, status=503)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            await self.stream(response, body)
        finally:
            self.open -= 1
        return response

    async def stream(self, response: web.StreamResponse, body: dict[str, Any]) -> None:
        async def send(choices: list[dict[str, Any]], **more: Any) -> None:
            await response.write(f"data: {json.dumps({'choices': choices, **more})}\n\n".encode())

        prompt = body.get("prompt")
        await response.write(b": ping\n\n")
        for number in range(body["max_tokens"]):
            await asyncio.sleep(0.002)
            text = f"w{number} é"
            part = {"delta": {"content": text}} if "messages" in body else {"text": text}
            await send([{"index": 0, "finish_reason": None, **part}])
            if prompt == "break":
                await response.write(b'data: {"error": {"message": "it broke"}}\n\ndata: [DONE]\n\n')
                return
            if prompt == "vanish":
                return
            if prompt == "garble":
                await response.write(b"data: {oops\n\ndata: 1\n\n")
        await send([{"index": 0, "text": "", "finish_reason": "length"}])
        count = body["max_tokens"] - (1 if prompt == "miscount" else 0)
        usage = {
            "prompt_tokens": 7,
            "completion_tokens": count,
            "prompt_tokens_details": {"cached_tokens": 3},
        }
        await send([], usage=usage)
        await response.write(b"data: [DONE]\n\n")


def ask_all(work: Sequence[Work], concurrency: int | None = None) -> tuple[list[Record], FakeServer]:
    async def run() -> tuple[list[Record], FakeServer]:
        server = FakeServer()
        app = web.Application()
        app.router.add_post("/v1/completions", server.answer)
        app.router.add_post("/v1/chat/completions", server.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        try:
            extra = {"return_token_ids": False}
            endpoint = Endpoint(f"http://{host}:{port}/v1", "toy", "key", extra)
            return await offer(endpoint, work, concurrency), server
        finally:
            await runner.cleanup()

    return run_loop(run())


def test_text_ids_and_chats_go_to_their_address_and_are_measured() -> None:
    chat = (Message("user", "hello"),)
    work = [Work("text", "hi", 3), Work("ids", (1, 2), 4, ignore_eos=True), Work("chat", chat, 5)]
    records, server = ask_all(work)
    assert [record.error for record in records] == ["", "", ""]
    assert [record.output_tokens for record in records] == [3, 4, 5]
    assert [len(record.token_seconds) for record in records] == [3, 4, 5]
    assert {(r.prompt_tokens, r.cached_tokens, r.finish_reason) for r in records} == {(7, 3, "length")}
    for record in records:
        times = [record.arrived, *record.token_seconds, record.finished]
        assert times == sorted(times)
    sent = {path: body for path, body in server.bodies if "messages" in body or body["prompt"] == [1, 2]}
    assert sent["/v1/chat/completions"]["messages"] == [{"role": "user", "content": "hello"}]
    assert sent["/v1/completions"]["ignore_eos"] is True
    assert all("ignore_eos" not in body for _, body in server.bodies if body.get("prompt") == "hi")
    assert all(body["return_token_ids"] is False and body["stream"] is True for _, body in server.bodies)


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ("refuse", "HTTP 503"),
        ("break", "it broke"),
        ("vanish", "without a finish_reason"),
        ("garble", "not a JSON object: b'{oops'"),
        ("miscount", "exactly 3 tokens, got 2"),
    ],
)
def test_an_answer_that_did_not_end_properly_is_an_error_of_its_own(prompt: str, error: str) -> None:
    bad, good = ask_all([Work("bad", prompt, 3, ignore_eos=True), Work("good", "hi", 3)])[0]
    assert error in bad.error
    assert not good.error


def test_a_closed_loop_keeps_its_concurrency_and_counts_from_sending() -> None:
    records, server = ask_all([Work(f"w{i}", "hi", 3) for i in range(9)], concurrency=3)
    assert server.most_open == 3
    assert max(record.arrived for record in records) > 0.0
    assert all(record.ttft is not None and record.ttft < record.e2e for record in records)


def test_a_connection_is_reused() -> None:
    records, server = ask_all([Work(f"w{i}", "hi", 2) for i in range(4)], 1)
    assert [record.error for record in records] == [""] * 4
    assert len(server.connections) == 1


def test_an_open_loop_counts_from_the_time_a_request_was_due() -> None:
    work = [Work(f"w{i}", "hi", 2, arrival=0.01 * i) for i in range(5)]
    records, server = ask_all(work, concurrency=1)
    assert server.most_open == 1
    assert [record.arrived for record in records] == [each.arrival for each in work]


def test_a_server_that_is_not_there() -> None:
    record = run_loop(offer(Endpoint("http://127.0.0.1:9", "toy"), [Work("a", "hi", 1)]))[0]
    assert "ConnectionRefusedError" in record.error


END = {"choices": [{"text": "", "finish_reason": "stop"}], "usage": {"completion_tokens": 1}}


def answered(*chunks: object) -> Record:
    """The record of an answer that is these chunks, a second apart."""
    answer = Answer()
    for second, chunk in enumerate((*chunks, END)):
        answer.feed(f"data: {json.dumps(chunk)}\n\n".encode(), float(second))
    answer.feed(b"data: [DONE]\n\n", 9.0)
    return answer.record(Work("a", "x", 9), 0.0, 10.0)


@pytest.mark.parametrize(
    ("chunk", "error"),
    [
        ({"error": "it broke"}, "it broke"),
        ({"error": {"message": "it broke"}}, "it broke"),
        ({"choices": [None]}, "AttributeError"),
        ({"choices": 7}, "TypeError"),
        ({"choices": [{"delta": "word"}]}, "AttributeError"),
        ({"usage": {"completion_tokens": "many"}}, "ValueError"),
        ({"usage": {"prompt_tokens_details": 3}}, "AttributeError"),
    ],
)
def test_an_odd_event_is_an_error_of_its_answer_alone(chunk: object, error: str) -> None:
    assert error in answered(chunk).error


def test_an_event_without_choices_is_none_of_the_answer() -> None:
    record = answered({"choices": None}, {"id": "x"}, {"choices": [{"text": "a"}]})
    assert (record.error, record.token_seconds) == ("", (2.0,))


@pytest.mark.parametrize("part", ["content", "reasoning_content", "reasoning", "tool_calls"])
def test_whatever_a_chat_answers_with_has_its_time(part: str) -> None:
    record = answered({"choices": [{"delta": {part: "a"}}]}, {"choices": [{"delta": {"role": "assistant"}}]})
    assert (record.error, record.token_seconds) == ("", (0.0,))


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_chunks_cut_anywhere_read_the_same(cut: int) -> None:
    def line(text: str) -> str:
        return f'data: {{"choices": [{{"text": "{text}", "token_ids": [5]}}]}}\n\n'

    wire = (line("é") + ": ping\r\n\r\n" + line("b")).encode()
    wire += b'data: {"choices": [{"text": "", "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'
    answer = Answer()
    for start in range(0, len(wire), cut):
        answer.feed(wire[start : start + cut], float(start))
    record = answer.record(Work("a", "x", 9), 0.0, 1000.0)
    assert (record.error, record.output_tokens, len(record.token_seconds)) == ("", 2, 2)


def test_requests_carry_tenant_and_priority() -> None:
    endpoint = Endpoint("http://host", "toy", api_key="secret")
    plain, reported = Work("a", "hi", 1), Work("b", "hi", 1, tenant="acme", service_class="flex")
    assert endpoint.headers(plain) == {"Authorization": "Bearer secret"}
    assert endpoint.headers(reported) == {"Authorization": "Bearer secret", "X-Tenant-Id": "acme"}
    assert "service_tier" not in endpoint.body(plain)
    assert endpoint.body(reported)["service_tier"] == "flex"
    record = Answer().record(reported, 0.0, 1.0, "gone")
    assert (record.tenant, record.service_class) == ("acme", "flex")


def test_an_end_token_without_text_counts_in_the_time_per_token() -> None:
    parts = [{"choices": [{"text": text}]} for text in "abc"]
    answer = Answer()
    for second, chunk in enumerate((*parts, END | {"usage": {"completion_tokens": 4}})):
        answer.feed(f"data: {json.dumps(chunk)}\n\n".encode(), float(second))
    answer.feed(b"data: [DONE]\n\n", 9.0)
    record = answer.record(Work("a", "x", 9), 0.0, 10.0)
    assert (record.ended, record.tpot, record.gaps) == (3.0, 1.0, [1.0, 1.0])


def test_tokens_without_text_count_the_time_of_the_first() -> None:
    answer = Answer()
    for now, choice in (
        (1.0, {"delta": {"role": "assistant", "content": ""}}),
        (2.0, {"delta": {"content": ""}}),
        (3.0, {"delta": {"content": ""}}),
        (4.0, {"delta": {}, "finish_reason": "length"}),
    ):
        answer.feed(f"data: {json.dumps({'choices': [choice]})}\n\n".encode(), now)
    answer.feed(b'data: {"choices": [], "usage": {"completion_tokens": 3}}\n\ndata: [DONE]\n\n', 4.0)
    record = answer.record(Work("w", "prompt", 3), 0.5, 4.0)
    assert not record.error
    assert record.ttft == 1.5
    assert record.tpot == 1.0
    assert meets(record, {"ttft": 1.5})


def test_an_end_without_any_text_counts_as_the_first_token() -> None:
    answer = Answer()
    answer.feed(b'data: {"choices": [{"text": "", "finish_reason": "stop"}]}\n\n', 2.0)
    answer.feed(b'data: {"choices": [], "usage": {"completion_tokens": 1}}\n\ndata: [DONE]\n\n', 2.1)
    assert answer.record(Work("w", "prompt", 3), 0.5, 2.1).ttft == 1.5
