from __future__ import annotations

from headrace.core.queueing.order import ByPriority, FirstComeFirstServed, ShortestFirst
from tests.doubles.scenes import request


def test_first_come_ignores_priority():
    policy = FirstComeFirstServed()
    assert policy.rank(request("a", priority=9), 1) < policy.rank(request("b", priority=-9), 2)


def test_lower_priority_first_then_arrival():
    policy = ByPriority()
    ranks = [policy.rank(request("r", priority=p), n) for n, p in enumerate([1, 0, -1, 0])]
    assert sorted(range(4), key=ranks.__getitem__) == [2, 1, 3, 0]


def test_patience_weighs_waiting_against_work_and_may_change_between_two_requests():
    patience = 0.0
    policy = ShortestFirst(lambda each: float(len(each.tokens)), lambda: patience)
    long, short = request("long", 8, arrived=0.0), request("short", 2, arrived=5.0)
    assert policy.rank(long, 1) == (0.0, 1)  # by age alone
    assert policy.rank(long, 1) < policy.rank(short, 2)
    patience = 1.0
    assert policy.rank(long, 1) > policy.rank(short, 2)  # 8 seconds of work, and 5 + 2
