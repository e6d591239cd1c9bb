from __future__ import annotations

import math
import random

import pytest

from headrace.lab.bench.stats import percentile
from headrace.lab.simulate.sketch import ACCURACY, Sketch
from headrace.lab.simulate.timeline import BUCKETS, Timeline


def test_percentiles_are_right_to_within_the_promised_share():
    rng = random.Random(1)
    values = [rng.lognormvariate(-3, 2) for _ in range(20_001)]
    sketch = Sketch()
    for value in values:
        sketch.add(value)
    for percent in (1.0, 50.0, 95.0, 99.0, 99.9):
        exact = sorted(values)[max(0, math.ceil(percent / 100 * len(values)) - 1)]
        assert sketch.percentile(percent) == pytest.approx(exact, rel=1.01 * ACCURACY)
    told = sketch.spread()
    assert (told.count, told.most) == (20_001, max(values))
    assert told.mean == pytest.approx(sum(values) / len(values))
    assert told.p50 == pytest.approx(percentile(values, 50.0), rel=0.01)


def test_weights_and_zeros_count():
    sketch = Sketch()
    sketch.add(0.0, 6)
    sketch.add(2.0, 3)
    sketch.add(4.0)
    assert sketch.percentile(60.0) == 0.0
    assert sketch.percentile(61.0) == pytest.approx(2.0, rel=ACCURACY)
    assert sketch.percentile(100.0) == pytest.approx(4.0, rel=ACCURACY)
    assert sketch.spread().mean == pytest.approx(1.0)


def test_nothing_has_no_percentiles():
    assert math.isnan(Sketch().percentile(50.0))
    assert Sketch().spread().count == 0


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
