"""Requests of Dynamo answered by an engine: tokens, ends, cancellation, drain; without Dynamo."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from headrace.core.request import FinishReason, InvalidParameter
from headrace.fleet.dynamo.answering import RequestFailed
from headrace.service.service import Refused
from headrace.testing.hashing_runner import expected_tokens
from tests.fleet.dynamo.workers import answering, body, collected
from tests.service.test_service import Leash

SOON = 60.0


async def idle(worker) -> None:
    async with asyncio.timeout(SOON):
        while worker.service.open_requests():
            await asyncio.sleep(0.001)


def test_a_request_gets_its_tokens_and_one_end() -> None:
    async def run() -> None:
        async with answering() as worker:
            tokens, chunks = await collected(worker.generate(body(), "a"))
            assert tokens == expected_tokens((1, 2, 3), 1, 5, frozenset())
            ends = [chunk for chunk in chunks if "finish_reason" in chunk]
            assert ends == [chunks[-1]]
            assert ends[0]["finish_reason"] == "length"
            assert ends[0]["completion_usage"]["total_tokens"] == 8

    asyncio.run(run())


def test_a_repeated_prompt_reports_cached_tokens_and_a_salt_separates() -> None:
    async def run() -> None:
        async with answering() as worker:
            prompt = tuple(range(1, 18))
            cached = []
            for number, salt in enumerate(("", "", "acme", "acme")):
                asked = {**body(*prompt), "extra_args": {"nvext": {"cache_salt": salt}}}
                _, chunks = await collected(worker.generate(asked, f"r{number}"))
                cached.append(chunks[-1]["completion_usage"]["prompt_tokens_details"]["cached_tokens"])
            assert cached == [0, 16, 0, 16]

    asyncio.run(run())


def test_an_aborted_request_ends_as_cancelled_and_leaves_nothing() -> None:
    async def run() -> None:
        async with answering() as worker:
            seen, leash = [], Leash(worker.runner, 3)
            async for chunk in worker.generate(body(max_tokens=190), "a"):
                seen.append(chunk)
                worker.abort("a")
                leash.free.set()
            assert seen[-1]["finish_reason"] == "cancelled"
            await idle(worker)
            worker.abort("a")

    asyncio.run(run())


def test_a_stream_that_is_left_ends_its_request() -> None:
    async def run() -> None:
        async with answering() as worker:
            async with aclosing(worker.generate(body(max_tokens=190), "a")) as chunks:
                await anext(chunks)
            await idle(worker)

    asyncio.run(run())


def test_a_draining_worker_refuses_new_requests_and_completes_open_ones() -> None:
    async def run() -> None:
        async with answering() as worker:
            open_one = asyncio.create_task(collected(worker.generate(body(max_tokens=100), "a")))
            while not worker.service.open_requests():
                await asyncio.sleep(0)
            draining = asyncio.create_task(worker.drain(SOON))
            while not worker.service.draining:
                await asyncio.sleep(0)
            with pytest.raises(Refused, match="shutting down"):
                await collected(worker.generate(body(), "b"))
            tokens, _ = await open_one
            assert len(tokens) == 100
            await draining

    asyncio.run(run())


def test_a_drain_that_takes_too_long_cuts_requests_off() -> None:
    async def run() -> None:
        async with answering() as worker:
            chunks = worker.generate(body(max_tokens=190), "a")
            first = await anext(chunks)
            await worker.drain(0.0)
            rest = [first] + [chunk async for chunk in chunks]
            assert rest[-1]["finish_reason"] in ("cancelled", "length")
            await idle(worker)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("tokens", "words"), [((1, 1000), "token id 1000"), (tuple(range(200)), "the limit is 199")]
)
def test_a_prompt_that_cannot_be_served_is_refused(tokens: tuple[int, ...], words: str) -> None:
    async def run() -> None:
        async with answering() as worker:
            with pytest.raises(InvalidParameter, match=words):
                await collected(worker.generate(body(*tokens), "a"))
            assert not worker.service.open_requests()

    asyncio.run(run())


def test_a_request_that_fails_is_an_exception_with_the_cause() -> None:
    async def run() -> None:
        async with answering() as worker:
            leash, chunks = Leash(worker.runner, 3), worker.generate(body(max_tokens=190), "a")
            await anext(chunks)
            leash.free.set()
            worker.service.withdraw(worker._answers["a"], FinishReason.TIMEOUT)
            with pytest.raises(RequestFailed, match="timeout"):
                async for _ in chunks:
                    pass

    asyncio.run(run())
