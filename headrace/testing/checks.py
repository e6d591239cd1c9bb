"""Checks that every order, admission, victim and eviction policy, every store of responses and every workload must
pass.

A policy must be deterministic and let every request end. Each check takes a factory: the class, or a function without
parameters that makes one. The checks of stores clear the store that they are given. A workload draws the requested
number of requests, and the same ones again.

```
import pytest
from headrace.testing import ORDER_CHECKS, STORE_CHECKS, StoreTraits
from my_package import MyStore, ShortestFirst

@pytest.mark.parametrize("check", ORDER_CHECKS, ids=lambda check: check.__name__)
def test_shortest_first(check):
    check(ShortestFirst)

@pytest.mark.parametrize("check", STORE_CHECKS, ids=lambda check: check.__name__)
def test_my_store(check):
    check(MyStore, StoreTraits(shared=False))
```

`serve_crowd` serves a crowd of requests on a small engine with the policies under test, and `check_outputs` checks
every output. The engine has 14 blocks of 4 tokens and 5 slots, so requests wait, are preempted and evict each other's
blocks.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from headrace.core.engine import Engine
from headrace.core.events import Event
from headrace.core.knobs import Knobs
from headrace.core.memory.block_pool import BlockPool
from headrace.core.memory.eviction import Block, EvictionPolicy, LeastRecentlyUsed
from headrace.core.ports import Store
from headrace.core.prediction.memory_peak import AlwaysFits, RoomPolicy
from headrace.core.queueing.fair_queue import FairQueue, single_queue
from headrace.core.queueing.order import FirstComeFirstServed, OrderPolicy, ask_rank
from headrace.core.request import FinishReason, Request, SamplingParams
from headrace.core.scheduler.admission import AdmissionPolicy, Continuous, Queue, ask_admission, ask_ready_at
from headrace.core.scheduler.scheduler import Scheduler
from headrace.core.scheduler.victims import LastRanked, VictimPolicy
from headrace.core.sequence import Sequence
from headrace.lab.workload.dataset import Dataset, Workload
from headrace.response_cache.rules.tags import EVERYTHING
from headrace.testing.engines import Record, drain
from headrace.testing.hashing_runner import HashingRunner, expected_tokens


def make_request(
    id: str, tokens: int | tuple[int, ...] = 4, *, max_tokens: int | None = 4, **fields: Any
) -> Request:
    """A request with any ``fields`` of `Request`.

    If ``tokens`` is a number, the prompt has that length and shares no prefix with the prompt of another id.
    """
    if isinstance(tokens, int):
        first = 1000 + sum(ord(letter) << (8 * i) for i, letter in enumerate(id))
        tokens = (first, *range(1, tokens))
    params = fields.pop("params", None) or SamplingParams(max_tokens=max_tokens)
    return Request(id=id, tokens=tokens, params=params, **fields)


def make_crowd(count: int = 24) -> list[Request]:
    """Requests of two tenants and all classes, some with a common prefix; equal counts give equal crowds."""
    rng = random.Random(7)
    shared = tuple(range(9))
    return [
        make_request(
            f"r{i}",
            shared[: rng.randint(1, 9)] + tuple(rng.randrange(50) for _ in range(rng.randint(1, 12))),
            max_tokens=rng.randint(1, 14),
            priority=rng.randint(-2, 2),
            tenant=rng.choice("ab"),
            service_class=rng.choice(["priority", "default", "flex", "background"]),
        )
        for i in range(count)
    ]


NUM_BLOCKS, BLOCK_SIZE, MAX_NUM_SEQS, MAX_MODEL_LEN = 14, 4, 5, 48


def one_queue(pool: BlockPool) -> FairQueue:
    """A single queue for all tenants; it needs no ``pool``."""
    return single_queue()


def serve_crowd(
    *,
    order: Callable[[], OrderPolicy] = FirstComeFirstServed,
    admission: Callable[[], AdmissionPolicy] = Continuous,
    victims: Callable[[], VictimPolicy] = LastRanked,
    eviction: Callable[[], EvictionPolicy] = LeastRecentlyUsed,
    room: Callable[[], RoomPolicy] = AlwaysFits,
    queue: Callable[[BlockPool], FairQueue] = one_queue,
    overlap: int = 0,
) -> Record:
    """Serve `make_crowd` to its end in virtual time; the engine's state is checked after every step."""
    events: list[Event] = []
    pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE, eviction(), events.append)
    scheduler = Scheduler(
        pool,
        queue(pool),
        order(),
        admission(),
        victims(),
        room(),
        events,
        max_num_seqs=MAX_NUM_SEQS,
        max_model_len=MAX_MODEL_LEN,
    )
    runner = HashingRunner(NUM_BLOCKS, BLOCK_SIZE, MAX_NUM_SEQS)
    engine = Engine(scheduler, runner, events, Knobs(batched_tokens=16), overlap)
    record = Record()
    now = 0.0
    for each in make_crowd():
        engine.submit(each, now)
        now += 0.002
        record.fold(engine.step(now))
        engine.check_consistency()
    drain(engine, record, now)
    engine.check_consistency()
    return record


def check_outputs(record: Record) -> None:
    """Assert that every request of the crowd ended once, with exactly the right tokens."""
    for each in make_crowd():
        ends = record.ends.get(each.id, [])
        assert len(ends) == 1, f"request {each.id} ended {len(ends)} times, expected once"
        (end,) = ends
        assert end.reason is FinishReason.LENGTH, f"request {each.id} ended with {end.reason}: {end.message}"
        length = each.params.max_tokens or 0
        right = expected_tokens(each.tokens, 0, length, frozenset())
        assert record.tokens[each.id] == right, f"request {each.id} has wrong tokens"


MakeOrder = Callable[[], OrderPolicy]
MakeAdmission = Callable[[], AdmissionPolicy]
MakeVictims = Callable[[], VictimPolicy]
MakeEviction = Callable[[], EvictionPolicy]


# -- queue order ----------------------------------------------------------------------------------------------


def ranks_are_valid_and_unique(make: MakeOrder) -> None:
    """Each rank is a tuple of numbers that ends with ``number``; ranks differ, are comparable, and deterministic."""
    policy, again = make(), make()
    ranks = [ask_rank(policy, each, number) for number, each in enumerate(make_crowd())]
    assert len(set(ranks)) == len(ranks), "two requests have the same rank"
    sorted(ranks)
    repeated = [ask_rank(again, each, number) for number, each in enumerate(make_crowd())]
    assert ranks == repeated, "a second policy gives the same requests other ranks"


def earlier_of_equal_requests_ranks_first(make: MakeOrder) -> None:
    """Of requests that differ only in their arrival, the earlier one has the lower rank."""
    policy = make()
    ranks = [ask_rank(policy, make_request("r"), number) for number in range(5)]
    assert ranks == sorted(ranks), f"ranks of equal requests, by arrival: {ranks}"


def order_serves_every_request(make: MakeOrder) -> None:
    """An engine with this order completes every request of a crowd, and a second run has the same events."""
    _check_runs(partial(serve_crowd, order=make))


# -- admission ------------------------------------------------------------------------------------------------


def admits_only_waiting_requests(make: MakeAdmission) -> None:
    """`admit` returns a number from 0 to the number of waiting requests."""
    for queue in _queues():
        count = ask_admission(make(), queue, 100.0)
        assert count <= queue.waiting, f"{count} admitted of {queue.waiting} waiting requests"


def admits_at_the_time_it_names(make: MakeAdmission) -> None:
    """If no request runs, `admit` admits at least one at the time that `ready_at` returns."""
    for queue in _queues():
        if queue.running == 0:
            due = max(ask_ready_at(make(), queue), 0.0)
            assert ask_admission(make(), queue, due) > 0, (
                f"no request is admitted at {due}, the time it named"
            )


def admission_serves_every_request(make: MakeAdmission) -> None:
    """An engine with this admission completes every request of a crowd, and a second run has the same events."""
    _check_runs(partial(serve_crowd, admission=make))


def _queues() -> list[Queue]:
    return [
        Queue(waiting, oldest, running, admitted=9)
        for waiting, running, oldest in itertools.product((1, 2, 5), (0, 1, 4), (0.0, 3.0))
    ]


# -- victims --------------------------------------------------------------------------------------------------


def victim_is_a_candidate_but_not_the_first(make: MakeVictims) -> None:
    """The victim is one of the candidates, and not the first of several, which must make progress."""
    sequences = [Sequence(make_request(f"r{i}"), (i,), 64) for i in range(4)]
    for count in range(1, 5):
        chosen = make().choose(sequences[:count], 0.0)
        assert any(chosen is each for each in sequences[:count]), f"{chosen!r} is not one of the candidates"
        assert chosen is make().choose(sequences[:count], 0.0), "a second policy chooses another victim"
        assert count == 1 or chosen is not sequences[0], "the first of several candidates must make progress"


def victims_let_every_request_end(make: MakeVictims) -> None:
    """An engine with this victim policy completes every request of a crowd, and a second run has the same events."""
    _check_runs(partial(serve_crowd, victims=make))


# -- eviction -------------------------------------------------------------------------------------------------


def priorities_are_numbers(make: MakeEviction) -> None:
    """The priority of a block is a number other than NaN, and the same in a second call."""
    policy = make()
    for hits, used, wanted in itertools.product((0, 3), (0, 70), (False, True)):
        block = Block(1)
        block.hits, block.used, block.wanted = hits, used, wanted
        priority = policy.priority(block)
        assert isinstance(priority, int | float), f"the priority {priority!r} is not a number"
        assert not math.isnan(priority), "the priority is NaN"
        assert priority == policy.priority(block), "the same block has another priority in a second call"


def eviction_returns_every_block_once(make: MakeEviction) -> None:
    """When all blocks are cached and idle, a request for all of them gets each one once."""
    pool = BlockPool(6, 2, make(), lambda event: None)
    table = pool.allocate(6)
    parent = b""
    for i, block in enumerate(table):
        parent = pool.register(block, parent, (i, i))
    pool.release(table)
    assert sorted(pool.allocate(6)) == list(range(6)), "blocks are missing or allocated twice"
    pool.check()


def eviction_serves_every_request(make: MakeEviction) -> None:
    """An engine with this eviction policy completes every request of a crowd, and a second run has the same events."""
    _check_runs(partial(serve_crowd, eviction=make))


# -- all of a kind --------------------------------------------------------------------------------------------

ORDER_CHECKS = (
    ranks_are_valid_and_unique,
    earlier_of_equal_requests_ranks_first,
    order_serves_every_request,
)
ADMISSION_CHECKS = (
    admits_only_waiting_requests,
    admits_at_the_time_it_names,
    admission_serves_every_request,
)
VICTIM_CHECKS = (victim_is_a_candidate_but_not_the_first, victims_let_every_request_end)
EVICTION_CHECKS = (priorities_are_numbers, eviction_returns_every_block_once, eviction_serves_every_request)


def check_order(make: MakeOrder) -> None:
    """All `ORDER_CHECKS`."""
    for check in ORDER_CHECKS:
        check(make)


def check_admission(make: MakeAdmission) -> None:
    """All `ADMISSION_CHECKS`."""
    for check in ADMISSION_CHECKS:
        check(make)


def check_victims(make: MakeVictims) -> None:
    """All `VICTIM_CHECKS`."""
    for check in VICTIM_CHECKS:
        check(make)


def check_eviction(make: MakeEviction) -> None:
    """All `EVICTION_CHECKS`."""
    for check in EVICTION_CHECKS:
        check(make)


def _check_runs(serve: Callable[..., Record]) -> None:
    for overlap in (0, 1):
        record = serve(overlap=overlap)
        check_outputs(record)
        assert serve(overlap=overlap).events == record.events, "a second run has other events"


MakeWorkload = Callable[[], Workload]

DATASET = Dataset(name="under-test", count=20, seed=5)


def draws_the_requested_number(make: MakeWorkload) -> None:
    """`draw` returns ``count`` requests, each with its own id, a prompt, and at least one output token."""
    work = make().draw(DATASET)
    assert len(work) == DATASET.count, f"{len(work)} requests drawn, expected {DATASET.count}"
    assert len({each.id for each in work}) == len(work), "two requests have the same id"
    for each in work:
        assert each.prompt, f"request {each.id} has an empty prompt"
        assert each.max_tokens >= 1, f"request {each.id} has max_tokens {each.max_tokens}"
        arrives = math.isfinite(each.arrival) and each.arrival >= 0.0
        assert arrives, f"request {each.id} arrives at {each.arrival}"


def equal_seeds_draw_equal_requests(make: MakeWorkload) -> None:
    """Two workloads draw the same requests for the same dataset."""
    assert list(make().draw(DATASET)) == list(make().draw(DATASET)), "a second workload draws other requests"


WORKLOAD_CHECKS = (draws_the_requested_number, equal_seeds_draw_equal_requests)


def check_workload(make: MakeWorkload) -> None:
    """All `WORKLOAD_CHECKS`."""
    for check in WORKLOAD_CHECKS:
        check(make)


MakeStore = Callable[[], Store]

KEYS = [bytes([i]) * 32 for i in range(4)]
A, B, BOTH = ("tag:a", EVERYTHING), ("tag:b", EVERYTHING), ("tag:a", "tag:b", EVERYTHING)
LARGE_BYTES = 500_000
PATIENCE_SECONDS = 60.0
"""How long a value may outlive its time to live, at least: its machine may be busy."""


@dataclass(frozen=True, slots=True)
class StoreTraits:
    """The capabilities of a store.

    ``shared``: it outlives the process or is shared with others, so it stores the versions of tags; each call of the
    factory opens the same contents. ``deletes_by_tag``: `clear` removes the values; otherwise raised versions
    invalidate them. ``shortest_ttl``: the shortest exact time to live, in seconds.
    """

    shared: bool = True
    deletes_by_tag: bool = True
    shortest_ttl: float = 0.05


def value_stays_until_deleted(make: MakeStore, traits: StoreTraits) -> None:
    """`get` returns what `put` stored, byte for byte, until it is replaced or deleted."""

    async def run() -> None:
        async with _opened(make) as (store,):
            assert await store.get(KEYS[0]) is None, "a cleared store returns a value"
            for value in (b"one", b"\0\xff\r\n" * 9, b"", b"x" * LARGE_BYTES):
                await store.put(KEYS[0], value, 60.0, A)
                assert await store.get(KEYS[0]) == value, f"a value of {len(value)} bytes is not returned"
            await store.delete(KEYS[0])
            await store.delete(KEYS[0])  # deleting a missing value is no error
            assert await store.get(KEYS[0]) is None, "a deleted value is returned"

    asyncio.run(run())


def clear_invalidates_one_tag(make: MakeStore, traits: StoreTraits) -> None:
    """After `clear`, values with the tag are gone, or its version is raised; other tags are not touched."""

    async def run() -> None:
        async with _opened(make) as (store,):
            before = await store.versions()
            for key, tags in zip(KEYS, (A, B, BOTH, ("tag", EVERYTHING)), strict=True):
                await store.put(key, b"v", 60.0, tags)
            await store.clear("tag:a")
            if traits.deletes_by_tag:
                assert await _all_of(store) == [None, b"v", None, b"v"], "wrong values after clear('tag:a')"
            if traits.shared:
                after = await store.versions()
                assert after["tag:a"] == before.get("tag:a", 0) + 1, "clear did not raise the tag's version"
                assert after.get("tag:b", 0) == before.get("tag:b", 0), "clear raised another tag's version"

    asyncio.run(run())


def clear_everything_empties_the_store(make: MakeStore, traits: StoreTraits) -> None:
    """After `clear` of the tag that all values have, no value is returned."""

    async def run() -> None:
        async with _opened(make) as (store,):
            for key in KEYS:
                await store.put(key, b"v", 60.0, A)
            await store.clear(EVERYTHING)
            await store.versions()
            assert await _all_of(store) == [None] * 4, "values are left after clear of everything"

    asyncio.run(run())


def value_ends_with_its_time_to_live(make: MakeStore, traits: StoreTraits) -> None:
    """A value is not returned after its time to live; others stay."""

    async def run() -> None:
        async with _opened(make) as (store,):
            await store.put(KEYS[0], b"v", traits.shortest_ttl, A)
            await store.put(KEYS[1], b"v", 60.0, A)
            async with asyncio.timeout(max(PATIENCE_SECONDS, 30 * traits.shortest_ttl)):
                while await store.get(KEYS[0]) is not None:
                    await asyncio.sleep(0.02)
            assert await store.get(KEYS[1]) == b"v", "a value ended before its time to live"

    asyncio.run(run())


def two_clients_share_values_and_versions(make: MakeStore, traits: StoreTraits) -> None:
    """Two clients of a shared store see each other's values and clearings, and lose no concurrent clearing."""
    if not traits.shared:
        return

    async def run() -> None:
        async with _opened(make, 2) as (one, other):
            await one.put(KEYS[0], b"v", 60.0, A)
            assert await other.get(KEYS[0]) == b"v", "another client does not see the value"
            before = (await one.versions()).get("tag:a", 0)
            await other.clear("tag:a")
            assert (await one.versions())["tag:a"] == before + 1, "another client does not see the clearing"
            await asyncio.gather(*(each.clear("tag:b") for each in (one, other) * 3))
            assert (await one.versions())["tag:b"] >= 6, "concurrent clearings were lost"

    asyncio.run(run())


def advance_raises_versions_only(make: MakeStore, traits: StoreTraits) -> None:
    """`advance` raises the versions of a shared store by the given steps, and deletes nothing."""

    async def run() -> None:
        async with _opened(make) as (store,):
            await store.clear("tag:a")
            before = await store.versions()
            await store.put(KEYS[0], b"v", 60.0, A)
            await store.advance({"tag:a": 3, "tag:é": 2})
            assert await store.get(KEYS[0]) == b"v", "advance deleted a value"
            if traits.shared:
                after = await store.versions()
                assert after["tag:a"] == before["tag:a"] + 3, "advance did not add 3 to the version"
                assert after["tag:é"] == before.get("tag:é", 0) + 2, "advance did not add 2 to a new tag"

    asyncio.run(run())


def concurrent_values_do_not_mix(make: MakeStore, traits: StoreTraits) -> None:
    """Many concurrent writes and reads each return their own value; a store may lose or refuse some of them."""

    async def run() -> None:
        async with _opened(make) as (store,):
            keys = [i.to_bytes(32, "big") for i in range(300)]
            puts = (store.put(key, key * 3, 60.0, A) for key in keys)
            await asyncio.gather(*puts, return_exceptions=True)
            got = await asyncio.gather(*map(store.get, keys), return_exceptions=True)
            found = [(key, value) for key, value in zip(keys, got, strict=True) if isinstance(value, bytes)]
            assert all(value == key * 3 for key, value in found), "concurrent values are mixed up"
            assert len(found) > len(keys) / 2, "most concurrent values are lost"

    asyncio.run(run())


def facts_say_how_full_it_is(make: MakeStore, traits: StoreTraits) -> None:
    """`facts` counts bytes and evictions, or has None if the store does not know; entries may be counted later."""

    async def run() -> None:
        async with _opened(make) as (store,):
            await store.put(KEYS[0], b"v" * 5000, 60.0, A)
            facts = store.facts()
            assert facts.evictions == 0, "an almost empty store has evicted something"
            assert facts.entries is None or facts.entries >= 0, "the number of entries is negative"
            assert facts.nbytes is None or facts.nbytes >= 5000, "a stored value's bytes are not counted"

    asyncio.run(run())


STORE_CHECKS = (
    value_stays_until_deleted,
    clear_invalidates_one_tag,
    clear_everything_empties_the_store,
    value_ends_with_its_time_to_live,
    two_clients_share_values_and_versions,
    advance_raises_versions_only,
    concurrent_values_do_not_mix,
    facts_say_how_full_it_is,
)


def check_store(make: MakeStore, traits: StoreTraits | None = None) -> None:
    """All `STORE_CHECKS`. ``make`` opens the store; the default ``traits`` are those of a shared store."""
    for check in STORE_CHECKS:
        check(make, traits or StoreTraits())


@asynccontextmanager
async def _opened(make: MakeStore, count: int = 1) -> AsyncIterator[list[Store]]:
    async with AsyncExitStack() as stack:
        stores = []
        for _ in range(count):
            store = make()
            stack.push_async_callback(_close, store)
            await store.versions()
            stores.append(store)
        await stores[0].clear(EVERYTHING)
        for store in stores:
            await store.versions()
        yield stores


def _close(store: Store) -> Awaitable[None]:
    return store.close()


async def _all_of(store: Store) -> list[bytes | None]:
    return [await store.get(key) for key in KEYS]
