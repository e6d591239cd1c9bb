"""Serves a crowd of requests on a small engine with the policies under test, and checks every output.

The engine has 14 blocks of 4 tokens and 5 slots, so requests wait, are preempted and evict each other's blocks.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.core.engine import Engine
from headrace.core.events import Event
from headrace.core.knobs import Knobs
from headrace.core.memory.block_pool import BlockPool
from headrace.core.memory.eviction import EvictionPolicy, LeastRecentlyUsed
from headrace.core.prediction.memory_peak import AlwaysFits, RoomPolicy
from headrace.core.queueing.fair_queue import FairQueue, single_queue
from headrace.core.queueing.order import FirstComeFirstServed, OrderPolicy
from headrace.core.request import FinishReason
from headrace.core.scheduler.admission import AdmissionPolicy, Continuous
from headrace.core.scheduler.scheduler import Scheduler
from headrace.core.scheduler.victims import LastRanked, VictimPolicy
from headrace.testing.engines import Record, drain
from headrace.testing.hashing_runner import HashingRunner, expected_tokens
from headrace.testing.requests import make_crowd

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
