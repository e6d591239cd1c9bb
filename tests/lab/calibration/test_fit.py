from __future__ import annotations

import math
import random

import pytest

from headrace.lab.calibration import BadCalibration, Fit, Measured, features, fit
from headrace.lab.simulate.runner import StepWork
from tests.lab.calibration.test_values import DEVICE, HOST, steps


def device(found: Fit) -> tuple[float, ...]:
    return (found.step, found.row, *found.tokens, found.context, found.read, found.sample)


def test_known_coefficients_are_found_again():
    found = fit(steps())
    assert device(found) == pytest.approx(DEVICE, rel=1e-3)
    assert (found.host_step, found.host_row) == pytest.approx(HOST, rel=1e-3)
    assert found.error_p90 < 1e-6
    work = StepWork(rows=1, tokens=100, contexts=5050, read_tokens=100, samples=1)
    alone = sum(c * f for c, f in zip(DEVICE, features(work), strict=True)) + sum(HOST)
    assert found.prompt_seconds(100) == pytest.approx(alone, rel=1e-3)


def test_noise_and_disturbed_steps_hardly_matter():
    measured = steps(1000, noise=0.05, disturbed=0.1)
    found = fit(measured)
    for each in steps(200):
        predicted = sum(c * f for c, f in zip(device(found), features(each.work), strict=True))
        assert predicted == pytest.approx(each.seconds, rel=0.05)


def test_no_coefficient_is_below_zero():
    rng = random.Random(1)
    measured = [
        Measured(StepWork(n, n, 100 * n, 100 * n, n), 0.1 - 0.0005 * n + 0.001 * rng.random(), math.nan)
        for n in range(1, 65)
    ]
    found = fit([*measured, Measured(StepWork(1, 1, 1, 1, 1), 0.1, 0.001)])
    assert min(*device(found), found.host_step, found.host_row) >= 0.0


def test_a_few_steps_are_too_few():
    with pytest.raises(BadCalibration, match="29 steps were measured"):
        fit(steps(29))
