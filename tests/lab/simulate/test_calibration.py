from __future__ import annotations

import dataclasses
import json
import math
import random

import pytest

from headrace.core.plan import Row, StepOutput, StepPlan
from headrace.lab.simulate.calibration import (
    BadCalibration,
    Calibrated,
    Calibration,
    Measured,
    fit,
)
from headrace.lab.simulate.recorder import StepRecorder
from headrace.lab.simulate.work import StepWork

DEVICE = (2e-3, 3e-5, 4e-5, 5e-9, 2e-8, 1e-4)
HOST = (1e-4, 2e-6)


def steps(count: int = 600, noise: float = 0.0, disturbed: float = 0.0) -> list[Measured]:
    """Steps that take what the coefficients say, some with noise, some far longer."""
    rng = random.Random(4)
    measured = []
    for _ in range(count):
        rows = rng.randint(1, 64)
        prompts = rng.choice((0, 0, rng.randint(1, 4)))
        tokens = rows + prompts * rng.randint(10, 500)
        read = rows * rng.randint(10, 4000)
        contexts = read + (tokens - rows) * rng.randint(10, 2000)
        work = StepWork(rows, tokens, contexts, read, rows - rng.randint(0, min(prompts, rows - 1)))
        seconds = sum(c * f for c, f in zip(DEVICE, (1, *work[:5]), strict=True))
        seconds *= 1.0 + rng.gauss(0.0, noise)
        if rng.random() < disturbed:
            seconds *= rng.uniform(3, 30)
        measured.append(Measured(work, seconds, HOST[0] + HOST[1] * rows))
    return measured


def test_known_coefficients_are_found_again():
    found = fit(steps())
    assert found[:6] == pytest.approx(DEVICE, rel=1e-3)
    assert found[6:8] == pytest.approx(HOST, rel=1e-3)
    assert found.error_p90 < 1e-6


def test_noise_and_disturbed_steps_hardly_matter():
    measured = steps(3000, noise=0.05, disturbed=0.1)
    found = fit(measured)
    for each in steps(200):
        predicted = sum(c * f for c, f in zip(found[:6], (1, *each.work[:5]), strict=True))
        assert predicted == pytest.approx(each.seconds, rel=0.05)


def test_no_coefficient_is_below_zero():
    rng = random.Random(1)
    measured = [
        Measured(StepWork(n, n, 100 * n, 100 * n, n), 0.1 - 0.0005 * n + 0.001 * rng.random(), math.nan)
        for n in range(1, 65)
    ]
    found = fit([*measured, Measured(StepWork(1, 1, 1, 1, 1), 0.1, 0.001)])
    assert min(found) >= 0.0


def test_a_few_steps_are_too_few():
    with pytest.raises(BadCalibration, match="29 steps were measured"):
        fit(steps(29))


CALIBRATION = Calibration(
    *("m", "a machine", "cpu", "bfloat16", "cpp", 4096, 2048, 8.0, 900.0, 600),
    *DEVICE,
    *HOST,
    error_p50=0.01,
    error_p90=0.02,
    front_request=0.004,
    front_event=1e-5,
)


def test_a_calibrated_device_takes_what_was_measured():
    device = Calibrated(CALIBRATION)
    for each in steps(20):
        assert device.seconds(each.work) == pytest.approx(each.seconds)
        assert device.host_seconds(each.work) == pytest.approx(each.host_seconds + 1e-5 * each.work.rows)
    apart = Calibrated(dataclasses.replace(CALIBRATION, front_event=0.0))
    assert apart.host_seconds(StepWork(4, 4, 4, 4, 4)) == pytest.approx(HOST[0] + 4 * HOST[1])


def test_a_calibration_is_a_file(tmp_path):
    path = tmp_path / "new" / "c.json"
    CALIBRATION.write(path)
    assert Calibration.read_file(path) == CALIBRATION
    assert CALIBRATION.front().request_seconds == 0.004


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": None}, "step must be float"),
        ({"row": -1.0}, "row must be float"),
        ({"kv_tokens": 1.5}, "kv_tokens must be int"),
        ({"speed": 1}, "no calibration"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path, change, message):
    path = tmp_path / "c.json"
    path.write_text(json.dumps(dataclasses.asdict(CALIBRATION) | change))
    with pytest.raises(BadCalibration, match=message):
        Calibration.read_file(path)


def test_a_file_that_lacks_a_field_or_is_no_json_is_refused(tmp_path):
    path = tmp_path / "c.json"
    path.write_text('{"model": "m"}')
    with pytest.raises(BadCalibration, match="missing"):
        Calibration.read_file(path)
    path.write_text("model: m")
    with pytest.raises(BadCalibration, match="no JSON"):
        Calibration.read_file(path)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Slow:
    """A runner whose launches take no time and whose collections end at set times."""

    def __init__(self, clock: Clock, ends: list[float]) -> None:
        self.clock, self.ends = clock, ends

    def launch(self, plan: StepPlan, now: float) -> None: ...

    def collect(self) -> StepOutput:
        self.clock.now = self.ends.pop(0)
        return StepOutput(0, ((),))


def plan(tokens: int) -> StepPlan:
    return StepPlan(0, (), (), (Row(0, 0, tokens, (), False),))


def test_steps_are_timed_one_after_the_other():
    clock = Clock()
    recorder = StepRecorder(Slow(clock, [1.0, 3.0, 9.0]), clock)
    for tokens, begin in ((5, 0.25), (6, 1.5), (7, 8.0)):
        if begin == 8.0:
            recorder.pause()
        clock.now = begin
        recorder.launch(plan(tokens), begin)
        recorder.collect()
    assert [(m.work.tokens, m.seconds) for m in recorder.measured] == [(5, 0.75), (6, 1.5), (7, 1.0)]
    hosts = [m.host_seconds for m in recorder.measured]
    assert math.isnan(hosts[0])
    assert hosts[1] == 0.5
    assert math.isnan(hosts[2])


def test_overlapping_steps_do_not_count_the_wait_for_the_one_before():
    clock = Clock()
    recorder = StepRecorder(Slow(clock, [2.0, 3.5]), clock)
    recorder.launch(plan(1), 0.0)
    clock.now = 0.5
    recorder.launch(plan(2), 0.5)
    recorder.collect()
    recorder.collect()
    assert [m.seconds for m in recorder.measured] == [2.0, 1.5]
