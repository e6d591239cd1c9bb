import math

import pytest

from headrace.lab.bench.stats import Record
from headrace.lab.tune import Goal, time_per_token


def record(e2e, tokens=10, error=""):
    return Record("r", 0.0, e2e, (e2e / 2, e2e), 5, tokens, 0, "length", error)


def test_with_targets_the_share_within_them_decides_and_time_breaks_ties():
    goal = Goal({"e2e": 1.0})
    fast, slow, bad = [record(0.2)], [record(0.9)], [record(2.0)]
    assert goal.value(fast) == goal.value(slow) == 1.0
    assert goal.score(fast) > goal.score(slow) > goal.score(bad)
    assert goal.shown(0.5) == "50.0 %"
    assert goal.shown_gain(0.125) == "+12.5 points"


def test_without_targets_the_time_per_token_decides():
    goal = Goal({})
    assert goal.value([record(1.0)]) == pytest.approx(-math.log(0.1))
    assert goal.shown(goal.value([record(1.0)])) == "100.00 ms"
    assert goal.shown_gain(math.log(2)) == "+50.0 %"
    assert goal.shown_gain(math.inf) == "unknown"


def test_failed_requests_count_as_the_slowest():
    assert time_per_token([record(1.0), record(3.0), record(0.1, error="rejected")]) == pytest.approx(0.35)
    assert time_per_token([record(0.1, error="rejected")]) == math.inf
