"""The tuner in virtual time, small: it leaves wrong settings, and does not harm good ones."""

import math

import pytest

from benchmarks.tuner import Load, Row, run
from headrace.config import SchedulerOptions
from headrace.observe.tuner.tuner import Mode


@pytest.mark.parametrize("name", ["steady", "step", "ramp", "diurnal", "oscillating", "bursty"])
def test_a_load_has_its_rate_and_is_the_same_each_time(name):
    calls = Load(name).calls(1800.0)
    assert calls == Load(name).calls(1800.0)
    assert len(calls) / 1800.0 == pytest.approx(3.0, rel=0.12)
    halves = [sum(low <= each.arrival < low + 900 for each in calls) for low in (0.0, 900.0)]
    assert (halves[1] > 1.3 * halves[0]) == (name in ("step", "ramp"))
    assert (halves[0] > 1.5 * halves[1]) == (name == "diurnal")


def test_wrong_settings_are_left_by_evidence():
    wrong = SchedulerOptions(max_num_seqs=256, mixed_prefill_ratio=0.1)
    calls = Load("steady").calls(600.0)
    before, after = (run(Load("steady"), calls, wrong, mode) for mode in (Mode.OFF, Mode.ON))
    assert after.adopted[0] == ("mixed_prefill_ratio", True)
    assert after.latency(300.0, 600.0) < 0.9 * before.latency(300.0, 600.0)
    assert "better" in after.log[-1] or any("better" in line for line in after.log)


@pytest.mark.parametrize("name", ["noisy", "delayed"])
def test_noise_and_delay_change_what_the_tuner_sees(name):
    plans = SchedulerOptions(max_num_seqs=256)
    calls = Load("steady").calls(90.0)
    plain, other = (run(Load(each), calls, plans, Mode.ON) for each in ("steady", name))
    assert len(plain.requests) == len(other.requests) == len(calls)
    assert plain.requests != other.requests


def test_the_share_of_the_oracle_counts_time_that_is_saved():
    row = Row("x", 0.2, 0.125, 1.6, 2.0, 1.0, 1.0, 1, 0, [])
    assert row.share == pytest.approx(0.75)
    assert math.isnan(row._replace(oracle=1.01).share)
