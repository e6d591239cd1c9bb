from headrace.lab.bench.report import Run
from headrace.lab.bench.stats import summarize
from headrace.lab.sweep import Axis, Trial, coarse_first, plan, requests_of, sweep

RUN = Run("x", (), summarize([]))


def test_coarse_values_come_first_and_none_is_lost():
    assert coarse_first([1, 2, 4, 8, 16]) == [1, 16, 4, 2, 8]
    for count in range(1, 20):
        assert sorted(coarse_first(range(count))) == list(range(count))
    assert coarse_first([8, 1, 8]) == [1, 8]


def test_an_early_end_leaves_a_coarse_picture_of_every_axis():
    trials = plan({Axis.BATCH: [1, 2, 4], Axis.CHUNK: [64, 128]}, ["continuous", "static"])
    assert len(trials) == 10
    assert {(each.axis, each.value) for each in trials[:4]} == {(Axis.BATCH, 1), (Axis.CHUNK, 64)}


def test_requests_follow_what_runs_at_once():
    assert requests_of(Trial(Axis.BATCH, 1, "static"), 64) == 16
    assert requests_of(Trial(Axis.CONCURRENCY, 32, "static"), 64) == 128
    assert requests_of(Trial(Axis.CHUNK, 4096, "static"), 64) == 256


class Time:
    def __init__(self, seconds):
        self.now, self.seconds, self.order = 0.0, seconds, []

    def run(self, trial):
        self.now += self.seconds
        self.order.append(trial.value)
        return RUN


TRIALS = [Trial(Axis.BATCH, value, "continuous") for value in (1, 2, 4)]


def test_rounds_alternate_in_order():
    time = Time(1.0)
    done = sweep(TRIALS, time.run, 2, 100.0, lambda: time.now)
    assert time.order == [1, 2, 4, 4, 2, 1]
    assert [len(runs) for runs in done.values()] == [2, 2, 2]


def test_no_trial_begins_when_the_budget_is_spent():
    time = Time(1.0)
    assert list(sweep(TRIALS, time.run, 9, 1.5, lambda: time.now)) == TRIALS[:2]
    time = Time(5.0)
    assert list(sweep(TRIALS, time.run, 9, 0.1, lambda: time.now)) == TRIALS[:1], "one trial always runs"
