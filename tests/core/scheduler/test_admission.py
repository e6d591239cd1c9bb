from __future__ import annotations

import math

from headrace.core.events import Admitted
from headrace.core.queueing.fair_queue import FairQueue, TenantQueue
from headrace.core.request import FinishReason
from headrace.core.scheduler.admission import Continuous, LongestPrefix, Queue, StaticBatch
from headrace.core.sequence import Sequence
from headrace.core.tenancy.fair_share import ShareLedger
from headrace.core.tenancy.tenants import CLASSES
from headrace.testing.engines import Record, drain, hashing_engine
from tests.doubles.scenes import admitted, request, step


def test_continuous_admits_all_that_wait_and_asks_at_once():
    policy = Continuous()
    assert policy.admit(Queue(7, 0.0, 3, 12), 1.0) == 7
    assert policy.ready_at(Queue(7, 0.0, 3, 12)) == -math.inf


def test_a_full_static_batch_is_ready_at_once():
    policy = StaticBatch(3, timeout=10.0)
    assert policy.ready_at(Queue(waiting=3, oldest_arrival=5.0, running=0, admitted=0)) <= 5.0
    assert policy.ready_at(Queue(waiting=2, oldest_arrival=5.0, running=0, admitted=0)) == 15.0


def test_engine_does_not_sleep_while_a_full_static_batch_waits():
    engine, _ = hashing_engine(admission=StaticBatch(2, timeout=10.0))
    for name in "abcd":
        engine.submit(request(name), 0.0)
    record = Record()
    end = drain(engine, record)
    assert admitted(record) == ["a", "b", "c", "d"]
    assert end < 1.0, "the second gang waited for a timeout that it did not need"


def test_a_small_static_batch_starts_after_the_timeout_of_its_oldest():
    engine, _ = hashing_engine(admission=StaticBatch(3, timeout=0.5))
    engine.submit(request("a", arrived=0.0), 0.0)
    record = Record()
    step(engine, record, now=0.4)
    assert admitted(record) == []
    assert engine.wake_at(0.4) == 0.5
    step(engine, record, now=0.5)
    assert admitted(record) == ["a"]


def test_the_next_static_batch_starts_only_when_all_of_the_last_have_finished():
    engine, _ = hashing_engine(admission=StaticBatch(2, timeout=0.5))
    lengths = {"a": 1, "b": 6, "c": 2, "d": 2}
    for name, length in lengths.items():
        engine.submit(request(name, max_tokens=length), 0.0)
    record = Record()
    while "b" not in record.ends:
        assert admitted(record) in ([], ["a", "b"])
        step(engine, record)
    assert "a" in record.ends
    drain(engine, record)
    assert admitted(record) == ["a", "b", "c", "d"]


def test_a_static_batch_larger_than_the_slots_is_admitted_as_they_come_free():
    engine, _ = hashing_engine(admission=StaticBatch(3, timeout=0.5), max_num_seqs=2)
    for name in "abc":
        engine.submit(request(name), 0.0)
    record = Record()
    drain(engine, record)
    assert set(record.ends) == set("abc")


def test_a_cancelled_member_does_not_hold_the_static_batch_up():
    engine, _ = hashing_engine(admission=StaticBatch(2, timeout=0.5))
    for name in "ab":
        engine.submit(request(name, max_tokens=None), 0.0)
    record = Record()
    step(engine, record, 2)
    engine.submit(request("c"), 0.0)
    engine.submit(request("d"), 0.0)
    engine.cancel("a", FinishReason.CANCELLED, 0.0)
    step(engine, record)
    assert admitted(record) == ["a", "b"]
    engine.cancel("b", FinishReason.CANCELLED, 0.0)
    step(engine, record)
    assert admitted(record) == ["a", "b", "c", "d"]


def engine_with_pick(max_passes: int):
    made: list[LongestPrefix] = []
    queue = FairQueue(ShareLedger(CLASSES, {}), lambda: TenantQueue(made[0], max_passes))
    engine, runner = hashing_engine(queue=queue, max_num_seqs=1, num_blocks=64)
    made.append(LongestPrefix(engine.scheduler.pool))
    return engine, runner


def order(record: Record) -> list[str]:
    return [event.request_id for event in record.of(Admitted)]


def test_the_request_with_the_longest_cached_prefix_goes_first():
    engine, _ = engine_with_pick(max_passes=9)
    record = Record()
    shared = tuple(range(20))
    engine.submit(request("first", (*shared, 50), max_tokens=2), 0.0)
    step(engine, record)
    for name, tokens in (("other", 21), ("part", (*shared[:8], 1, 2, 3)), ("most", (*shared, 51, 52))):
        engine.submit(request(name, tokens, max_tokens=2), 0.0)
    drain(engine, record)
    assert order(record) == ["first", "most", "part", "other"]


def test_no_request_is_passed_over_more_often_than_allowed():
    engine, _ = engine_with_pick(max_passes=2)
    record = Record()
    shared = tuple(range(20))
    engine.submit(request("first", shared, max_tokens=2), 0.0)
    step(engine, record)
    engine.submit(request("alone", 20, max_tokens=2), 0.0)
    for i in range(6):
        engine.submit(request(f"r{i}", (*shared, 60 + i), max_tokens=2), 0.0)
    drain(engine, record)
    assert order(record).index("alone") == 3, "one ran already, two passed"


def test_among_equals_the_group_goes_on():
    engine, _ = engine_with_pick(max_passes=9)
    pick = LongestPrefix(engine.scheduler.pool)
    window = [
        Sequence(request(name, affinity=group), (i,), 64)
        for i, (name, group) in enumerate([("a", "x"), ("b", "y"), ("c", "x")])
    ]
    assert pick.pick(window) == 0
    assert pick.pick(window[1:]) == 1, "c is of the group that went last"
