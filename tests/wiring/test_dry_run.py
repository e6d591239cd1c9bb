"""A dry run finds what a setting does to a recorded load, on step times that a server has learned."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest

from headrace.config import CacheOptions, SchedulerOptions
from headrace.core.knobs import Knobs
from headrace.core.request import InvalidParameter
from headrace.lab.calibration import Calibration
from headrace.wiring.dry_run import Task, dry_run

EXPERIMENT = {
    "setting": "max_running",
    "treatment": 1,
    "metric": "e2e_mean_seconds",
    "window_seconds": 2.0,
    "burn_in_seconds": 0.5,
    "max_seconds": 600.0,
}
STEP, ROW, TOKEN = 2e-3, 2e-5, 2e-5


def task(**changes) -> Task:
    """Ten requests a second on a server of eight slots."""
    rng, now, recorded = random.Random(1), 0.0, []
    for number in range(200):
        now += rng.expovariate(10.0)
        recorded.append((now, rng.randint(20, 200), rng.randint(5, 60), 16 * (number % 2), "acme", "default"))
    calibration = Calibration(
        *(STEP, ROW, (TOKEN,) * 5),
        *(0.0,) * 7,
        model="fox",
        machine="this server",
        kind="cpu",
        dtype="",
        kernels="",
        kv_tokens=1 << 14,
        max_model_len=512,
        fixed_tokens=8.0,
        context_tokens=900.0,
        steps=0,
    )
    given = Task(
        EXPERIMENT | changes,
        dataclasses.asdict(SchedulerOptions(max_num_seqs=8)),
        dataclasses.asdict(CacheOptions()),
        dataclasses.asdict(Knobs(batched_tokens=256)),
        dataclasses.asdict(calibration),
        recorded,
    )
    return Task(**json.loads(json.dumps(given._asdict())))


def test_one_slot_of_eight_is_found_to_be_slower():
    report = dry_run(task())
    assert (report["setting"], report["control"], report["status"]) == ("max_running", 0, "worse")
    assert report["effect"]["interval"][0] > 0.0
    assert len(report["windows"]) == 2 * report["pairs"] == 2 * len(report["curve"])
    assert report["simulated"]["recorded_requests"] == 200
    assert report["simulated"]["requests"] > 10 * report["simulated"]["seconds"] / 2
    assert report == dry_run(task()), "the same load and the same seed"


def test_the_knobs_of_the_server_are_the_control():
    report = dry_run(task(setting="max_num_batched_tokens", treatment=128, max_seconds=12.0))
    assert report["control"] == 256
    assert report["status"] == "undecided", "two pairs are no evidence"
    json.dumps(report, allow_nan=False)


def test_a_wrong_field_is_named():
    with pytest.raises(InvalidParameter) as caught:
        dry_run(task(treatment=9))
    assert caught.value.param == "treatment"
