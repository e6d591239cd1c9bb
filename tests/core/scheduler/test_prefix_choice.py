from __future__ import annotations

from headrace.core.events import Admitted
from headrace.core.queueing.fair_queue import FairQueue
from headrace.core.queueing.tenant_queue import TenantQueue
from headrace.core.scheduler.prefix_choice import LongestPrefix
from headrace.core.sequence import Sequence
from headrace.core.tenancy.fair_share import ShareLedger
from headrace.core.tenancy.tenants import CLASSES
from headrace.testing.engines import Record, drain, hashing_engine
from tests.doubles.scenes import request, step


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
