from __future__ import annotations

import dataclasses
import json
import random

import pytest

from headrace.lab.simulate.calibration import BadCalibration, Calibrated, Calibration, features
from headrace.lab.simulate.fit import Measured
from headrace.lab.simulate.work import StepWork

DEVICE = (2e-3, 3e-5, 2e-4, 4e-5, 1e-5, 5e-9, 2e-8, 1e-4)
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
        seconds = sum(c * f for c, f in zip(DEVICE, features(work), strict=True))
        seconds *= 1.0 + rng.gauss(0.0, noise)
        if rng.random() < disturbed:
            seconds *= rng.uniform(3, 30)
        measured.append(Measured(work, seconds, HOST[0] + HOST[1] * rows))
    return measured


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
