from __future__ import annotations

import dataclasses
import json
import random

import pytest

from headrace.lab.calibration.values import BadCalibration, Calibrated, Calibration, Measured, features
from headrace.lab.simulate.runner import StepWork

TOKENS = (2e-4, 2e-5, 6e-5, 4e-5, 5e-5)
DEVICE = (2e-3, 3e-5, *TOKENS, 5e-9, 2e-8, 1e-4)
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
    *(*DEVICE[:2], TOKENS, *DEVICE[-3:], *HOST, 0.01, 0.02),
    model="m",
    machine="a machine",
    kind="cpu",
    dtype="bfloat16",
    kernels="cpp",
    kv_tokens=4096,
    max_model_len=2048,
    fixed_tokens=8.0,
    context_tokens=900.0,
    steps=600,
    front_request=0.004,
    front_step=1e-3,
    front_event=1e-5,
    front_busy=0.003,
)


def test_a_calibrated_device_takes_what_was_measured():
    device = Calibrated(CALIBRATION)
    for each in steps(20):
        assert device.seconds(each.work) == pytest.approx(each.seconds)
        front = 1e-3 + 1e-5 * each.work.samples if each.work.samples else 0.0
        assert device.host_seconds(each.work) == pytest.approx(each.host_seconds + front)
    assert device.host_seconds(StepWork(4, 40, 4, 4, 0)) == pytest.approx(HOST[0] + 4 * HOST[1])


def test_each_range_of_tokens_costs_its_own():
    device = Calibrated(CALIBRATION)
    seconds = [device.seconds(StepWork(1, tokens, 0, 0, 0)) for tokens in (8, 9, 32, 33, 600, 601)]
    assert seconds[1] - seconds[0] == pytest.approx(TOKENS[1])
    assert seconds[3] - seconds[2] == pytest.approx(TOKENS[2])
    assert seconds[5] - seconds[4] == pytest.approx(TOKENS[4])


def test_a_slower_machine_takes_longer_for_everything():
    device, slower = Calibrated(CALIBRATION), Calibrated(CALIBRATION.at(1.25))
    for each in steps(20):
        assert slower.seconds(each.work) == pytest.approx(1.25 * device.seconds(each.work))
        assert slower.host_seconds(each.work) == pytest.approx(1.25 * device.host_seconds(each.work))
    once, twice = (vars(each.front()) for each in (CALIBRATION, CALIBRATION.at(2.0)))
    assert twice == {name: 2 * seconds for name, seconds in once.items()}
    assert once["busy_seconds"] == 0.003


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
        ({"tokens": [1e-5, 1e-5]}, "tokens must be tuple"),
        ({"tokens": [1e-5, 1e-5, "no", 1e-5, 1e-5]}, "tokens must be tuple"),
        ({"speed": 1}, "is not a calibration"),
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
    with pytest.raises(BadCalibration, match="is not valid JSON"):
        Calibration.read_file(path)
