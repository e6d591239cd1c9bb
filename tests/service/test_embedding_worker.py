"""Slices between steps: decoding goes on, tenants take turns, cancelled calls leave, failures stay alone."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from headrace.core.embedding import Embedded, TokenRow
from headrace.core.events import Event
from headrace.core.request import FinishReason, RejectReason
from headrace.core.tenancy.gate import Limits
from headrace.core.tenancy.quota import Limit
from headrace.core.tenancy.tenants import TenantLimits, Tenants, TenantTerms
from headrace.service.embedding_worker import EmbeddingFailed, EmbeddingJob, EmbeddingWorker
from headrace.service.quota_meter import QuotaMeter
from headrace.service.service import Refused, Service
from tests.doubles.pooling_models import LetterModel
from tests.doubles.services import Book, end_of, read_all, request, serving

SOON = 60.0
LIMITS = Limits(8, 1000)


def job(
    service: Service, model: LetterModel, *rows: tuple[int, ...], tenant: str = "a", name: str = "j"
) -> EmbeddingJob:
    return EmbeddingJob(name, tenant, "embed", model, [TokenRow(tokens) for tokens in rows], service.now())


async def result_of(worker: EmbeddingWorker, one: EmbeddingJob) -> np.ndarray:
    worker.submit(one)
    try:
        return await asyncio.wait_for(asyncio.shield(one.result), SOON)
    finally:
        worker.end(one, FinishReason.STOP)


def reported(book: Book) -> list[Embedded]:
    return [event for event in book.events if isinstance(event, Embedded)]


def test_results_are_in_the_order_of_the_inputs() -> None:
    async def run() -> None:
        async with serving() as service:
            worker, model = EmbeddingWorker(service, LIMITS, 0.2), LetterModel()
            values = await result_of(worker, job(service, model, (0, 0, 0), (1,), (2, 2)))
            assert [int(row.argmax()) for row in values] == [0, 1, 2]
            assert [row.max() for row in values] == [3, 1, 2]
            assert worker.open_calls == worker.waiting_tokens == 0
            assert worker.busy_seconds > 0

    asyncio.run(run())


def test_a_request_decodes_to_its_end_while_a_batch_is_computed_and_cancelling_frees_the_thread() -> None:
    async def run() -> None:
        async with serving() as service:
            worker, model = EmbeddingWorker(service, LIMITS, 0.2), LetterModel()
            model.endless.set()
            embedding = job(service, model, *[(1, 2)] * 40)
            worker.submit(embedding)
            answer = await read_all(service.open([request("a", max_tokens=50)]))
            assert end_of(answer) is FinishReason.LENGTH
            assert embedding.open
            assert worker.open_calls == 1
            worker.end(embedding, FinishReason.CANCELLED)
            assert worker.open_calls == worker.waiting_tokens == 0
            assert await asyncio.to_thread(model.closed.wait, SOON)
            model.endless.clear()
            values = await result_of(worker, job(service, model, (5,)))
            assert values[0].argmax() == 5
            assert model.batches == [1]  # nothing of the cancelled call was computed

    asyncio.run(run())


def test_calls_of_two_tenants_share_a_batch() -> None:
    async def run() -> None:
        async with serving() as service:
            worker, model = EmbeddingWorker(service, LIMITS, 0.2), LetterModel()
            one = job(service, model, *[(1,)] * 3, tenant="a")
            other = job(service, model, (2,), tenant="b")
            worker.submit(one)
            worker.submit(other)
            await asyncio.wait_for(asyncio.gather(one.result, other.result), SOON)
            assert model.batches == [4]
            for each in (one, other):
                worker.end(each, FinishReason.STOP)

    asyncio.run(run())


def test_an_input_that_fails_ends_its_own_call_only() -> None:
    async def run() -> None:
        async with serving() as service:
            worker, model = EmbeddingWorker(service, LIMITS, 0.2), LetterModel()
            model.poison = 9
            bad, good = job(service, model, (9,)), job(service, model, (3,))
            worker.submit(bad)
            worker.submit(good)
            values = await asyncio.wait_for(good.result, SOON)
            assert values[0].argmax() == 3
            with pytest.raises(EmbeddingFailed):
                await asyncio.wait_for(bad.result, SOON)
            for each in (bad, good):
                worker.end(each, FinishReason.STOP)

    asyncio.run(run())


def test_each_call_is_reported_once_with_its_computed_tokens() -> None:
    async def run() -> None:
        book = Book()
        async with serving(watchers=[book]) as service:
            worker, model = EmbeddingWorker(service, LIMITS, 0.2), LetterModel()
            await result_of(worker, job(service, model, (1, 2), (3,), name="done"))
            with pytest.raises(Refused) as refused:
                worker.submit(job(service, model, (1,) * 2000, name="large"))
            assert refused.value.verdict.reason is RejectReason.TOO_LARGE
            service.count()
            found = {event.request_id: event for event in reported(book)}
            assert len(reported(book)) == 2
            done, large = found["done"], found["large"]
            assert (done.inputs, done.tokens, done.computed_tokens) == (2, 3, 3)
            assert done.reason is FinishReason.STOP
            assert large.reason is FinishReason.REJECTED
            assert large.rejected is RejectReason.TOO_LARGE

    asyncio.run(run())


def test_a_quota_is_charged_with_what_was_computed() -> None:
    async def run() -> None:
        limits = TenantLimits(tokens_per_minute=10)
        async with serving() as service:
            service.meter = QuotaMeter(Tenants({"a": TenantTerms(limits=limits)}), "m")
            worker, model = EmbeddingWorker(service, LIMITS, 0.2), LetterModel()
            await result_of(worker, job(service, model, (1, 2, 3, 4)))
            rest = service.meter.rooms("a", service.now())[Limit.TOKENS_PER_MINUTE].remaining
            assert rest == 6
            cancelled = job(service, model, (1, 2, 3, 4, 5))
            worker.submit(cancelled)
            worker.end(cancelled, FinishReason.CANCELLED)
            rest = service.meter.rooms("a", service.now())[Limit.TOKENS_PER_MINUTE].remaining
            assert rest == 6
            with pytest.raises(Refused) as refused:
                worker.submit(job(service, model, (1,) * 7))
            assert refused.value.verdict.reason is RejectReason.TENANT_LIMIT

    asyncio.run(run())


def test_a_drain_waits_for_embeddings_and_a_draining_server_rejects_them() -> None:
    async def run() -> None:
        async with serving() as service:
            worker, model = EmbeddingWorker(service, LIMITS, 0.2), LetterModel()
            model.endless.set()
            one = job(service, model, (1,))
            worker.submit(one)
            assert not await service.drain(0.01)
            with pytest.raises(Refused):
                worker.submit(job(service, model, (1,)))
            model.endless.clear()
            await asyncio.wait_for(one.result, SOON)
            worker.end(one, FinishReason.STOP)
            assert await service.drain(SOON)

    asyncio.run(run())


def test_stopping_ends_what_is_open() -> None:
    async def run() -> None:
        events: list[Event] = []
        async with serving() as service:
            worker, model = EmbeddingWorker(service, LIMITS, 0.2), LetterModel()
            model.endless.set()
            one = job(service, model, (1,))
            worker.submit(one)
            await worker.stop()
            assert one.result.cancelled()
            assert worker.open_calls == 0
        assert not events

    asyncio.run(run())


def test_a_failed_engine_fails_the_call() -> None:
    async def run() -> None:
        async with serving() as service:
            worker, model = EmbeddingWorker(service, LIMITS, 0.2), LetterModel()
            service.thread._failure = "broken"
            one = job(service, model, (1,))
            worker.submit(one)
            with pytest.raises(EmbeddingFailed, match="the engine failed"):
                await asyncio.wait_for(one.result, SOON)
            worker.end(one, FinishReason.FAILED)

    asyncio.run(run())
