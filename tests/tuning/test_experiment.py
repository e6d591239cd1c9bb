"""Simulated experiments: load that drifts, noise, and an effect that is known."""

import json
import math
import random
import statistics

import pytest

from headrace.tuning.experiment import (
    LoadCorrection,
    Measured,
    Status,
    Switchback,
    log_change,
    restored,
    treatment_first,
)
from headrace.tuning.spec import Spec


class World:
    """A meter over a simulated server: autocorrelated load, noise, and effects of the treatment as logarithms.

    In a ``closed`` loop the clients send the next request when the last one has ended.
    """

    def __init__(self, seed, effect=0.0, slower=0.0, closed=False):
        self.rng = random.Random(seed)
        self.effect, self.slower, self.closed = effect, slower, closed
        self.load = 0.0
        self.opened = 0

    def measures(self, experiment):
        self.experiment = experiment
        experiment.meter.open, experiment.meter.close = self.open, self.close
        return experiment

    def open(self, now):
        self.opened += 1

    def close(self, now):
        self.load = 0.8 * self.load + 0.6 * self.rng.gauss(0, 0.15)
        on = self.experiment.arm == "treatment"
        if self.closed:
            return self.closed_loop(self.load + on * self.effect)
        values = {
            "output_tokens_per_second": 1000
            * math.exp(self.load + on * self.effect + self.rng.gauss(0, 0.05)),
            "ttft_p99_seconds": 0.1 * math.exp(self.load + on * self.slower + self.rng.gauss(0, 0.1)),
            "open_seconds_per_token": math.exp(0.5 * self.load - on * self.effect + self.rng.gauss(0, 0.05)),
        }
        return values, 1000 * math.exp(self.load + self.rng.gauss(0, 0.02))

    def closed_loop(self, speed):
        """Throughput and load follow the speed of the server, and the number of open requests is constant."""
        speed += self.rng.gauss(0, 0.05)
        values = {
            "output_tokens_per_second": 1000 * math.exp(speed + self.rng.gauss(0, 0.01)),
            "open_seconds_per_token": math.exp(-speed + self.rng.gauss(0, 0.01)),
        }
        return values, 1000 * math.exp(speed + self.rng.gauss(0, 0.01))


def spec(seed=0, pairs=120, **more):
    given = {"window_seconds": 1.0, "burn_in_seconds": 0.5, "max_seconds": pairs * 3.0 + 0.5, "seed": seed}
    return Spec("x", 1, 2, "output_tokens_per_second", **(given | more))


def run(seed, effect=0.0, slower=0.0, closed=False, **more):
    world = World(seed, effect, slower, closed)
    experiment = world.measures(Switchback("e", spec(seed, **more), 0.0))
    now = 0.0
    while experiment.status is Status.RUNNING:
        now = max(now, experiment.due)
        experiment.advance(now)
    return experiment


def test_without_a_difference_none_is_found():
    """100 A/A experiments, each looked at after every pair."""
    found = [run(seed).status for seed in range(100)]
    assert sum(each is not Status.UNDECIDED for each in found) / 100 <= 0.05


@pytest.mark.parametrize(("effect", "status"), [(0.05, Status.BETTER), (-0.05, Status.WORSE)])
def test_a_difference_of_5_percent_is_found(effect, status):
    runs = [run(seed, effect) for seed in range(100)]
    assert sum(each.status is status for each in runs) >= 95
    assert statistics.median(len(each.pairs) for each in runs) < 60
    assert all(each.value == each.spec.control for each in runs)


def test_a_planted_regression_is_rolled_back_within_two_pairs():
    runs = [run(seed, slower=math.log(1.5), guards={"ttft_p99_seconds": 0.2}) for seed in range(100)]
    assert all(each.status is Status.ROLLED_BACK for each in runs)
    assert statistics.median(len(each.pairs) for each in runs) <= 2
    assert "ttft_p99_seconds changed by +" in runs[0].why


def test_a_guard_beyond_the_noise_seldom_ends_an_experiment_without_a_difference():
    runs = [run(seed, guards={"ttft_p99_seconds": 0.4}, pairs=40) for seed in range(200)]
    assert sum(each.status is Status.ROLLED_BACK for each in runs) / 200 <= 0.05


def test_a_better_treatment_stays_only_if_that_was_asked_for():
    assert run(1, effect=0.3).value == 1
    assert run(1, effect=0.3, adopt=True).value == 2
    assert run(1, effect=-0.3, adopt=True).value == 1


def test_arms_alternate_within_each_pair_and_every_window_burns_in():
    world = World(3)
    experiment = world.measures(Switchback("e", spec(3, pairs=10), 100.0))
    seen, now = [], 100.0
    assert experiment.value == 1
    while experiment.status is Status.RUNNING:
        opened = world.opened
        experiment.advance(experiment.due)
        if world.opened > opened:
            assert experiment.due - now == pytest.approx(1.0 + 0.5) or experiment.due - now == pytest.approx(
                1.0
            )
            seen.append(experiment.arm)
        now = experiment.due
    pairs = list(zip(seen[::2], seen[1::2], strict=True))
    assert all(set(pair) == {"control", "treatment"} for pair in pairs)
    assert len(set(pairs)) == 2, "the coin gives both orders"
    assert [first == "treatment" for first, _ in pairs] == [treatment_first(3, i) for i in range(len(pairs))]


def test_nothing_happens_before_it_is_due():
    world = World(1)
    experiment = world.measures(Switchback("e", spec(), 0.0))
    experiment.advance(0.0)
    due = experiment.due
    experiment.advance(due - 0.01)
    assert (experiment.due, world.opened) == (due, 0)


def test_it_continues_after_a_restart_with_the_next_pair():
    whole = run(5, effect=0.0, pairs=30)
    world = World(5)
    experiment = world.measures(Switchback("e", spec(5, pairs=30), 0.0))
    while len(experiment.pairs) < 10:
        experiment.advance(experiment.due)
    stored = json.loads(json.dumps(experiment.to_json(experiment.due)))
    again = restored(stored, 5000.0)
    assert again.report() == experiment.report() | {"arm": again.arm}
    assert again.value == (2 if treatment_first(5, 10) else 1)
    world.measures(again)
    while again.status is Status.RUNNING:
        again.advance(again.due)
    assert (again.status, len(again.pairs)) == (whole.status, len(whole.pairs))
    ended = restored(json.loads(json.dumps(again.to_json(9999.0))), 0.0)
    assert (ended.status, ended.due) == (again.status, math.inf)


def test_stopping_restores_the_control_value():
    world = World(1)
    experiment = world.measures(Switchback("e", spec(), 0.0))
    while experiment.value == 1:
        experiment.advance(experiment.due)
    experiment.stop(Status.STOPPED, "enough", 3.0)
    assert (experiment.value, experiment.due) == (1, math.inf)
    experiment.stop(Status.BETTER, "too late", 4.0)
    assert experiment.status is Status.STOPPED


def test_load_is_corrected_for():
    rng = random.Random(6)
    plain, corrected, correction = [], [], LoadCorrection()
    for _ in range(200):
        load = rng.gauss(0, 0.3)
        difference = 0.02 + 0.9 * load + rng.gauss(0, 0.02)
        plain.append(difference)
        corrected.append(correction.correct(difference, load, 0.3 * load + rng.gauss(0, 0.1)))
    assert statistics.stdev(corrected[20:]) < 0.2 * statistics.stdev(plain)
    assert statistics.fmean(corrected[20:]) == pytest.approx(0.02, abs=0.01)


def test_a_load_that_follows_the_setting_is_not_corrected_for():
    """The clients wait for responses, so a slower server also has less load."""
    found = [run(seed, effect=-0.1, closed=True) for seed in range(40)]
    assert sum(each.status is Status.WORSE for each in found) >= 36
    assert statistics.fmean(each.effect.mean for each in found) == pytest.approx(-0.1, abs=0.03)
    none = [run(seed, closed=True) for seed in range(100)]
    assert sum(each.status is not Status.UNDECIDED for each in none) <= 5


@pytest.mark.parametrize("guard", ["ttft_p99_seconds", "output_tokens_per_second"])
def test_a_treatment_that_stops_the_server_is_rolled_back_after_two_pairs(guard):
    """A window without a token has no latencies."""
    world = World(5)
    experiment = world.measures(Switchback("e", spec(guards={guard: 0.5}), 0.0))

    def close(now):
        values, load = world.close(now)
        return ({"output_tokens_per_second": 0.0} if experiment.arm == "treatment" else values), load

    experiment.meter.close = close
    while experiment.status is Status.RUNNING:
        experiment.advance(experiment.due)
    assert (experiment.status, len(experiment.pairs)) == (Status.ROLLED_BACK, 2)
    assert "no token" in experiment.why


def test_a_share_of_zero_has_a_change_and_a_missing_metric_has_none():
    nothing, some = Measured(False, {"failed_share": 0.0}, 1.0), Measured(True, {"failed_share": 0.5}, 1.0)
    assert log_change("failed_share", nothing, some) == pytest.approx(math.log(501))
    assert log_change("itl_p99_seconds", nothing, some) is None
    assert log_change("itl_mean_seconds", Measured(False, {"itl_mean_seconds": 0.0}, 1.0), some) is None


def test_control_against_control_finds_nothing_while_the_treatment_is_found():
    experiment = run(3, effect=math.log(0.8))
    report = experiment.report()
    assert report["status"] == "worse"
    assert report["check"]["comparisons"] == len(experiment.pairs) // 2
    curve = experiment.curve()
    assert [point["pairs"] for point in curve] == list(range(1, len(experiment.pairs) + 1))
    assert curve[-1]["change"] == report["effect"]["change"]
    assert curve[-1]["check"]["change"] == report["check"]["change"]
    found = [run(seed, pairs=60, effect=0.05) for seed in range(40)]
    alarms = sum(each.check.e_value >= 20 for each in found)
    assert alarms <= 4


def test_a_long_curve_is_thinned():
    experiment = Switchback("e", spec(), 0.0)
    for number in range(1200):
        experiment.draw({"pairs": number})
    pairs = [point["pairs"] for point in experiment.curve()]
    assert pairs[-1] == 1199
    assert pairs == sorted(set(pairs))
    assert 250 <= len(pairs) <= 500
