"""Every built-in policy passes the checks that `headrace.testing` ships.

Eviction policies are found by their names on the command line; a new policy of another kind is added to the lists.
"""

from __future__ import annotations

import itertools
from functools import partial

import pytest

from headrace.config import SchedulerOptions
from headrace.core.events import Admitted, Event, Preempted
from headrace.core.knobs import Knobs
from headrace.core.memory.lower_tier import LowerTier
from headrace.core.memory.restore import AlwaysRestore, Link, RestoreIfFaster
from headrace.core.memory.tiers import LowerTiers
from headrace.core.plan import Tier
from headrace.core.prediction.memory_peak import AlwaysFits, Headroom
from headrace.core.prediction.output_lengths import LengthPredictor
from headrace.core.prediction.step_curve import StepCost
from headrace.core.prediction.step_times import StepTimes
from headrace.core.queueing.fair_queue import FairQueue, TenantQueue, single_queue
from headrace.core.queueing.order import ByPriority, FirstComeFirstServed, ShortestFirst
from headrace.core.scheduler.admission import Continuous, LongestPrefix, StaticBatch
from headrace.core.scheduler.running_set import MAX_PREEMPTIONS
from headrace.core.scheduler.victims import LastRanked, LowestRecomputeCost
from headrace.core.sequence import Sequence
from headrace.core.tenancy.fair_share import ShareLedger
from headrace.core.tenancy.tenants import CLASSES
from headrace.testing import (
    ADMISSION_CHECKS,
    EVICTION_CHECKS,
    ORDER_CHECKS,
    VICTIM_CHECKS,
    HashingRunner,
    Record,
    check_outputs,
    drain,
    make_crowd,
    serve_crowd,
)
from headrace.wiring.engine import EVICTION, make_eviction
from tests.doubles.engines import plain_engine
from tests.doubles.scenes import request

ORDERS = [
    FirstComeFirstServed,
    ByPriority,
    lambda: ShortestFirst(lambda each: 0.0, lambda: 0.0),  # by age
    lambda: ShortestFirst(lambda each: len(each.tokens) * 0.01),
]
QUEUES = [  # over the pool that they serve
    lambda pool: single_queue(),
    lambda pool: FairQueue(ShareLedger(CLASSES, {"a": 2.0}), TenantQueue),
    lambda pool: FairQueue(ShareLedger(CLASSES, {}), TenantQueue),
    lambda pool: FairQueue(ShareLedger(CLASSES, {}), lambda: TenantQueue(LastOfWindow(), max_passes=3)),
    lambda pool: FairQueue(ShareLedger(CLASSES, {}), lambda: TenantQueue(LongestPrefix(pool), max_passes=3)),
]
ROOMS = [AlwaysFits, *(lambda mark=mark: Headroom(LengthPredictor(48), 4, mark) for mark in (0, 3))]
ADMISSIONS = [Continuous, lambda: StaticBatch(3, 0.05), lambda: StaticBatch(1, 0.0)]
VICTIMS = [LastRanked, LowestRecomputeCost]
EVICTIONS = [
    partial(make_eviction, SchedulerOptions(eviction_policy=name), 14, 2.0) for name in EVICTION.built_in
]


class LastOfWindow:
    """A pick policy that is as unfair as it may be."""

    def pick(self, window):
        return len(window) - 1


@pytest.mark.parametrize("check", ORDER_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("make", ORDERS)
def test_order(make, check):
    check(make)


@pytest.mark.parametrize("check", ADMISSION_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("make", ADMISSIONS)
def test_admission(make, check):
    check(make)


@pytest.mark.parametrize("check", VICTIM_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("make", VICTIMS)
def test_victims(make, check):
    check(make)


@pytest.mark.parametrize("check", EVICTION_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("make", EVICTIONS)
def test_eviction(make, check):
    check(make)


def with_overlap(*kinds):
    """Every combination, half of them overlapped: each two policies meet with and without."""
    for numbers in itertools.product(*(range(len(kind)) for kind in kinds)):
        yield *(kind[number] for kind, number in zip(kinds, numbers, strict=True)), sum(numbers) % 2


@pytest.mark.parametrize(
    ("order", "admission", "victims", "eviction", "overlap"),
    with_overlap(ORDERS, ADMISSIONS, VICTIMS, EVICTIONS),
)
def test_every_combination_serves_all_requests_and_does_so_again(
    order, admission, victims, eviction, overlap
):
    given = {
        "order": order,
        "admission": admission,
        "victims": victims,
        "eviction": eviction,
        "overlap": overlap,
    }
    record = serve_crowd(**given)
    check_outputs(record)
    assert serve_crowd(**given).events == record.events


@pytest.mark.parametrize(("order", "queue", "overlap"), with_overlap(ORDERS, QUEUES))
def test_every_queue_serves_all_requests_and_does_so_again(order, queue, overlap):
    record = serve_crowd(order=order, queue=queue, overlap=overlap)
    check_outputs(record)
    for each in make_crowd():
        wanted = [e for e in record.of(Preempted) if e.request_id == each.id and e.reason != "yield"]
        assert len(wanted) <= MAX_PREEMPTIONS
    assert serve_crowd(order=order, queue=queue, overlap=overlap).events == record.events


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("victims", VICTIMS)
@pytest.mark.parametrize("room", ROOMS)
def test_every_room_policy_admits_all_requests_and_does_so_again(room, victims, overlap):
    given = {"victims": victims, "queue": QUEUES[2], "room": room, "overlap": overlap}
    record = serve_crowd(**given)
    check_outputs(record)
    assert serve_crowd(**given).events == record.events


@pytest.mark.parametrize("make", ROOMS)
def test_with_nothing_running_all_free_blocks_fit(make):
    for tokens, free in itertools.product((1, 4, 5, 17, 40), range(1, 14)):
        fresh = -(-tokens // 4)
        candidate = Sequence(request("r", tokens), (0,), 48)
        assert make().fits([], candidate, fresh, free) == (fresh <= free)


def test_first_come_is_first_served():
    record = serve_crowd()
    seen = [int(event.request_id[1:]) for event in record.of(Admitted) if event.reason == "new"]
    for place, number in enumerate(seen):
        overtaken = sum(later < number for later in seen[place + 1 :])
        assert overtaken <= 8, "nobody looks past more than a few"
    assert seen[0] == 0


def quicker(token_seconds: float) -> RestoreIfFaster:
    links = {Tier.HOST: Link(0.001, 1e6), Tier.DISK: Link(0.01, 1e5)}
    return RestoreIfFaster(StepTimes(StepCost(8.0, 64.0), token_seconds), 4, 1000, links)


RESTORES = [AlwaysRestore, *(lambda t=t: quicker(t) for t in (1e-5, 1e-4, 3e-4, 1e-2))]


@pytest.mark.parametrize("make", RESTORES)
def test_what_is_restored_is_a_beginning_of_what_is_there_and_the_same_when_asked_again(make):
    tiers = [Tier.HOST, Tier.DISK]
    for lying in (lying for n in range(1, 6) for lying in itertools.product(tiers, repeat=n)):
        for start in (0, 16, 400):
            count = make().choose(start, lying)
            assert 0 <= count <= len(lying)
            assert count == make().choose(start, lying)


@pytest.mark.parametrize("make", RESTORES)
def test_what_is_brought_down_would_be_fetched_again(make):
    """Else it would be carried down for nothing."""
    for tier, blocks in itertools.product((Tier.HOST, Tier.DISK), (1, 2, 5, 40, 300)):
        assert make().choose(0, [tier] * blocks) == blocks or not make().pays(tier, blocks)


@pytest.mark.parametrize("make", EVICTIONS)
@pytest.mark.parametrize("restore", RESTORES)
@pytest.mark.parametrize("overlap", [0, 1])
def test_over_any_tiers_everybody_gets_the_right_text(make, restore, overlap):
    events: list[Event] = []
    lower = LowerTiers(
        LowerTier(Tier.HOST, 12, make()),
        LowerTier(Tier.DISK, 30, make()),
        restore(),
        block_size=4,
        block_bytes=1000,
        emit=events.append,
    )
    runner, record = HashingRunner(14, 4, 5, host_blocks=12, disk_blocks=30), Record()
    told = {"events": events, "lower": lower, "eviction": make()}
    sizes = {"max_num_seqs": 5, "max_model_len": 48}
    engine = plain_engine(runner, 14, 4, **told, knobs=Knobs(batched_tokens=16), overlap=overlap, **sizes)
    for each in make_crowd():
        engine.submit(each, 0.0)
    drain(engine, record, 0.0)
    engine.check_consistency()
    check_outputs(record)
