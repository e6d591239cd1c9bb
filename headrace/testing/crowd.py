"""Serves a crowd of requests on a small engine with the policies under test, and checks every output.

The engine has 14 blocks of 4 tokens and 5 slots, so requests wait, are preempted and evict each other's blocks.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from headrace.core.engine import Engine
from headrace.core.events import Event
from headrace.core.knobs import Knobs
from headrace.core.memory.block_pool import BlockPool
from headrace.core.memory.eviction import EvictionPolicy, LeastRecentlyUsed
from headrace.core.prediction.memory_peak import AlwaysFits, RoomPolicy
from headrace.core.queueing.fair_queue import FairQueue, single_queue
from headrace.core.queueing.order import FirstComeFirstServed, OrderPolicy
from headrace.core.request import FinishReason, Request, SamplingParams
from headrace.core.scheduler.admission import AdmissionPolicy, Continuous
from headrace.core.scheduler.scheduler import Scheduler
from headrace.core.scheduler.victims import LastRanked, VictimPolicy
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
