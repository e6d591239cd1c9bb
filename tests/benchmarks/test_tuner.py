"""The tuner in virtual time, small: its loads, and that it does not harm good settings."""

import math

import pytest

from benchmarks.tuner import DELAY, Late, Load, Row, run
from headrace.config import SchedulerOptions
from headrace.core.events import Arrived
from headrace.core.knobs import Knobs
from headrace.tuning.settings import live_settings
from headrace.tuning.tuner import Mode


@pytest.mark.parametrize("name", ["steady", "step", "ramp", "diurnal", "oscillating", "bursty"])
def test_a_load_has_its_rate_and_is_the_same_each_time(name):
    calls = Load(name).calls(2400.0)
    assert calls == Load(name).calls(2400.0)
    assert len(calls) / 2400.0 == pytest.approx(3.0, rel=0.12)
    halves = [sum(low <= each.arrival < low + 1200 for each in calls) for low in (0.0, 1200.0)]
    assert (halves[1] > 1.3 * halves[0]) == (name in ("step", "ramp"))
    assert (halves[0] > 1.5 * halves[1]) == (name == "diurnal")


def test_a_wrong_setting_is_changed_within_minutes_and_a_right_one_is_not_made_worse():
    load = Load("steady")
    calls = load.calls(300.0)
    wrong, right = (SchedulerOptions(max_num_seqs=256, mixed_prefill_ratio=each) for each in (4.0, 0.1))
    before, after = (run(load, calls, wrong, mode) for mode in (Mode.OFF, Mode.ON))
    assert after.changes == [("mixed_prefill_ratio", False)] * len(after.changes)
    assert after.latency(200.0, 300.0) < 0.8 * before.latency(200.0, 300.0)
    before, after = (run(load, calls[:600], right, mode) for mode in (Mode.OFF, Mode.ON))
    assert after.latency(0.0, 200.0) < before.latency(0.0, 200.0) / 0.97


def test_noise_changes_the_steps_and_not_the_requests():
    plans, calls = SchedulerOptions(max_num_seqs=256), Load("steady").calls(30.0)
    plain, noisy = (run(Load(each), calls, plans, Mode.OFF) for each in ("steady", "noisy"))
    assert [each[::2] for each in sorted(plain.requests)] == [each[::2] for each in sorted(noisy.requests)]
    assert plain.requests != noisy.requests


def test_late_steering_sees_events_half_a_minute_later():
    knobs = Knobs(mixed_prefill_ratio=0.7)
    late = Late(live_settings(64), lambda: knobs, lambda: "e", Mode.ON)
    seen = []
    late.tuner.history.fold = lambda event, now: seen.append((event.request_id, now))
    for second in range(100):
        late.saw([Arrived(f"a{second}", 9, "t", 0, float(second))], float(second))
    assert len(seen) == 100 - int(DELAY)
    assert seen[0] == ("a0", DELAY)


def test_the_share_of_the_oracle_counts_time_that_is_saved():
    row = Row("x", 0.2, 0.125, 0.1, 1.0, 1.0, 1, 0, 0.0, [])
    assert row.share == pytest.approx(0.75)
    assert math.isnan(row._replace(oracle=0.199).share)
