from __future__ import annotations

from headrace.core.queueing.order import ByPriority, FirstComeFirstServed
from tests.doubles.scenes import request


def test_first_come_ignores_priority():
    policy = FirstComeFirstServed()
    assert policy.rank(request("a", priority=9), 1) < policy.rank(request("b", priority=-9), 2)


def test_lower_priority_first_then_arrival():
    policy = ByPriority()
    ranks = [policy.rank(request("r", priority=p), n) for n, p in enumerate([1, 0, -1, 0])]
    assert sorted(range(4), key=ranks.__getitem__) == [2, 1, 3, 0]
