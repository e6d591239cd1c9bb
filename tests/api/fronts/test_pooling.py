"""Calls of embeddings that front ends send: each ends once at the owner, whoever leaves first."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from headrace.api.exchange import Hooks
from headrace.api.fronts.front import OwnerConnection, read_hello
from headrace.api.fronts.messages import SentCall
from headrace.api.fronts.owner import OwnedCall, Owner
from headrace.api.fronts.pooling import OwnedPooling, front_models
from headrace.api.serving import CallNotes
from headrace.core.embedding import Embedded, TokenRow
from headrace.core.request import FinishReason, RejectReason
from headrace.core.tenancy.gate import Limits
from headrace.observe.cost.ledger import CostLedger
from headrace.observe.cost.prices import Pricing
from headrace.observe.cost.report import CostReport
from headrace.response_cache.lookup import CacheLookup
from headrace.service.embedding_models import PoolingModels
from headrace.service.embedding_worker import EmbeddingFailed, EmbeddingJob, EmbeddingWorker
from headrace.service.service import Refused, Service
from headrace.testing.engines import hashing_engine
from tests.doubles.pooling_models import LetterModel, LetterTokenizer
from tests.doubles.services import Book

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def embedding(tmp_path, fronts: int = 2):
    book, model = Book(), LetterModel()
    service = Service(hashing_engine()[0], Limits(100, 1000), watchers=[book])
    lookup, worker = CacheLookup(service), EmbeddingWorker(service, Limits(100, 100), 0.2)
    models = PoolingModels(embedding=model)
    pooling = OwnedPooling(
        worker, models, lambda ids: {"cost": len(list(ids))}, lambda model: ("letters", False)
    )
    headers = {"x-left": "3"}
    owner = Owner(lookup, None, CallNotes(), lambda tenant, name: headers, Hooks(), False, None, pooling)
    path = str(tmp_path / "calls")
    await lookup.start()
    server = await asyncio.get_running_loop().create_unix_server(owner.connect, path)
    connected = [OwnerConnection(path, similar=False) for _ in range(fronts)]
    for each in connected:
        await each.connect()
    hello = await read_hello(path)
    assert (hello.text, hello.costs) == (None, True)
    described = front_models(hello.pooling, lambda sent: LetterTokenizer()).embedding
    try:
        yield SimpleNamespace(
            fronts=connected, worker=worker, model=model, described=described, book=book, service=service
        )
    finally:
        for each in connected:
            each.stop()
        server.close()
        await worker.stop()
        await lookup.stop()


def job(there, *rows: tuple[int, ...], name: str = "j") -> EmbeddingJob:
    given = [TokenRow(each) for each in rows]
    return EmbeddingJob(name, "t", "embed", there.described, given, there.service.now())


def ends(there) -> dict[str, list[FinishReason]]:
    there.service.count()
    found: dict[str, list[FinishReason]] = {}
    for event in there.book.events:
        if isinstance(event, Embedded):
            found.setdefault(event.request_id, []).append(event.reason)
    return found


async def until(condition) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


async def test_two_front_ends_get_vectors_costs_and_quotas(tmp_path):
    async with embedding(tmp_path) as there:
        facts = there.described.dimensions, there.described.prompts, there.described.max_tokens
        assert facts == (there.model.dimensions, there.model.prompts, there.model.max_tokens)
        jobs = [job(there, (1, 1), (n,), name=f"j{n}") for n in range(2)]
        for front, each in zip(there.fronts, jobs, strict=True):
            front.pooling.submit(each)
            assert front.awaited
            assert front.open_requests() == 1
        for n, (front, each) in enumerate(zip(there.fronts, jobs, strict=True)):
            values = await asyncio.wait_for(each.result, 60)
            assert [int(row.argmax()) for row in values] == [1, n]
            front.pooling.end(each, FinishReason.STOP)
            front.pooling.end(each, FinishReason.STOP)
            assert front.cost([f"j{n}"]) == {"cost": 1}
            assert front.headers("t", "letters") == {"x-left": "3"}
            assert not front.awaited
        assert ends(there) == {"j0": [FinishReason.STOP], "j1": [FinishReason.STOP]}


async def test_what_the_owner_refuses_or_cannot_compute_is_an_error_of_its_call(tmp_path):
    async with embedding(tmp_path, fronts=1) as there:
        there.model.poison = 9
        (front,) = there.fronts
        large, bad, good = (
            job(there, (1,) * 200, name="large"),
            job(there, (9,), name="bad"),
            job(there, (3,)),
        )
        for each in (large, bad, good):
            front.pooling.submit(each)
        with pytest.raises(Refused) as refused:
            await asyncio.wait_for(large.result, 60)
        assert refused.value.verdict.reason is RejectReason.TOO_LARGE
        with pytest.raises(EmbeddingFailed, match="failed"):
            await asyncio.wait_for(bad.result, 60)
        assert (await asyncio.wait_for(good.result, 60))[0].argmax() == 3
        for each in (large, bad, good):
            front.pooling.end(each, FinishReason.FAILED)
        assert ends(there) == {
            "large": [FinishReason.REJECTED],
            "bad": [FinishReason.FAILED],
            "j": [FinishReason.STOP],
        }
        assert not front.pooling.open_calls


async def test_a_client_or_a_front_end_that_leaves_ends_its_calls_only(tmp_path):
    async with embedding(tmp_path) as there:
        first, second = there.fronts
        there.model.endless.set()
        left, late, other = (job(there, (1,), name=name) for name in ("left", "late", "other"))
        first.pooling.submit(left)
        first.pooling.submit(late)
        second.pooling.submit(other)
        await until(lambda: there.worker.open_calls == 3)
        first.pooling.end(left, FinishReason.CANCELLED)
        first.pooling.end(late, FinishReason.TIMEOUT)
        await until(lambda: there.worker.open_calls == 1)
        assert ends(there) == {"left": [FinishReason.CANCELLED], "late": [FinishReason.TIMEOUT]}
        again = job(there, (1,), name="again")
        first.pooling.submit(again)
        await until(lambda: there.worker.open_calls == 2)
        first.stop()
        await until(lambda: there.worker.open_calls == 1)
        assert again.result.cancelled()
        there.model.endless.clear()
        assert (await asyncio.wait_for(other.result, 60))[0].argmax() == 1
        second.pooling.end(other, FinishReason.STOP)
        assert ends(there)["again"] == [FinishReason.CANCELLED]
        assert ends(there)["other"] == [FinishReason.STOP]


async def test_a_server_that_ends_tells_the_calls_that_wait(tmp_path):
    async with embedding(tmp_path, fronts=1) as there:
        there.model.endless.set()
        waits = job(there, (1,))
        there.fronts[0].pooling.submit(waits)
        await until(lambda: there.worker.open_calls == 1)
        await there.worker.stop()
        await asyncio.wait([waits.result], timeout=60)
        assert waits.result.cancelled()
        there.model.endless.clear()


def test_the_log_line_of_a_call_that_the_engine_did_not_compute_has_no_cost():
    prices = CostReport(CostLedger(Pricing(3.6), began=0.0), "words")
    owner = SimpleNamespace(cost=prices.usage_cost)
    call = OwnedCall(SentCall(False, "", None, [], "default", {"prompt_tokens": 3}), (), owner)
    assert call.cost() == {}
    assert call.tokens() == {"prompt_tokens": 3}
