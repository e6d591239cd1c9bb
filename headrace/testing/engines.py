"""Engines over the hashing runner, and the loop that drives them in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from headrace.core.capacity import NO_WINDOWS, WindowGroups
from headrace.core.drafting.proposal import Drafter
from headrace.core.engine import Engine
from headrace.core.events import Emitted, Event, Finished
from headrace.core.knobs import Knobs
from headrace.core.memory.block_pool import BlockPool
from headrace.core.memory.checkpoints import Checkpoints
from headrace.core.memory.eviction import CostAwareEviction, EvictionPolicy, LeastRecentlyUsed
from headrace.core.memory.lower_tier import LowerTier
from headrace.core.memory.restore import AlwaysRestore, RestorePolicy
from headrace.core.memory.tiers import LowerTiers, PeerBlocks
from headrace.core.plan import Tier
from headrace.core.prediction.latest_start import LatestStarts
from headrace.core.prediction.memory_peak import AlwaysFits, RoomPolicy
from headrace.core.prediction.step_times import StepTimes
from headrace.core.queueing.fair_queue import FairQueue, single_queue
from headrace.core.queueing.order import FirstComeFirstServed, OrderPolicy
from headrace.core.scheduler.admission import AdmissionPolicy, Continuous
from headrace.core.scheduler.holds import HoldPolicy
from headrace.core.scheduler.scheduler import Scheduler
from headrace.core.scheduler.victims import LastRanked, VictimPolicy
from headrace.testing.hashing_runner import HashingPeers, HashingRunner

EventT = TypeVar("EventT")

MakeCheckpoints = Callable[[Callable[[Event], None]], Checkpoints]
"""Makes the checkpoints of an engine, which write their events to it."""

PEER_BLOCKS = 16
"""Few, so that blocks of peers replace each other."""


def hashing_engine(
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_model_len: int = 128,
    overlap: int = 0,
    knobs: Knobs | None = None,
    queue: FairQueue | None = None,
    order: OrderPolicy | None = None,
    admission: AdmissionPolicy | None = None,
    victims: VictimPolicy | None = None,
    prefix_caching: bool = True,
    predictions: LatestStarts | None = None,
    times: StepTimes | None = None,
    room: RoomPolicy | None = None,
    host_blocks: int = 0,
    disk_blocks: int = 0,
    restore: RestorePolicy | None = None,
    eviction: EvictionPolicy | None = None,
    holds: HoldPolicy | None = None,
    drafter: Drafter | None = None,
    peers: HashingPeers | None = None,
    checkpoints: MakeCheckpoints | None = None,
    windows: WindowGroups = NO_WINDOWS,
) -> tuple[Engine, HashingRunner]:
    """A small engine and its runner: first come, first served, unless other policies are given.

    ``peers`` need ``host_blocks``. The model has recurrent states with ``checkpoints``, window groups with ``windows``.
    """
    events: list[Event] = []
    tiers = host_blocks, disk_blocks, block_size, peers, restore or AlwaysRestore(), events
    lower = _lower_tiers(*tiers) if host_blocks else None
    eviction = eviction or (CostAwareEviction(num_blocks) if lower else LeastRecentlyUsed())
    states = checkpoints(events.append) if checkpoints else None
    pool = BlockPool(num_blocks, block_size, eviction, events.append, lower, states, windows)
    scheduler = Scheduler(
        pool,
        single_queue() if queue is None else queue,  # an empty queue is false
        order or FirstComeFirstServed(),
        admission or Continuous(),
        victims or LastRanked(),
        room or AlwaysFits(),
        events,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        prefix_caching=prefix_caching,
        predictions=predictions,
        times=times,
        holds=holds,
        drafter=drafter,
    )
    peer_blocks = PEER_BLOCKS if peers else 0
    sizes = {"host_blocks": host_blocks, "disk_blocks": disk_blocks, "peer_blocks": peer_blocks}
    runner = HashingRunner(num_blocks, block_size, max_num_seqs, **sizes, checkpoints=states, windows=windows)
    if peers is not None:
        peers.runner = runner
    return Engine(scheduler, runner, events, knobs or Knobs(), overlap), runner


def make_checkpoints(cells: int, interval: int = 0) -> MakeCheckpoints:
    """So many checkpoints of recurrent states, and one every ``interval`` tokens of a long prompt."""
    return lambda emit: Checkpoints(cells, interval, CostAwareEviction(cells), emit)


def _lower_tiers(
    host_blocks: int,
    disk_blocks: int,
    block_size: int,
    peers: HashingPeers | None,
    restore: RestorePolicy,
    events: list[Event],
) -> LowerTiers:
    def tier(which: Tier, blocks: int) -> LowerTier:
        return LowerTier(which, blocks, CostAwareEviction(blocks))

    return LowerTiers(
        tier(Tier.HOST, host_blocks),
        tier(Tier.DISK, disk_blocks) if disk_blocks else None,
        restore,
        block_size=block_size,
        block_bytes=1000,
        emit=events.append,
        peers=PeerBlocks(tier(Tier.PEER, PEER_BLOCKS), peers) if peers else None,
    )


@dataclass
class Record:
    """The events of one engine, and per request its tokens and ends."""

    events: list[Event] = field(default_factory=list)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    ends: dict[str, list[Finished]] = field(default_factory=dict)

    def fold(self, events: list[Event]) -> None:
        """Add the events of a step."""
        for event in events:
            self.events.append(event)
            if isinstance(event, Emitted):
                assert event.request_id not in self.ends, "tokens after the end"
                self.tokens.setdefault(event.request_id, []).extend(event.tokens)
            elif isinstance(event, Finished):
                self.ends.setdefault(event.request_id, []).append(event)

    def of(self, kind: type[EventT]) -> list[EventT]:
        """All events of one kind."""
        return [event for event in self.events if isinstance(event, kind)]


def drain(engine: Engine, record: Record, now: float = 0.0, max_steps: int = 100_000) -> float:
    """Step until the engine has nothing to do; returns the virtual time."""
    for _ in range(max_steps):
        due = engine.wake_at(now)
        if due is None:
            return now
        now = max(now + 0.001, due)
        record.fold(engine.step(now))
    raise AssertionError(f"not idle after {max_steps} steps")
