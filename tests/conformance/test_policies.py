"""What every policy must keep to; a new one is added to the lists below and has to pass.

Deterministic: the same questions get the same answers. Conserving: nothing is lost, nothing served twice. Live: every
request ends, though it may wait long.
"""

from __future__ import annotations

import itertools
import random

import pytest

from headrace.core.engine import Engine
from headrace.core.events import Admitted, Event, Preempted
from headrace.core.knobs import Knobs
from headrace.core.memory.block_pool import BlockPool
from headrace.core.memory.eviction import CostAwareEviction, EvictionPolicy, LeastRecentlyUsed
from headrace.core.memory.lower_tier import LowerTier
from headrace.core.memory.restore import AlwaysRestore, Link, RestoreIfFaster
from headrace.core.memory.tiers import LowerTiers
from headrace.core.plan import Tier
from headrace.core.prediction.memory_peak import AlwaysFits, Headroom
from headrace.core.prediction.output_lengths import LengthPredictor
from headrace.core.prediction.step_cost import StepCost
from headrace.core.prediction.step_times import StepTimes
from headrace.core.queueing.fair_queue import FairQueue, single_file
from headrace.core.queueing.order import ByAge, ByPriority, FirstComeFirstServed, ShortestFirst
from headrace.core.queueing.tenant_queue import TenantQueue
from headrace.core.request import FinishReason, Request
from headrace.core.scheduler.admission import Continuous, Queue, StaticBatch
from headrace.core.scheduler.prefix_choice import LongestPrefix
from headrace.core.scheduler.running_set import MAX_PREEMPTIONS
from headrace.core.scheduler.scheduler import Scheduler
from headrace.core.scheduler.victims import LastRanked, LowestRecomputeCost
from headrace.core.sequence import Sequence
from headrace.core.tenancy.classes import CLASSES
from headrace.core.tenancy.fair_share import ShareLedger
from tests.doubles.engines import Record, drain
from tests.doubles.hashing_runner import HashingRunner, expected_tokens
from tests.doubles.scenes import request

ORDERS = [
    FirstComeFirstServed,
    ByPriority,
    ByAge,
    lambda: ShortestFirst(lambda each: len(each.tokens) * 0.01),
]
QUEUES = [  # over the pool that they serve
    lambda pool: single_file(),
    lambda pool: FairQueue(ShareLedger(CLASSES, {"a": 2.0}), TenantQueue),
    lambda pool: FairQueue(ShareLedger(CLASSES, {}), TenantQueue),
    lambda pool: FairQueue(ShareLedger(CLASSES, {}), lambda: TenantQueue(LastOfWindow(), max_passes=3)),
    lambda pool: FairQueue(ShareLedger(CLASSES, {}), lambda: TenantQueue(LongestPrefix(pool), max_passes=3)),
]
ROOMS = [AlwaysFits, *(lambda mark=mark: Headroom(LengthPredictor(48), 4, mark) for mark in (0, 3))]
ADMISSIONS = [Continuous, lambda: StaticBatch(3, 0.05), lambda: StaticBatch(1, 0.0)]
VICTIMS = [LastRanked, LowestRecomputeCost]
EVICTIONS = [LeastRecentlyUsed, lambda: CostAwareEviction(14, 2.0)]


class LastOfWindow:
    """A pick policy that is as unfair as it may be."""

    def pick(self, window):
        return len(window) - 1


def crowd(count: int = 24) -> list[Request]:
    rng = random.Random(7)
    shared = tuple(range(9))
    return [
        request(
            f"r{i}",
            shared[: rng.randint(1, 9)] + tuple(rng.randrange(50) for _ in range(rng.randint(1, 12))),
            max_tokens=rng.randint(1, 14),
            priority=rng.randint(-2, 2),
            tenant=rng.choice("ab"),
            service_class=rng.choice(["priority", "default", "flex", "background"]),
        )
        for i in range(count)
    ]


def live(order, admission, victims, eviction, overlap: int, queue=QUEUES[0], room=AlwaysFits) -> Record:
    events: list[Event] = []
    pool = BlockPool(14, 4, eviction(), events.append)
    scheduler = Scheduler(
        pool,
        queue(pool),
        order(),
        admission(),
        victims(),
        room(),
        events,
        max_num_seqs=5,
        max_model_len=48,
    )
    engine = Engine(scheduler, HashingRunner(14, 4, 5), events, Knobs(batched_tokens=16), overlap)
    record = Record()
    now = 0.0
    for each in crowd():
        engine.submit(each, now)
        now += 0.002
        record.fold(engine.step(now))
        engine.check_books()
    drain(engine, record, now)
    engine.check_books()
    return record


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize(
    ("order", "admission", "victims", "eviction"),
    list(itertools.product(ORDERS, ADMISSIONS, VICTIMS, EVICTIONS)),
)
def test_every_combination_serves_everybody_the_right_text_and_does_so_again(
    order, admission, victims, eviction, overlap
):
    record = live(order, admission, victims, eviction, overlap)
    for each in crowd():
        (end,) = record.ends[each.id]
        assert end.reason is FinishReason.LENGTH
        length = each.params.max_tokens
        assert record.tokens[each.id] == expected_tokens(each.tokens, 0, length, frozenset())
    assert live(order, admission, victims, eviction, overlap).events == record.events


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("queue", QUEUES)
@pytest.mark.parametrize("order", ORDERS)
def test_every_queue_serves_everybody_the_right_text_and_does_so_again(order, queue, overlap):
    record = live(order, Continuous, LastRanked, LeastRecentlyUsed, overlap, queue)
    for each in crowd():
        (end,) = record.ends[each.id]
        assert end.reason is FinishReason.LENGTH
        assert record.tokens[each.id] == expected_tokens(each.tokens, 0, each.params.max_tokens, frozenset())
        wanted = [e for e in record.of(Preempted) if e.request_id == each.id and e.reason != "yield"]
        assert len(wanted) <= MAX_PREEMPTIONS
    assert live(order, Continuous, LastRanked, LeastRecentlyUsed, overlap, queue).events == record.events


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("victims", VICTIMS)
@pytest.mark.parametrize("room", ROOMS)
def test_every_room_lets_everybody_in_sooner_or_later_and_does_so_again(room, victims, overlap):
    given = (FirstComeFirstServed, Continuous, victims, LeastRecentlyUsed, overlap, QUEUES[2], room)
    record = live(*given)
    for each in crowd():
        (end,) = record.ends[each.id]
        assert end.reason is FinishReason.LENGTH
        assert record.tokens[each.id] == expected_tokens(each.tokens, 0, each.params.max_tokens, frozenset())
    assert live(*given).events == record.events


@pytest.mark.parametrize("make", ROOMS)
def test_with_nobody_running_there_is_room_for_all_that_is_free(make):
    for tokens, free in itertools.product((1, 4, 5, 17, 40), range(1, 14)):
        fresh = -(-tokens // 4)
        candidate = Sequence(request("r", tokens), (0,), 48)
        assert make().fits([], candidate, fresh, free) == (fresh <= free)


@pytest.mark.parametrize("make", ORDERS)
def test_ranks_are_unique_comparable_and_repeatable(make):
    ranks = [make().rank(each, number) for number, each in enumerate(crowd())]
    assert len(set(ranks)) == len(ranks)
    sorted(ranks)
    assert ranks == [make().rank(each, number) for number, each in enumerate(crowd())]


@pytest.mark.parametrize("make", ORDERS)
def test_among_equals_the_earlier_ranks_first(make):
    policy = make()
    ranks = [policy.rank(request(f"r{i}"), i) for i in range(5)]
    assert ranks == sorted(ranks)


def test_first_come_is_first_served():
    record = live(FirstComeFirstServed, Continuous, LastRanked, LeastRecentlyUsed, 0)
    seen = [int(event.request_id[1:]) for event in record.of(Admitted) if event.reason == "new"]
    for place, number in enumerate(seen):
        overtaken = sum(later < number for later in seen[place + 1 :])
        assert overtaken <= 8, "nobody looks past more than a few"
    assert seen[0] == 0


@pytest.mark.parametrize("make", ADMISSIONS)
def test_admission_admits_nobody_who_does_not_wait_and_is_ready_when_it_says(make):
    for waiting, running, oldest in itertools.product((1, 2, 5), (0, 1, 4), (0.0, 3.0)):
        queue = Queue(waiting, oldest, running, admitted=9)
        assert 0 <= make().admit(queue, 100.0) <= waiting
        if running == 0:
            due = max(make().ready_at(queue), 0.0)
            assert make().admit(queue, due) > 0, "it named a time and then did not admit"


@pytest.mark.parametrize("make", VICTIMS)
def test_a_victim_is_one_of_the_candidates_and_not_the_first_of_many(make):
    sequences = [Sequence(request(f"r{i}"), (i,), 64) for i in range(4)]
    for count in range(1, 5):
        chosen = make().choose(sequences[:count], 0.0)
        assert chosen in sequences[:count]
        assert chosen is make().choose(sequences[:count], 0.0)
        assert count == 1 or chosen is not sequences[0], "whoever ranks first must make progress"


@pytest.mark.parametrize("make", EVICTIONS)
def test_eviction_gives_back_every_cached_block_once(make):
    policy: EvictionPolicy = make()
    pool = BlockPool(6, 2, policy, lambda event: None)
    table = pool.allocate(6)
    parent = b""
    for i, block in enumerate(table):
        parent = pool.register(block, parent, (i, i))
    pool.release(table)
    assert sorted(pool.allocate(6)) == list(range(6))
    pool.check()


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
        tell=events.append,
    )
    pool = BlockPool(14, 4, make(), events.append, lower)
    scheduler = Scheduler(
        pool,
        single_file(),
        FirstComeFirstServed(),
        Continuous(),
        LastRanked(),
        AlwaysFits(),
        events,
        max_num_seqs=5,
        max_model_len=48,
    )
    runner = HashingRunner(14, 4, 5, host_blocks=12, disk_blocks=30)
    engine, record = Engine(scheduler, runner, events, Knobs(batched_tokens=16), overlap), Record()
    for each in crowd():
        engine.submit(each, 0.0)
    drain(engine, record, 0.0)
    engine.check_books()
    for each in crowd():
        assert record.tokens[each.id] == expected_tokens(each.tokens, 0, each.params.max_tokens, frozenset())
