import pytest

from headrace.core.prediction.step_curve import StepCurve
from headrace.core.prediction.step_times import StepTimes


def learned(*steps):
    curve = StepCurve()
    for tokens, seconds in steps:
        curve.observe(tokens, seconds)
    return curve


def test_measured_sizes_are_returned_as_measured():
    curve = learned((32, 0.02), (32, 0.03), (512, 0.1))
    assert curve.seconds(32) == pytest.approx(0.0245, rel=0.01)
    assert curve.seconds(512) == pytest.approx(0.1)


def test_between_two_sizes_a_step_reads_weights_or_computes_whichever_is_longer():
    curve = learned((32, 0.02), (512, 0.1))
    assert curve.seconds(64) == pytest.approx(0.02), "0.1 * 64 / 512 is less"
    assert curve.seconds(256) == pytest.approx(0.05)
    assert curve.seconds(1024) == pytest.approx(0.2), "more arithmetic"
    assert curve.seconds(1) == pytest.approx(0.02), "the weights are read all the same"


def test_beyond_the_largest_size_a_token_costs_its_share_or_the_slope_if_that_is_less():
    curve = learned((8, 0.019), (16, 0.02))
    assert curve.seconds(32) == pytest.approx(0.04)
    assert curve.seconds(32, slope=1e-4) == pytest.approx(0.0216)
    assert curve.seconds(32, slope=1.0) == pytest.approx(0.04)
    assert curve.seconds(16, slope=1e-4) == pytest.approx(0.02)


def test_a_curve_never_falls_between_two_sizes_that_do():
    curve = learned((32, 0.05), (512, 0.04))
    assert curve.seconds(300) <= 0.05


def test_a_step_that_was_interrupted_counts_little_and_a_new_pace_is_learned():
    curve = learned(*[(32, 0.02)] * 40, (32, 10.0))
    assert curve.seconds(32) < 0.022
    slow_start = learned((32, 5.0), *[(32, 0.02)] * 60)
    assert slow_start.seconds(32) < 0.03
    for _ in range(2500):
        curve.observe(32, 0.04)
    assert curve.seconds(32) == pytest.approx(0.04, rel=0.01)


def test_a_busy_machine_in_the_last_steps_is_not_taken_for_the_pace():
    curve = learned(*[(32, 0.001)] * 3000, *[(32, 0.01)] * 60)
    assert curve.seconds(32) < 1.5 * 0.001


def test_step_times_keep_a_curve_of_steps_without_drafts():
    times = StepTimes()
    assert not times.curve.known
    for _ in range(20):
        times.observe(4, 12, 400, 0.5, drafted=True)
    times.observe(4, 4, 400, 0.04)  # directly after drafts: it is not counted
    times.observe(4, 4, 400, 0.02)
    assert times.curve.seconds(4) == pytest.approx(0.02)


def test_a_copy_predicts_the_same_and_learns_for_itself():
    times = StepTimes()
    for tokens in (4, 8, 64, 256) * 20:
        times.observe(4, tokens, 100 * tokens, 0.01 + 1e-4 * tokens)
    copy = times.copy()
    before = times.predict(4, 32, 3200), times.curve.seconds(32)
    assert (copy.predict(4, 32, 3200), copy.curve.seconds(32)) == before
    for _ in range(200):
        copy.observe(4, 32, 3200, 1.0)
    assert (times.predict(4, 32, 3200), times.curve.seconds(32)) == before
    assert copy.ready
    assert copy.predict(4, 32, 3200) > 2 * before[0]
