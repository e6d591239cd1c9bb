"""Engines whose policies are the simplest ones, over any runner."""

from __future__ import annotations

from typing import Any

from headrace.core.engine import Engine
from headrace.core.events import Event
from headrace.core.knobs import Knobs
from headrace.core.memory.block_pool import BlockPool
from headrace.core.memory.eviction import EvictionPolicy, LeastRecentlyUsed
from headrace.core.memory.tiers import LowerTiers
from headrace.core.ports import Runner
from headrace.core.prediction.memory_peak import AlwaysFits
from headrace.core.queueing.fair_queue import FairQueue, single_queue
from headrace.core.queueing.order import FirstComeFirstServed
from headrace.core.scheduler.admission import Continuous
from headrace.core.scheduler.scheduler import Scheduler
from headrace.core.scheduler.victims import LastRanked


def plain_engine(
    runner: Runner,
    num_blocks: int,
    block_size: int,
    *,
    events: list[Event] | None = None,
    lower: LowerTiers | None = None,
    eviction: EvictionPolicy | None = None,
    queue: FairQueue | None = None,
    knobs: Knobs = Knobs(),  # noqa: B008 (immutable)
    overlap: int = 0,
    **scheduler: Any,
) -> Engine:
    """First come, first served, by continuous batching; the last one is preempted.

    ``events`` is the list that tiers ``lower`` than the device tell of their moves; ``scheduler`` are further arguments
    of `Scheduler`, its sizes among them.
    """
    events = [] if events is None else events
    made = Scheduler(
        BlockPool(num_blocks, block_size, eviction or LeastRecentlyUsed(), events.append, lower),
        single_queue() if queue is None else queue,  # an empty queue is false
        FirstComeFirstServed(),
        Continuous(),
        LastRanked(),
        AlwaysFits(),
        events,
        **scheduler,
    )
    return Engine(made, runner, events, knobs, overlap)
