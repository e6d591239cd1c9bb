"""Simulated experiments by request and by tenant: sizes, load and tenants that differ, and an effect that is known."""

import json
import math
import random
import statistics

import pytest

from headrace.tuning.experiment import Split, Status, restored
from headrace.tuning.measures import Unit
from headrace.tuning.spec import Spec

METRIC = "e2e_mean_seconds"


def spec(seed=0, **more):
    given = {"unit": "request", "seed": seed, "max_seconds": 400.0}
    return Spec("draft_tokens", 4, 2, METRIC, **(given | more))


class World:
    """Ten units a second: a request's time follows its size, its tenant, a load that drifts, and noise."""

    def __init__(self, seed, effect=0.0, failing=0.0):
        self.rng = random.Random(seed)
        self.effect, self.failing = effect, failing
        self.load = 0.0
        self.tenants = [self.rng.gauss(0, 0.5) for _ in range(8)]
        self.number = 0

    def units(self, experiment):
        rng, arms = self.rng, experiment.assignment
        self.load = 0.95 * self.load + 0.3 * rng.gauss(0, 0.3)
        for _ in range(10):
            tenant = rng.randrange(8)
            size = rng.gauss(4, 1)
            treated = arms.treats(arms.unit(f"r{self.number}", f"t{tenant}", 0.0))
            value = size + self.tenants[tenant] + self.load + treated * self.effect + rng.gauss(0, 0.3)
            failed = float(rng.random() < 0.02 + treated * self.failing)
            values = {METRIC: value, "failed_share": failed}
            yield Unit(f"t{tenant}", treated, values, (size, self.load + rng.gauss(0, 0.1)))
            self.number += 1


def run(seed, effect=0.0, failing=0.0, **more):
    world = World(seed, effect, failing)
    experiment = Split("e", spec(seed, **more), 0.0)
    live(world, experiment)
    return experiment


def live(world, experiment, until=math.inf):
    while experiment.status is Status.RUNNING and experiment.due < until:
        for unit in world.units(experiment):
            experiment.add(unit)
        experiment.advance(experiment.due)


def test_without_a_difference_none_is_found():
    """30 A/A experiments, each looked at every ten units."""
    found = [run(seed, guards={"failed_share": 0.02}, max_seconds=200.0).status for seed in range(30)]
    assert sum(each is not Status.UNDECIDED for each in found) <= 1


@pytest.mark.parametrize(("effect", "status"), [(0.05, Status.WORSE), (-0.05, Status.BETTER)])
def test_a_difference_of_5_percent_is_found(effect, status):
    runs = [run(seed, effect, max_seconds=2000.0) for seed in range(10)]
    assert all(each.status is status for each in runs)
    assert statistics.median(sum(each.counts) for each in runs) < 8000


def test_a_small_share_is_treated_and_finds_no_difference_that_is_not_there():
    runs = [run(seed, share=0.1, max_seconds=200.0) for seed in range(12)]
    assert sum(each.status is not Status.UNDECIDED for each in runs) <= 1
    assert all(0.07 < each.counts[1] / sum(each.counts) < 0.13 for each in runs)
    found = run(1, 0.3, share=0.1, max_seconds=2000.0)
    assert found.status is Status.WORSE
    low, high = found.report()["effect"]["interval"]
    assert low < math.expm1(0.3) < high
    again = restored(json.loads(json.dumps(found.to_json(1.0))), 0.0)
    assert (again.spec.share, again.effect.mean) == (0.1, found.effect.mean)


def test_a_guard_rolls_back_as_soon_as_it_is_sure():
    runs = [run(seed, failing=0.2, guards={"failed_share": 0.05}) for seed in range(20)]
    assert all(each.status is Status.ROLLED_BACK for each in runs)
    assert statistics.median(sum(each.counts) for each in runs) <= 300
    assert "failed_share changed by +" in runs[0].why
    assert all(each.value == 4 for each in runs)


def test_the_report_has_effect_curve_units_and_what_can_be_found():
    experiment = run(1, 0.1)
    report = json.loads(json.dumps(experiment.report()))
    assert (report["design"], report["unit"], report["status"]) == ("split", "request", "worse")
    assert report["effect"]["interval"][0] > 0.0
    assert report["effect"]["interval"][0] < math.expm1(0.1) < report["effect"]["interval"][1]
    assert sum(report["units"].values()) == sum(experiment.counts)
    assert 0.0 < report["detectable"]["smallest_change"] < 0.2
    assert report["log"][-1]["what"].startswith("worse: e2e_mean_seconds changed by +")
    times = [point["seconds"] for point in experiment.curve()]
    assert times == sorted(times)
    assert len(times) > 2


def test_it_continues_after_a_restart_where_it_was():
    world, experiment = World(3), Split("e", spec(3), 0.0)
    live(world, experiment, until=100.0)
    stored = json.loads(json.dumps(experiment.to_json(100.0)))
    again = restored(stored, 7.0)
    assert again.counts == experiment.counts
    assert again.effect.mean == experiment.effect.mean
    assert again.assignment.unit("r", "t", 7.0) == experiment.assignment.unit("r", "t", 100.0)
    live(world, again)
    assert again.status is Status.UNDECIDED
    assert again.seconds(0.0) == pytest.approx(400.0, abs=1.0)
    ended = restored(json.loads(json.dumps(again.to_json(9999.0))), 0.0)
    assert (ended.status, ended.due) == (again.status, math.inf)


def test_a_better_treatment_stays_only_if_that_was_asked_for():
    assert run(1, -0.3).value == 4
    assert run(1, -0.3, adopt=True).value == 2
    assert run(1, 0.3, adopt=True).value == 4
