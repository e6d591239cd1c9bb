from __future__ import annotations

import random

import pytest

from headrace.lab.simulate.tally import BUCKETS, Timeline


def test_amounts_are_spread_over_the_time_that_they_cover():
    line = Timeline(("a",), width=1.0)
    line.add("a", 0.5, 2.5, 4.0)
    line.add("a", 7.0, 7.0, 3.0)
    line.add("b", 1.25, 1.5, 1.0)
    assert line.columns["a"][:3] == pytest.approx([1.0, 2.0, 1.0])
    assert line.columns["a"][7] == 3.0
    assert line.columns["b"][1] == pytest.approx(1.0)


def test_buckets_widen_and_lose_nothing():
    line = Timeline(width=1.0)
    rng = random.Random(2)
    total, now = 0.0, 0.0
    for _ in range(1000):
        end = now + rng.random() * 8
        line.add("a", now, end, 1.5)
        now, total = end, total + 1.5
    assert len(line.columns["a"]) == BUCKETS
    assert BUCKETS * line.width > now >= BUCKETS * line.width / 2
    assert sum(line.columns["a"]) == pytest.approx(total)
