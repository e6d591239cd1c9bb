"""Calls through the caches while engine processes are killed and clients leave: each ends once, and nothing is left."""

from __future__ import annotations

import asyncio
import gc
import random
import weakref
from collections import Counter

import pytest

from headrace.core import recovery
from headrace.core.events import Arrived, Emitted, EngineLost, Finished
from headrace.core.request import FinishReason, Request, SamplingParams
from headrace.response_cache.exact import ExactCache
from headrace.response_cache.lookup import CacheLookup
from headrace.response_cache.query import LookupRequest
from headrace.response_cache.rules.cacheability import CacheDirectives
from headrace.response_cache.rules.key import Engine
from headrace.response_cache.rules.tags import TagVersions
from headrace.response_cache.stores.memory import MemoryStore
from headrace.response_cache.stores.tier import Tier
from headrace.service.service import Service
from headrace.testing.hashing_runner import expected_tokens, seed_of
from tests.doubles.engine_processes import Successors, running
from tests.doubles.services import SOON

pytestmark = pytest.mark.anyio

CLIENTS = 24


class Ends:
    """A watcher that counts the beginnings and the ends of each request of the engine.

    A request that was cancelled before an engine had it has only an end.
    """

    def __init__(self) -> None:
        self.arrived: Counter[str] = Counter()
        self.ended: Counter[str] = Counter()
        self.lost = 0

    def fold(self, event, now):
        if isinstance(event, Arrived):
            self.arrived[event.request_id] += 1
        elif isinstance(event, Finished):
            self.ended[event.request_id] += 1
        self.lost += isinstance(event, EngineLost)


class Clients:
    """Clients that send ``left`` calls, each one after the other."""

    def __init__(self, lookup: CacheLookup, rng: random.Random, left: int) -> None:
        self.lookup, self.rng, self.left = lookup, rng, left
        self.ends: Counter[str] = Counter()
        self.answers: weakref.WeakSet = weakref.WeakSet()
        self.sent = 0

    async def client(self) -> None:
        while self.left > 0:
            self.left -= 1
            self.sent += 1
            await self.call(f"c{self.sent}")

    async def call(self, name: str) -> None:
        rng = self.rng
        params = SamplingParams(max_tokens=rng.randrange(1, 24), temperature=rng.choice([0.0, 1.0]))
        prompt = (*range(rng.randrange(1, 6)), rng.randrange(12))
        wanted = [
            Request(f"{name}-{number}", prompt, params, seed=rng.randrange(3))
            for number in range(rng.choice([1, 1, 3]))
        ]
        control = CacheDirectives(no_store=rng.random() < 0.3)
        interval, paced = rng.choice([0, 1, 4]), rng.random() < 0.5
        answer = await self.lookup.open(
            [LookupRequest(each, control) for each in wanted], interval=interval, paced=paced
        )
        self.answers.add(answer)
        reads = rng.choice([0, 1, 3, 1000, 1000, 1000])
        read, left = [], False
        while not answer.exhausted:
            if not reads and not left:
                left = True
                self.lookup.close(answer, rng.choice([FinishReason.CANCELLED, FinishReason.TIMEOUT]))
            read += await asyncio.wait_for(answer.read(), SOON)
            reads -= 1
        self.lookup.close(answer)
        self.check(wanted, read, left)

    def check(self, wanted: list[Request], read: list, left: bool) -> None:
        """Each sequence has one end, which is its last event; a whole one has its tokens, once."""
        for index, each in enumerate(wanted):
            events = [event for at, event in read if at == index]
            ends = [event for event in events if isinstance(event, Finished)]
            assert len(ends) == 1
            assert events[-1] is ends[0]
            reason = ends[0].reason
            self.ends[reason.value] += 1
            tokens = [token for event in events if isinstance(event, Emitted) for token in event.tokens]
            count, seed = each.params.max_tokens, seed_of(each.params, each.seed)
            expected = expected_tokens(each.tokens, seed, count, frozenset())
            assert tokens == (expected if reason is FinishReason.LENGTH else expected[: len(tokens)])
            assert left or reason in (FinishReason.LENGTH, FinishReason.FAILED)


async def churn(seed: int, calls: int, steps_of_process: int) -> tuple[Counter[str], int]:
    """Run so many calls; a process lives for at most so many steps. Returns the ends, and the lost processes."""
    rng = random.Random(seed)
    lasts, tasks = [rng.randrange(1, steps_of_process) for _ in range(calls)], asyncio.all_tasks()
    successors = Successors(lasts, accepted=calls)
    async with running(successors) as (service, process, seen):
        ends = Ends()
        service.unwatch(seen)
        service.watch(ends)
        lookup = cached(service)
        clients = Clients(lookup, rng, calls)
        await asyncio.gather(*(clients.client() for _ in range(CLIENTS)))
        await lookup.settle()
        assert await service.drain(SOON)
        service.count()
        engine = successors.engines[-1]
        await service.between_steps(lambda: None)
        assert service.open_requests() == process.progress().open_requests == 0
        assert set(ends.arrived.values()) == set(ends.ended.values()) == {1}
        assert ends.arrived.keys() <= ends.ended.keys()
        assert not lookup._computations._by_key
        assert not engine.scheduler.live
        engine.check_consistency()
        assert asyncio.all_tasks() == tasks
        gc.collect()
        assert not clients.answers
        return clients.ends, ends.lost


def cached(service: Service) -> CacheLookup:
    fingerprint = Engine("hash", "", "", "", "", "").fingerprint()
    return CacheLookup(service, ExactCache([Tier(MemoryStore(1 << 16))], TagVersions()), fingerprint)


@pytest.mark.parametrize("seed", range(3))
async def test_each_call_ends_once_and_nothing_is_left(seed: int, monkeypatch) -> None:
    monkeypatch.setattr(recovery, "MOST_LOSSES", 10_000)
    ends, lost = await churn(seed, 200, 60)
    assert lost > 3
    assert ends["length"] > 50
    assert ends["cancelled"] > 5
