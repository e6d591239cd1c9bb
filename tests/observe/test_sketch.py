from __future__ import annotations

import math
import random

import pytest

from headrace.lab.bench.stats import percentile
from headrace.lab.simulate.tally import spread_of
from headrace.observe.sketch import ACCURACY, Sketch


def test_percentiles_are_right_to_within_the_promised_share():
    rng = random.Random(1)
    values = [rng.lognormvariate(-3, 2) for _ in range(20_001)]
    sketch = Sketch()
    for value in values:
        sketch.add(value)
    for percent in (1.0, 50.0, 95.0, 99.0, 99.9):
        exact = sorted(values)[max(0, math.ceil(percent / 100 * len(values)) - 1)]
        assert sketch.percentile(percent) == pytest.approx(exact, rel=1.01 * ACCURACY)
    reported = spread_of(sketch)
    assert (reported.count, reported.most) == (20_001, max(values))
    assert reported.mean == pytest.approx(sum(values) / len(values))
    assert reported.p50 == pytest.approx(percentile(values, 50.0), rel=0.01)


def test_weights_and_zeros_count():
    sketch = Sketch()
    sketch.add(0.0, 6)
    sketch.add(2.0, 3)
    sketch.add(4.0)
    assert sketch.percentile(60.0) == 0.0
    assert sketch.percentile(61.0) == pytest.approx(2.0, rel=ACCURACY)
    assert sketch.percentile(100.0) == pytest.approx(4.0, rel=ACCURACY)
    assert spread_of(sketch).mean == pytest.approx(1.0)


def test_nothing_has_no_percentiles():
    assert math.isnan(Sketch().percentile(50.0))
    assert spread_of(Sketch()).count == 0
