import math
import random

import numpy as np
import pytest

from headrace.tuning.evidence import Difference, Evidence, Prediction, units

UNITS = units(0.5)


def test_without_a_difference_the_interval_leaves_zero_out_in_few_runs_at_any_time():
    """500 runs of 5,000 skewed units, looked at after each unit."""
    rng = np.random.default_rng(1)
    alarms = 0
    counts = np.arange(1, 5001)
    later = counts >= UNITS.least
    widths = np.array([UNITS.half_width(count, 0.05) for count in range(1, 5001)])
    for _ in range(500):
        values = rng.exponential(1.0, 5000) * rng.choice((-2.0, 2.0), 5000)
        mean = np.cumsum(values) / counts
        deviation = np.sqrt(np.maximum(np.cumsum(values**2) / counts - mean**2, 0.0))
        alarms += bool(np.any(np.abs(mean)[later] > (deviation[later] * widths[later])))
    assert alarms / 500 <= 0.05


def test_the_interval_and_the_evidence_agree():
    rng, mean = random.Random(2), Evidence(UNITS)
    for count in range(1, 3000):
        mean.add(rng.gauss(0.05, 1.0))
        if count % 50 == 0 and count >= UNITS.least:
            low, high = mean.interval(0.05)
            assert (mean.e_value >= 20.0) == (low > 0.0 or high < 0.0)
            assert (low + high) / 2 == pytest.approx(mean.mean)


def test_few_units_never_decide():
    mean = Evidence(UNITS)
    for _ in range(UNITS.least - 1):
        mean.add(1.0)
        assert mean.e_value == 1.0
        assert mean.interval(0.05) == (-math.inf, math.inf)
    mean.add(1.0)
    assert mean.e_value == math.inf


def test_a_prediction_learns_what_the_covariates_explain():
    rng, prediction = random.Random(3), Prediction(2)
    errors = []
    for _ in range(500):
        covariates = (rng.gauss(3, 1), rng.gauss(0, 1))
        value = 1.0 + 0.5 * covariates[0] - covariates[1] + rng.gauss(0, 0.1)
        errors.append(value - prediction.predict(covariates))
        prediction.learn(covariates, value)
    assert np.std(errors[100:]) < 0.12
    again = Prediction.from_json(prediction.to_json())
    again._fit()
    prediction._fit()
    assert again.predict((1.0, 2.0)) == pytest.approx(prediction.predict((1.0, 2.0)))


def test_covariates_narrow_the_interval_and_do_not_shift_it():
    def effect(informed):
        rng, difference = random.Random(4), Difference(1)
        for _ in range(4000):
            size, treated = rng.gauss(5, 1), rng.random() < 0.5
            value = size + treated * 0.1 + rng.gauss(0, 0.2)
            difference.add(treated, value, (size if informed else 0.0,))
        return difference.mean

    informed, blind = effect(True), effect(False)
    assert informed.deviation < 0.3 * blind.deviation
    low, high = informed.interval(0.05)
    assert 0.0 < low < 0.1 < high


@pytest.mark.parametrize("share", [0.05, 0.2, 0.9])
def test_unequal_arms_estimate_the_effect_without_bias(share: float):
    rng, difference = random.Random(6), Difference(1, share)
    for _ in range(40_000):
        size, treated = rng.gauss(5, 1), rng.random() < share
        difference.add(treated, size + treated * 0.1 + rng.gauss(0, 0.2), (size,))
    assert difference.mean.mean == pytest.approx(0.1, abs=4 * difference.mean.deviation / math.sqrt(40_000))
    low, high = difference.mean.interval(0.05)
    assert 0.0 < low < 0.1 < high
    again = Difference.from_json(difference.to_json(), share)
    again.add(True, 5.0, (5.0,))
    difference.add(True, 5.0, (5.0,))
    assert again.mean.mean == pytest.approx(difference.mean.mean)


@pytest.mark.parametrize("share", [0.05, 0.1])
def test_a_small_arm_raises_few_false_alarms(share: float):
    """400 runs of skewed units without a difference, looked at after each unit."""
    rng, sequence, length = np.random.default_rng(7), units(share), 10_000
    counts = np.arange(1, length + 1)
    widths = np.array([sequence.half_width(count, 0.05) for count in counts.tolist()])
    alarms = 0
    for _ in range(400):
        weights = np.where(rng.random(length) < share, 1.0 / share, -1.0 / (1.0 - share))
        values = (rng.exponential(1.0, length) - 1.0) * weights
        mean = np.cumsum(values) / counts
        deviation = np.sqrt(np.maximum(np.cumsum(values**2) / counts - mean**2, 0.0))
        later = slice(sequence.least - 1, None)
        alarms += bool(np.any(np.abs(mean[later]) > deviation[later] * widths[later]))
    assert alarms / 400 <= 0.05


def test_a_difference_goes_on_where_it_was():
    rng, difference = random.Random(5), Difference(1)
    units = [(rng.random() < 0.5, rng.gauss(0, 1), (rng.gauss(0, 1),)) for _ in range(64)]
    for unit in units:
        difference.add(*unit)
    again = Difference.from_json(difference.to_json())
    for each in (difference, again):
        for unit in units:
            each.add(*unit)
    assert again.mean.mean == pytest.approx(difference.mean.mean)
    assert again.mean.deviation == pytest.approx(difference.mean.deviation)
