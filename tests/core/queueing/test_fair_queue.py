"""Who is next, and who must give way: the queue by itself, and in an engine over a tiny pool."""

from __future__ import annotations

import random
from collections.abc import Sequence as Many
from itertools import combinations

import pytest

from headrace.core.events import Preempted
from headrace.core.queueing import fair_queue as fair_module
from headrace.core.queueing.fair_queue import (
    SWEEP,
    FairQueue,
    PolicyFailed,
    TenantQueue,
    requests_to_defer,
    single_queue,
)
from headrace.core.request import FinishReason
from headrace.core.sequence import Sequence, Status
from headrace.core.tenancy.fair_share import ShareLedger
from headrace.core.tenancy.tenants import CLASSES, ServiceClass
from headrace.testing.engines import Record, drain, hashing_engine
from tests.doubles.scenes import admitted, request, step


def fair(classes=CLASSES, **weights: float) -> FairQueue:
    return FairQueue(ShareLedger(classes, weights), TenantQueue)


def enter(queue: FairQueue, name: str, **fields) -> Sequence:
    number = len(queue)
    sequence = Sequence(request(name, **fields), (number,), 64)
    queue.enter(sequence)
    return sequence


def test_the_least_served_tenant_goes_next():
    queue = fair()
    a, b = enter(queue, "a", tenant="a"), enter(queue, "b", tenant="b")
    enter(queue, "a2", tenant="a")
    assert queue.pop(0.0) is a
    a.account.charge(10.0)
    assert queue.pop(0.0) is b
    b.account.charge(30.0)
    assert queue.pop(0.0).request.id == "a2"


def test_coming_and_going_for_ever_does_not_grow_the_books():
    queue = fair()
    for i in range(500):
        sequence = enter(queue, f"r{i}", tenant=f"t{i % 3}")
        assert queue.pop(0.0) is sequence
        sequence.account.charge(1.0)
        sequence.enter(Status.RUNNING)
        sequence.enter(Status.FINISHED)
        queue.end(sequence, waited=False)
    group = queue._classes["default"]
    assert len(group.heap) <= len(group.tenants) <= 3


def test_tenants_with_equal_virtual_time_are_served_in_order_of_waiting():
    queue = fair()
    for name in ("zoe", "max", "ada"):
        enter(queue, name, tenant=name)
    assert [queue.pop(0.0).request.tenant for _ in range(3)] == ["zoe", "max", "ada"]


def test_a_stream_of_new_tenants_does_not_starve_earlier_ones():
    queue = fair()
    for i in range(5):
        enter(queue, f"regular{i}", tenant="regular")
    gone = []
    for i in range(60):
        enter(queue, f"new{i}", tenant=f"new{i}")
        sequence = queue.pop(0.0)
        sequence.account.charge(1000.0)
        gone.append(sequence.request.tenant)
        sequence.enter(Status.RUNNING)
        sequence.enter(Status.FINISHED)
        queue.end(sequence, waited=False)
    assert gone.count("regular") >= 3, "some of them always wait, and the regular one has his share"


def test_may_slow_decoding_checks_only_running_tenants(monkeypatch):
    asked = []
    holds = fair_module._holds_too_much
    monkeypatch.setattr(fair_module, "_holds_too_much", lambda *given: asked.append(1) or holds(*given))
    engine, _ = hashing_engine(queue=fair(), max_num_seqs=2)
    for i in range(200):
        engine.submit(request(f"r{i}", tenant=f"t{i}"), 0.0)
    step(engine, Record())
    assert len(asked) < 50, "planning does not grow with the tenants that wait"


@pytest.mark.parametrize(
    ("waiting", "behind"),
    [
        ({"tenant": "a"}, False),
        ({"tenant": "b"}, True),
        ({"tenant": "a", "service_class": "flex"}, True),
    ],
)
def test_a_waiting_request_goes_before_a_started_one_that_was_served_more(waiting, behind):
    queue = fair((ServiceClass("default", 0, 1.0), ServiceClass("flex", 0, 1.0)))
    started = enter(queue, "started", tenant="a", service_class="default")
    assert queue.pop(0.0) is started
    head = enter(queue, "waiting", **{"service_class": "default"} | waiting)
    started.account.charge(10.0)
    assert queue.is_behind(started, 0.0) == behind
    head.account.charge(20.0)
    assert not queue.is_behind(started, 0.0)


def test_in_single_file_only_rank_counts():
    queue = single_queue()
    for name, tenant in (("a", "x"), ("b", "y"), ("c", "x")):
        enter(queue, name, tenant=tenant, service_class="flex" if name == "a" else "priority")
    assert [queue.pop(0.0).request.id for _ in range(3)] == ["a", "b", "c"]
    assert queue.pop(0.0) is None


def test_weights_decide_how_often_a_tenant_goes():
    queue = fair(a=3.0)
    for i in range(40):
        enter(queue, f"a{i}", tenant="a")
        enter(queue, f"b{i}", tenant="b")
    gone = []
    for _ in range(40):
        sequence = queue.pop(0.0)
        sequence.account.charge(1000.0)
        gone.append(sequence.request.tenant)
    assert gone.count("a") == 30


def test_a_better_class_pushes_a_lower_one_out_when_no_slot_is_free():
    engine, _ = hashing_engine(queue=fair(), max_num_seqs=1)
    record = Record()
    engine.submit(request("low", service_class="flex", max_tokens=30), 0.0)
    step(engine, record, 3)
    engine.submit(request("high", service_class="priority"), 0.0)
    drain(engine, record)
    assert [(e.request_id, e.reason) for e in record.of(Preempted)] == [("low", "owed")]
    assert list(record.ends) == ["high", "low"]
    assert record.ends["low"][0].reason is FinishReason.LENGTH


def test_a_flood_makes_room_for_another_tenant_of_its_class():
    engine, _ = hashing_engine(queue=fair(), max_num_seqs=4)
    record = Record()
    for i in range(12):
        engine.submit(request(f"f{i}", tenant="flood", max_tokens=40), 0.0)
    step(engine, record, 3)
    engine.submit(request("one", tenant="other"), 0.0)
    step(engine, record, 2)
    assert "one" in admitted(record)
    drain(engine, record)
    assert len(record.ends) == 13


def test_a_class_that_gathers_waits_for_company_only_while_others_run():
    classes = (ServiceClass("default", 0, 1.0), ServiceClass("flex", 1, 1.0, gather_seconds=5.0))
    engine, _ = hashing_engine(queue=fair(classes))
    record = Record()
    engine.submit(request("runs", max_tokens=10), 0.0)
    engine.submit(request("held", service_class="flex"), 0.0)
    step(engine, record, 3, now=1.0)
    assert admitted(record) == ["runs"]
    step(engine, record, now=5.0)
    assert admitted(record) == ["runs", "held"]
    drain(engine, record, 5.0)
    engine.submit(request("alone", service_class="flex", arrived=6.0), 6.0)
    step(engine, record, now=6.0)
    assert admitted(record)[-1] == "alone"


def test_a_class_joins_in_batches_of_its_prompt_tokens():
    classes = (ServiceClass("default", 0, 1.0, prompt_tokens=10),)
    engine, _ = hashing_engine(queue=fair(classes))
    record = Record()
    for name in "abc":
        engine.submit(request(name, 6), 0.0)
    step(engine, record)
    assert admitted(record) == ["a"], "a second one would make it 12 tokens"
    step(engine, record)
    assert admitted(record) == ["a", "b"]


class Broken:
    def pick(self, window):
        raise KeyError("no idea")


class Nonsense:
    def pick(self, window):
        return 99


@pytest.mark.parametrize("pick", [Broken(), Nonsense()])
def test_a_pick_that_fails_costs_one_request(pick):
    queue = FairQueue(ShareLedger(CLASSES, {}), lambda: TenantQueue(pick, 4))
    enter(queue, "a"), enter(queue, "b")
    with pytest.raises(PolicyFailed):
        queue.pop(0.0)
    assert len(queue) == len(list(queue)) == 2, "nobody was lost"
    engine, _ = hashing_engine(queue=FairQueue(ShareLedger(CLASSES, {}), lambda: TenantQueue(pick, 4)))
    record = Record()
    for name in "abc":
        engine.submit(request(name), 0.0)
    drain(engine, record)
    reasons = {name: end.reason for name, (end,) in record.ends.items()}
    assert reasons["c"] is FinishReason.LENGTH, "alone in its line it needs no pick"
    assert set(reasons.values()) == {FinishReason.FAILED, FinishReason.LENGTH}
    assert "pick policy failed" in record.ends["a"][0].message
    engine.check_consistency()


class BadOrder:
    def rank(self, request, number):
        if request.id == "bad":
            raise RuntimeError("no rank")
        return (number,)


class BadVictims:
    def choose(self, candidates, now):
        raise RuntimeError("mercy")


class BadRoom:
    def fits(self, running, candidate, fresh, free):
        if candidate.request.id == "bad":
            raise RuntimeError("no room")
        return True


@pytest.mark.parametrize("given", [{"order": BadOrder()}, {"room": BadRoom()}])
def test_a_policy_that_raises_costs_the_request_it_was_asked_for(given):
    engine, _ = hashing_engine(**given)
    record = Record()
    for name in ("good", "bad", "fine"):
        engine.submit(request(name), 0.0)
    drain(engine, record)
    reasons = {name: end.reason for name, (end,) in record.ends.items()}
    assert reasons == {
        "good": FinishReason.LENGTH,
        "bad": FinishReason.FAILED,
        "fine": FinishReason.LENGTH,
    }
    engine.check_consistency()


def test_a_failing_victim_policy_fails_only_requests_that_needed_a_victim():
    engine, _ = hashing_engine(victims=BadVictims(), num_blocks=8, block_size=4, max_model_len=32)
    record = Record()
    for name in "abcd":
        engine.submit(request(name, 6, max_tokens=20), 0.0)
    drain(engine, record)
    reasons = [end.reason for (end,) in record.ends.values()]
    assert len(reasons) == 4
    assert FinishReason.LENGTH in reasons
    assert FinishReason.FAILED in reasons
    engine.check_consistency()


def sequences(count: int) -> list[Sequence]:
    return [Sequence(request(f"r{i}"), (i,), 64) for i in range(count)]


def test_lowest_rank_first_in_any_order_of_arrival():
    queue = TenantQueue()
    a, b, c = sequences(3)
    for sequence in (c, a, b):
        queue.push(sequence)
    assert queue.peek(0.0) is a
    assert [queue.pop(0.0), queue.pop(0.0), queue.pop(0.0), queue.pop(0.0)] == [a, b, c, None]
    assert not queue


def test_those_that_ended_are_neither_counted_nor_met():
    queue = TenantQueue()
    many = sequences(3 * SWEEP)
    for sequence in many:
        queue.push(sequence)
    for sequence in many[:-1]:
        sequence.enter(Status.FINISHED)
        queue.note_end(sequence)
        assert len(queue._timely._heap) <= 2 * len(queue) + SWEEP
    assert len(queue) == len(list(queue)) == 1
    assert queue.pop(0.0) is many[-1]
    assert queue.peek(0.0) is None


def waiting(*lines: tuple[float, float]) -> list[Sequence]:
    """Sequences by latest start and seconds of their prompts."""
    made = []
    for number, (latest_start, seconds) in enumerate(sorted(lines)):
        sequence = Sequence(request(f"r{number}"), (number,), 64)
        sequence.latest_start, sequence.prompt_seconds = latest_start, seconds
        made.append(sequence)
    return made


def in_time(line: Many[Sequence], now: float) -> bool:
    for sequence in line:
        if now > sequence.latest_start:
            return False
        now += sequence.prompt_seconds
    return True


def test_no_request_is_deferred_while_all_can_be_in_time():
    assert requests_to_defer(waiting((0.0, 1.0), (1.0, 5.0), (6.0, 1.0)), 0.0) == []
    assert requests_to_defer([], 0.0) == []


def test_the_longest_is_given_up_though_it_is_not_the_one_that_would_be_late():
    first, longest, last = waiting((0.0, 1.0), (2.0, 5.0), (3.0, 1.0))
    assert requests_to_defer([first, longest, last], 0.0) == [longest]


def test_a_request_that_is_already_late_delays_no_other():
    late, other = waiting((0.0, 1.0), (2.0, 5.0))
    assert requests_to_defer([late, other], 1.0) == [late]


def test_no_other_choice_saves_more():
    for seed in range(200):
        rng = random.Random(seed)
        line = waiting(*((rng.randint(-1, 12), rng.randint(1, 6)) for _ in range(rng.randint(1, 7))))
        lost = requests_to_defer(line, 0.0)
        kept = [sequence for sequence in line if sequence not in lost]
        assert in_time(kept, 0.0), seed
        assert not any(in_time(choice, 0.0) for choice in combinations(line, len(kept) + 1)), seed
