"""An engine behind a socket, as the service sees it: here its host runs on a thread of the test."""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
import time

import pytest

from headrace.core.events import Emitted, Finished
from headrace.core.images import ImageSpan
from headrace.core.request import FinishReason, Request, SamplingParams
from headrace.service.engine_host import EngineHost
from headrace.service.engine_process import EngineProcess, FromEngine
from headrace.service.packing import Frames, pack_events
from headrace.testing.engines import hashing_engine
from headrace.testing.hashing_runner import expected_tokens
from tests.doubles.engine_processes import Child, House, house, read
from tests.doubles.services import SOON, Leash, request

pytestmark = pytest.mark.anyio


async def test_requests_are_answered_as_in_the_same_process():
    async with house() as h:
        wanted = [request(str(number), 4 + number, (number + 1, 2)) for number in range(6)]
        answers = [h.service.open([each]) for each in wanted]
        for each, answer in zip(wanted, answers, strict=True):
            events = await read(answer)
            tokens = [token for event in events if isinstance(event, Emitted) for token in event.tokens]
            assert tokens == expected_tokens(each.tokens, 0, 4 + int(each.id), frozenset())
            assert events[-1].reason is FinishReason.LENGTH
            h.service.close(answer)
        assert h.process.progress()._replace(steps=0) == (True, 0, 0, 0.0, "", "")
        assert h.process.progress().steps > 4
        assert h.service.open_requests() == 0


async def test_a_cancelled_request_ends_in_the_engine_too():
    engine, runner = hashing_engine(overlap=1)
    leash = Leash(runner, 3)
    async with house(engine=engine) as h:
        answer = h.service.open([request("a", 100)])
        await asyncio.wait_for(answer.read(), SOON)
        h.service.close(answer)
        leash.free.set()
        assert (await read(answer))[-1].reason is FinishReason.CANCELLED
        assert await h.service.drain(SOON)
        assert not h.engine.scheduler.live


class HeldImages:
    """What an `EngineHost` has received of requests with images, once a test lets it go on."""

    def __init__(self, h: House, fails: bool = False) -> None:
        self.reached, self.go, self.fails = threading.Event(), threading.Event(), fails
        h.host._received = self

    def __call__(self, request: Request) -> Request:
        self.reached.set()
        assert self.go.wait(SOON)
        if self.fails:
            raise OSError("no memory")
        return request


def image_request(name: str, max_tokens: int = 5) -> Request:
    return Request(
        name, (1, 9, 9), SamplingParams(max_tokens=max_tokens), images=(ImageSpan(1, 2, bytes(32), 7),)
    )


async def test_other_requests_do_not_wait_while_the_images_of_one_are_read():
    engine, _ = hashing_engine(num_blocks=5000, max_model_len=20_000)
    async with house(engine=engine) as h:
        held = HeldImages(h)
        first = h.service.open([image_request("a")])
        await asyncio.to_thread(held.reached.wait, SOON)
        endless = request("c", 10_000)  # it is cancelled before it has so many tokens
        answers = [h.service.open([each]) for each in (request("b"), endless)]
        assert (await read(answers[0]))[-1].reason is FinishReason.LENGTH
        h.service.close(answers[1])
        assert (await read(answers[1]))[-1].reason is FinishReason.CANCELLED
        while h.process.progress().open_requests > 1:
            await asyncio.sleep(0.001)
        held.go.set()
        assert (await read(first))[-1].reason is FinishReason.LENGTH


async def test_a_request_that_is_cancelled_while_its_images_are_read_ends_once():
    engine, runner = hashing_engine(overlap=1)
    leash = Leash(runner, 1)
    async with house(engine=engine) as h:
        held = HeldImages(h)
        answers = [h.service.open([image_request(name, 100)]) for name in "ab"]
        await asyncio.to_thread(held.reached.wait, SOON)
        for each in answers:
            h.service.close(each)
        await asyncio.sleep(0.02)
        held.go.set()
        leash.free.set()
        ends = [event for each in answers for event in await read(each) if isinstance(event, Finished)]
        assert [each.reason for each in ends] == [FinishReason.CANCELLED] * 2
        assert await h.service.drain(SOON)
        assert not h.engine.scheduler.live
        assert not h.host._awaited


async def test_an_engine_that_cannot_read_images_fails():
    async with house() as h:
        held = HeldImages(h, fails=True)
        held.go.set()
        answer = h.service.open([image_request("a")])
        assert (await read(answer))[-1].reason is FinishReason.FAILED
        assert h.process.progress().failure == "OSError: no memory"


async def test_a_question_is_answered_between_two_steps():
    async with house() as h:
        assert await h.service.between_steps(lambda: h.process.ask("estimate_start", "nobody")) is None
        assert h.questions == [("estimate_start", "headrace-engine")]


async def test_a_question_that_fails_says_why():
    async with house() as h:
        with pytest.raises(RuntimeError, match="no_such_question"):
            await h.service.between_steps(lambda: h.process.ask("no_such_question"))
        assert not h.process.progress().failure


async def test_counts_arrive_without_a_step():
    async with house() as h:
        h.engine.scheduler.pool.reset()
        while h.process.counts is None:
            await asyncio.sleep(0.01)
        assert h.process.counts == 0


async def test_a_process_that_is_killed_fails_what_is_open_and_what_comes_later():
    engine, runner = hashing_engine(overlap=1)
    leash = Leash(runner, 3)
    async with house(code=-9, engine=engine) as h:
        answer = h.service.open([request("a", 100)])
        await asyncio.wait_for(answer.read(), SOON)
        h.theirs.shutdown(socket.SHUT_RDWR)
        leash.free.set()
        end = (await read(answer))[-1]
        assert end.reason is FinishReason.FAILED
        assert end.message == "the engine failed"
        health = h.service.health()
        assert not health.well
        assert health.why == "the engine failed"
        assert health.progress.failure == "its process ended by SIGKILL"
        later = h.service.open([request("b")])
        assert (await read(later))[-1].reason is FinishReason.FAILED
        assert h.service.open_requests() == 0
        assert not h.service.stop()


async def test_a_question_to_a_process_that_has_ended_fails():
    async with house(code=3) as h:
        h.theirs.shutdown(socket.SHUT_RDWR)
        while not h.process.progress().failure:
            await asyncio.sleep(0.01)
        assert h.process.progress().failure == "its process ended with exit status 3"
        with pytest.raises(RuntimeError, match="the engine failed"):
            await h.service.between_steps(lambda: h.process.ask("estimate_start", "a"))


async def test_a_process_that_closes_its_socket_and_goes_on_is_killed():
    async with house(code=0) as h:
        h.theirs.shutdown(socket.SHUT_RDWR)
        while not h.process.progress().failure:
            await asyncio.sleep(0.01)
        assert h.process.progress().failure == "its process ended by SIGKILL"


async def test_an_engine_that_fails_ends_all_its_requests():
    engine, runner = hashing_engine()

    def launch(plan, now):
        raise ZeroDivisionError

    async with house(engine=engine) as h:
        runner.launch = launch
        answer = h.service.open([request("a")])
        assert (await read(answer))[-1].reason is FinishReason.FAILED
        assert h.service.health().progress.failure.startswith("ZeroDivisionError")
        later = h.service.open([request("b")])
        assert (await read(later))[-1].reason is FinishReason.FAILED


async def test_stopping_ends_the_host_and_returns_what_it_has_saved():
    async with house() as h:
        answer = h.service.open([request("a")])
        await read(answer)
        assert h.service.stop()
        assert h.service.stop()  # a second time it is known
        assert h.process.close() == "3 blocks are saved"
        h.thread.join(SOON)
        assert h.halted
        assert not h.process.progress().alive


async def test_the_host_stops_when_the_server_has_ended():
    async with house() as h:
        h.service.open([request("a", 100)])
        h.process.end()
        h.thread.join(SOON)
        assert not h.thread.is_alive()


async def test_a_message_larger_than_the_socket_takes_arrives_in_pieces():
    engine, _ = hashing_engine(num_blocks=60_000, block_size=4, max_model_len=200_000)
    async with house(engine=engine) as h:
        wanted = request("long", 2, tuple(range(100_000)))
        answer = h.service.open([wanted])
        other = h.service.open([request("short", 2)])
        assert (await read(answer))[-1].prompt_tokens == 100_000
        assert (await read(other))[-1].reason is FinishReason.LENGTH


def test_counts_never_go_back():
    """Whoever reads the counts sends them before anyone reads again."""
    ours, theirs = socket.socketpair()
    engine, _ = hashing_engine()
    counted = itertools.count()

    def slow() -> int:
        count = next(counted)
        time.sleep(0.001 * (count % 3))  # without order, a later count overtakes an earlier one
        return count

    with ours, theirs:
        host = EngineHost(theirs, engine, lambda name, arguments: None, slow)
        host._ended.wait = lambda seconds: None  # type: ignore[method-assign]
        counting = threading.Thread(target=host._send_counts)
        counting.start()
        for _ in range(40):
            host._deliver([], 0.0)
        host._ended.set()
        counting.join(SOON)
        theirs.shutdown(socket.SHUT_WR)
        frames, messages = Frames(), []
        while received := ours.recv(1 << 20):
            messages += frames.feed(received)
    counts = [message[3] if message[0] == FromEngine.EVENTS else message[1] for message in messages]
    assert len(counts) > 40
    assert counts == sorted(counts)


async def test_a_request_ends_once_although_two_sides_report_its_end():
    ours, theirs = socket.socketpair()
    process, ended = EngineProcess(ours, Child(-9)), []
    process.listen(lambda events, now: ended.extend(event.request_id for event in events))
    process.start()
    reported = pack_events([Finished("a", FinishReason.FAILED, 3, 0, 0, "")])
    with theirs:
        process.submit(request("a"))
        process._take((FromEngine.EVENTS, 1.0, 1, None, reported))
        process._take((FromEngine.EVENTS, 1.0, 2, None, reported))
        assert ended == ["a"]
        process.end()


async def test_a_request_that_cannot_be_sent_is_not_open():
    async with house() as h:
        with pytest.raises(ValueError, match="unmarshallable"):
            h.process.submit(request("a", prompt=(object(),)))
        assert h.process.progress().open_requests == 0
        assert h.process.progress().stalled_seconds == 0.0
        with pytest.raises(ValueError, match="unmarshallable"):
            await h.service.between_steps(lambda: h.process.ask("estimate_start", object()))
        assert (await read(h.service.open([request("b")])))[-1].reason is FinishReason.LENGTH
