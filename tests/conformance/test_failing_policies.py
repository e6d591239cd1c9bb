"""What a policy that raises, or answers nonsense, may cost: the request that it was asked for, and nothing else.

One policy port after the other is given to an engine that serves a crowd. It answers as a good one would, until it is
asked for the request ``bad`` (a port that is asked for nobody in particular: until it is asked for the first time).
"""

from __future__ import annotations

import math
import random

import pytest

from headrace.core.events import Evicted, EvictReason, TransferFailed
from headrace.core.memory.restore import AlwaysRestore
from headrace.core.plan import Tier
from headrace.core.queueing.fair_queue import FairQueue, TenantQueue
from headrace.core.request import FinishReason, Request
from headrace.core.scheduler.admission import Continuous
from headrace.core.sequence import Sequence
from headrace.core.tenancy.fair_share import ShareLedger
from headrace.core.tenancy.tenants import CLASSES
from headrace.testing.engines import Record, drain, hashing_engine
from headrace.testing.hashing_runner import expected_tokens
from tests.doubles.scenes import request


class Raises:
    """An answer that is an error."""

    def __repr__(self) -> str:
        return "raises"


class Untold:
    """An answer that is neither true nor false."""

    def __bool__(self) -> bool:
        raise TypeError("neither")

    def __repr__(self) -> str:
        return "untold"


def give(answer):
    if isinstance(answer, Raises):
        raise RuntimeError("no idea")
    return answer


class Order:
    def __init__(self, answer) -> None:
        self.answer = answer

    def rank(self, request, number):
        if request.id != "bad":
            return (number,)
        return (*self.answer, number) if self.answer == (math.nan,) else give(self.answer)


class Admission(Continuous):
    """Asked for the queue, it fails the first time."""

    def __init__(self, answer) -> None:
        self.answer = answer
        self.asked = 0

    def admit(self, queue, now):
        self.asked += 1
        return give(self.answer) if self.asked == 1 else queue.waiting


class Unready:
    """It admits nobody until ``bad`` has gone, and says nonsense of when it will."""

    def __init__(self, answer) -> None:
        self.answer = answer

    def admit(self, queue, now):
        return 0 if queue.waiting == len(CROWD) else queue.waiting

    def ready_at(self, queue):
        return give(self.answer)


class Room:
    def __init__(self, answer) -> None:
        self.answer = answer

    def fits(self, running, candidate, fresh, free):
        return give(self.answer) if candidate.request.id == "bad" else fresh + len(running) <= free


class Pick:
    """As Python counts: the answer when ``bad`` is the first of the window."""

    def __init__(self, answer) -> None:
        self.answer = answer

    def pick(self, window):
        return give(self.answer) if window[0].request.id == "bad" else 0


class Victims:
    def __init__(self, answer) -> None:
        self.answer = answer
        self.asked = 0

    def choose(self, candidates, now):
        self.asked += 1
        return give(self.answer) if self.asked == 1 else candidates[-1]


class Eviction:
    def __init__(self, answer, every: int = 2) -> None:
        self.answer = answer
        self.every = every
        self.asked = 0

    def priority(self, block):
        self.asked += 1
        return block.used if self.asked % self.every else give(self.answer)


class Restore(AlwaysRestore):
    """What is asked for ``bad`` is not told to it, so it fails the first time."""

    def __init__(self, answer) -> None:
        self.answer = answer
        self.asked = 0

    def choose(self, start, tiers):
        self.asked += 1
        return give(self.answer) if self.asked == 1 else len(tiers)


class Tight(AlwaysRestore):
    """It cannot say what pays, nor learn."""

    def pays(self, tier, blocks):
        if tier is Tier.DISK:
            return True
        raise RuntimeError("no idea")

    def observe(self, tier, seconds):
        raise RuntimeError("no idea")


def crowd() -> list[Request]:
    rng = random.Random(3)
    shared = tuple(range(1, 9))
    lives = [
        request(f"r{i}", (*shared, *(rng.randrange(90) for _ in range(rng.randint(1, 9)))), max_tokens=12)
        for i in range(12)
    ]
    return [request("bad", 5, max_tokens=12), *lives]


CROWD = crowd()
STRANGER = Sequence(request("stranger"), (0,), 48)


def live(**given) -> Record:
    engine, _ = hashing_engine(num_blocks=20, max_num_seqs=5, max_model_len=48, **given)
    record, now = Record(), 0.0
    for each in CROWD:
        engine.submit(each, now)
    for _ in range(2):  # the second time some of it is found again
        now = drain(engine, record, now)
        engine.check_consistency()
    return record


def check(record: Record, failed: set[str], policy: str) -> None:
    """Everybody ended once; those failed say whose fault it was, all others have their right text."""
    assert {each for each, (end,) in record.ends.items() if end.reason is FinishReason.FAILED} == failed
    for each in CROWD:
        (end,) = record.ends[each.id]
        if each.id in failed:
            assert end.message.startswith(f"the {policy} policy failed: ")
        else:
            assert end.reason is FinishReason.LENGTH
            assert record.tokens[each.id] == expected_tokens(each.tokens, 0, 12, frozenset())


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize(
    "answer", [Raises(), None, "first", (), ("a", 1), (math.nan,), (0.0,), [1]], ids=repr
)
def test_an_order_without_a_rank_costs_the_request_that_it_should_have_ranked(answer, overlap):
    check(live(order=Order(answer), overlap=overlap), {"bad"}, "order")


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("answer", [Raises(), None, "many", -1, 0.5, math.nan], ids=repr)
def test_an_admission_that_fails_costs_the_one_that_was_to_be_admitted(answer, overlap):
    check(live(admission=Admission(answer), overlap=overlap), {"bad"}, "admission")


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("answer", [Raises(), None, "soon", math.nan, -math.inf, math.inf], ids=repr)
def test_a_request_that_is_never_admitted_fails_instead_of_waiting_for_ever(answer, overlap):
    check(live(admission=Unready(answer), overlap=overlap), {"bad"}, "admission")


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("answer", [Raises(), Untold(), False, None], ids=repr)
def test_a_room_that_is_never_large_enough_costs_the_one_that_asks_for_it(answer, overlap):
    check(live(room=Room(answer), overlap=overlap), {"bad"}, "room")


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("answer", [Raises(), None, "second", 99, -1, 0.5], ids=repr)
def test_a_pick_that_fails_costs_the_first_of_the_line(answer, overlap):
    queue = FairQueue(ShareLedger(CLASSES, {}), lambda: TenantQueue(Pick(answer), 4))
    check(live(queue=queue, overlap=overlap), {"bad"}, "pick")


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize(
    "answer", [Raises(), None, "you", STRANGER], ids=["raises", "None", "you", "stranger"]
)
def test_no_victim_costs_the_one_that_needed_it(answer, overlap):
    record = live(victims=Victims(answer), overlap=overlap)
    (failed,) = (each for each, (end,) in record.ends.items() if end.reason is FinishReason.FAILED)
    check(record, {failed}, "victim")


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("host_blocks", [0, 8])
@pytest.mark.parametrize("answer", [Raises(), None, "low", math.nan], ids=repr)
def test_unranked_content_is_evicted_first_and_fails_no_request(answer, host_blocks, overlap):
    record = live(eviction=Eviction(answer), host_blocks=host_blocks, overlap=overlap)
    check(record, set(), "")
    unranked = [each for each in record.of(Evicted) if each.reason is EvictReason.UNRANKED]
    assert unranked, "what went for want of a rank is told"


def restored(overlap: int, restore, disk_blocks: int = 0) -> Record:
    """A prompt is computed, evicted, and comes back as ``bad``."""
    engine, _ = hashing_engine(
        num_blocks=12,
        max_model_len=48,
        host_blocks=30,
        disk_blocks=disk_blocks,
        overlap=overlap,
        restore=restore,
    )
    record, now = Record(), 0.0
    for name, tokens in (("once", (7,) * 30), ("other", (8,) * 40), ("bad", (7,) * 30), ("again", (8,) * 40)):
        engine.submit(request(name, tokens), now)
        now = drain(engine, record, now)
        engine.check_consistency()
    return record


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("answer", [Raises(), None, "all", 99, -1, 0.5], ids=repr)
def test_a_failing_restore_policy_fails_only_the_request_it_was_called_for(answer, overlap):
    record = restored(overlap, Restore(answer))
    assert {each: end.reason for each, (end,) in record.ends.items()} == {
        "once": FinishReason.LENGTH,
        "other": FinishReason.LENGTH,
        "bad": FinishReason.FAILED,
        "again": FinishReason.LENGTH,
    }
    assert record.ends["bad"][0].message.startswith("the restore policy failed: ")
    assert record.tokens["again"] == record.tokens["other"]


@pytest.mark.parametrize("overlap", [0, 1])
def test_if_the_restore_policy_fails_nothing_is_demoted(overlap):
    record = restored(overlap, Tight(), disk_blocks=20)
    assert all(end.reason is FinishReason.LENGTH for (end,) in record.ends.values())
    assert record.tokens["bad"] == record.tokens["once"]
    assert record.of(TransferFailed)
