import itertools
import math
import random

import pytest

from headrace.core.knobs import Knobs
from headrace.core.prediction.step_times import StepTimes
from headrace.tuning import scheduler_model
from headrace.tuning import tuner as module
from headrace.tuning.engine_tuning import EngineTuning
from headrace.tuning.evaluator import NotEvaluated, not_evaluated
from headrace.tuning.search import METRIC, Range, is_within, ranges
from headrace.tuning.settings import changed, live_settings, values
from headrace.tuning.traffic import Job, Outcome, Period, Watched
from headrace.tuning.tuner import Mode

SETTINGS = live_settings(64)
WINDOW = 10.0


def curve(best, sensitivity=0.15):
    """Latency by the mixed prefill ratio, least at ``best``."""
    return lambda ratio: 0.02 * math.exp(sensitivity * abs(math.log(ratio / best)))


class World:
    """A server whose latency is ``true`` of one setting, and evaluations that say ``rehearsed``; both may change."""

    def __init__(self, monkeypatch, true, rehearsed=None, mode=Mode.ON, noise=0.03, learns=True):
        self.true, self.rehearsed, self.noise = true, rehearsed or true, noise
        self.ttft = lambda ratio: 1.0
        self.itl = lambda ratio: 0.05
        self.rng, self.now = random.Random(1), 0.0
        self.knobs = Knobs(mixed_prefill_ratio=0.7)
        self.values, self.evaluations = [], 0
        self.load = 1000.0
        self.later = None  # what evaluations of a higher load say, if not the same
        self.measured = StepTimes().curve if learns else None
        self.reads, self.broken = 0, ""
        numbers = itertools.count()
        self.tuning = EngineTuning(
            SETTINGS,
            lambda: self.knobs,
            lambda: f"e{next(numbers)}",
            mode,
            WINDOW,
            read_curve=self.read_curve,
            evaluate=scheduler_model.evaluate,
        )
        monkeypatch.setattr(scheduler_model, "SchedulerModel", self.evaluation)
        monkeypatch.setattr(module.History, "close", lambda history, now: self.measure(now))

    def read_curve(self):
        self.reads += 1
        yield
        if self.broken:
            raise NotEvaluated(self.broken)
        return self.measured

    @property
    def tuner(self):
        return self.tuning.tuner

    @property
    def ratio(self):
        return self.knobs.mixed_prefill_ratio

    def evaluation(self, period, knobs, times, slots, *, static, overlap):
        world, ratio = self, knobs.mixed_prefill_ratio
        rise = period.load / self.load

        class Evaluated:
            def run(self, most_steps):
                world.evaluations += 1
                rehearsed = (rise > 1.1 and world.later) or world.rehearsed
                seconds = rehearsed(ratio)
                return Outcome(seconds, world.ttft(ratio), 0.05, 100, 1000 * seconds, world.ttft(ratio), 0.05)

        return Evaluated()

    def measure(self, now):
        seconds = self.true(self.ratio) * math.exp(self.rng.gauss(0, self.noise))
        measured = {METRIC: seconds, "itl_p99_seconds": self.itl(self.ratio)}
        measured["ttft_p99_seconds"] = 1.0
        jobs = [Job(now - 1, int(30 * self.load) - 1, 0, 1)]
        return Watched(Period(now - 30, now, jobs), measured, [])

    def live(self, seconds):
        until = self.now + seconds
        while self.now < until:
            while (change := self.tuning.tick(self.now)) is not None:
                self.knobs = changed(SETTINGS, self.knobs, change.setting, change.value)
            self.values.append(self.ratio)
            self.now = max(self.now + 0.5, min(self.tuning.due(), until))
        return self

    def told(self, words):
        return [note for note in self.tuner.notes if words in note.what]


@pytest.fixture
def world(monkeypatch):
    return lambda *args, **more: World(monkeypatch, *args, **more)


@pytest.mark.parametrize("best", [0.1, 4.0])
def test_it_finds_a_setting_that_is_far_off_in_small_steps_and_within_its_bounds(world, best):
    found = world(curve(best)).live(1800)
    assert found.true(found.ratio) < 1.1 * found.true(best)
    assert all(max(a, b) / min(a, b) < 4.2 for a, b in itertools.pairwise(found.values))
    assert 0.7 / 16.001 <= min(found.values) <= max(found.values) <= 0.7 * 16.001
    assert found.told("kept")
    last = found.tuner.notes[-1].at
    found.live(12 * 3600)
    assert found.tuner.notes[-1].at == last, "steady traffic has no oscillation"


def test_it_leaves_a_good_setting_alone(world):
    good = world(curve(0.7), noise=0.1).live(12 * 3600)
    assert set(good.values) == {0.7}
    assert good.tuner.notes == []


def test_a_gain_that_only_the_rehearsal_sees_is_undone_and_rests_longer_and_longer(world):
    wrong = world(curve(0.7), curve(8.0)).live(12 * 3600)
    undone = wrong.told("undone")
    assert 3 <= len(undone) <= 10
    gaps = [b.at - a.at for a, b in itertools.pairwise(undone)]
    assert all(later > 1.5 * earlier for earlier, later in itertools.pairwise(gaps))
    assert max(wrong.values) < 4.2 * 0.7
    assert wrong.values.count(0.7) > 0.9 * len(wrong.values)


def test_a_change_that_breaks_a_guard_is_undone(world):
    jumpy = world(curve(8.0))
    jumpy.itl = lambda ratio: 0.05 if ratio == 0.7 else 0.08
    jumpy.live(300)
    assert "undone, itl_p99_seconds +60.0%" in jumpy.tuner.notes[-1].what
    assert jumpy.ratio == 0.7


def test_a_change_whose_rehearsal_comes_close_to_the_guard_of_the_first_token_is_not_made(world):
    late = world(curve(8.0))
    late.ttft = lambda ratio: 1.0 if ratio == 0.7 else 1.6
    late.live(1800)
    assert set(late.values) == {0.7}
    late.ttft = lambda ratio: 1.0 if ratio == 0.7 else 1.4
    late.live(1800)
    assert late.ratio > 0.7


def test_an_inter_token_latency_that_nobody_notices_breaks_no_guard():
    """Longer steps end a queue of seconds, and a token comes after 8 ms in place of 5 ms."""
    short = Outcome(0.3, 19.0, 0.005, 100, 5500.0, 19.0, 0.005)
    longer, long = (short._replace(open_seconds=3200.0, itl_p99=itl) for itl in (0.008, 0.02))
    assert is_within(longer, short, short)
    assert not is_within(long, short, short)


def test_values_that_suit_a_lower_load_return_to_the_start_at_once(world):
    low = world(curve(0.1)).live(1800)
    assert low.ratio < 0.3
    low.true = low.rehearsed = curve(0.7, 1.5)
    low.live(3 * WINDOW + 1)
    assert low.ratio == 0.7
    assert "mixed_prefill_ratio 0.106812 -> 0.7" in low.tuner.notes[-1].what


def test_settings_that_are_measured_worse_than_the_start_for_several_periods_are_left(world):
    drifts = world(curve(0.1), noise=0.0).live(1800)
    assert drifts.ratio < 0.3
    drifts.true = lambda ratio: 0.03 if ratio < 0.7 else 0.02
    drifts.live(600)
    assert drifts.told("measured worse than the values at the start")
    assert 0.7 in drifts.values[-20:]


def test_settings_that_are_far_better_than_rehearsed_are_not_left(world):
    fast = world(curve(0.1), noise=0.0).live(1800)
    best = fast.ratio
    fast.true = lambda ratio: 0.3 * curve(0.1)(ratio)
    left = len(fast.values)
    fast.live(600)
    assert fast.told("0.30 times as rehearsed")
    assert set(fast.values[left:]) == {best}


def test_settings_that_are_far_worse_than_rehearsed_are_left(world):
    slow = world(curve(0.1), noise=0.0).live(1800)
    assert slow.ratio < 0.3
    slow.true = lambda ratio: 3 * curve(0.1)(ratio)
    slow.live(600)
    assert slow.told("3.00 times as rehearsed")
    assert slow.told("rehearsals are far off")
    assert slow.ratio == 0.7


def test_two_steps_are_taken_where_one_alone_brings_nothing(world):
    """Another bound may hide the first steps of a setting: they change nothing at all."""
    flat = world(lambda ratio: 0.02 if ratio < 0.2 else 0.03)
    flat.live(1800)
    assert min(flat.values) < 0.2


def test_a_change_away_from_the_start_may_not_lose_at_a_later_load(world):
    edge = world(curve(8.0))
    edge.later = curve(0.7, 0.05)
    assert set(edge.live(1800).values) == {0.7}
    edge.later = curve(8.0, 0.05)
    assert edge.live(1800).ratio > 0.7


def test_a_change_away_from_the_start_must_gain_at_the_present_load(world):
    safe = world(curve(0.7))
    safe.later = curve(8.0, 0.6)
    assert set(safe.live(1800).values) == {0.7}


def test_values_that_lose_more_at_a_later_load_than_they_gain_now_are_left(world):
    edge = world(curve(0.1)).live(1800)
    assert edge.ratio < 0.3
    edge.later = curve(0.7, 1.5)
    edge.live(3 * WINDOW + 1)
    assert edge.ratio == 0.7
    assert "faster at the start's values" in edge.tuner.notes[-1].what


def test_a_part_of_the_way_back_is_taken_if_it_is_better_than_the_start(world):
    edge = world(curve(0.1)).live(1800)
    assert edge.ratio < 0.2
    edge.later = curve(0.3, 0.9)
    edge.live(3 * WINDOW + 1)
    assert 0.2 < edge.ratio < 0.5
    assert edge.tuner.report()["probation"] is None


def test_rehearsals_that_do_not_describe_the_engine_change_nothing(world):
    other = world(lambda ratio: 0.09, curve(8.0)).live(3600)
    assert set(other.values) == {0.7}
    assert "times as rehearsed" in other.tuner.notes[0].what
    silent = world(curve(8.0), learns=False).live(3600)
    assert silent.evaluations == 0
    assert silent.reads > 100, "it may measure steps later"
    silent.measured = StepTimes().curve
    assert silent.live(600).told("kept")


def test_an_engine_that_does_not_answer_is_noted_and_asked_again_for_the_next_period(world):
    lost = world(curve(8.0))
    lost.broken = "the engine failed"
    lost.live(300)
    assert set(lost.values) == {0.7}
    assert {note.what for note in lost.tuner.notes} == {"no change: the engine failed"}
    lost.broken = ""
    assert lost.live(600).told("kept")


def test_a_period_without_a_measurement_leaves_a_change_on_probation_which_the_next_one_judges(
    world, monkeypatch
):
    """As if the engine was lost in it."""
    wrong = world(curve(0.7), curve(8.0))
    while not wrong.told("rehearsed"):
        wrong.live(1)
    changed_to = wrong.ratio
    with monkeypatch.context() as lost:
        lost.setattr(module.History, "close", lambda history, now: None)
        wrong.live(10 * WINDOW)
    assert wrong.ratio == changed_to != 0.7
    assert not wrong.told("undone")
    wrong.live(7 * WINDOW)
    assert wrong.told("undone")


def test_advice_changes_nothing(world):
    advised = world(curve(8.0), mode=Mode.ADVISE).live(3600)
    assert set(advised.values) == {0.7}
    assert (
        "mixed_prefill_ratio 0.7 -> 2.8672: rehearsed +23.6% faster; not made" in advised.tuner.notes[0].what
    )
    assert len(advised.tuner.notes) == 1, "the same advice is given once"


def test_off_does_nothing_and_turning_off_undoes_what_is_not_confirmed(world):
    off = world(curve(8.0), mode=Mode.OFF)
    assert off.tuning.due() == math.inf
    assert set(off.live(3600).values) == {0.7}
    off.tuner.set_mode(Mode.ON, off.now)
    while off.ratio == 0.7:
        off.live(1.0)
    off.tuner.set_mode(Mode.OFF, off.now)
    off.live(10.0)
    assert off.ratio == 0.7
    assert "undone, the mode was changed" in off.tuner.notes[-1].what


def test_an_experiment_freezes_the_tuner(world):
    busy = world(curve(8.0)).live(30)
    body = {"setting": "max_step_seconds", "treatment": 0.2, "metric": METRIC, "max_seconds": 1e6}
    asked = busy.tuning.experiments.start(body, busy.now)
    busy.live(3600)
    assert set(busy.values) == {0.7}
    busy.tuning.experiments.stop(asked.id, busy.now)
    busy.live(600)
    assert busy.ratio > 0.7


def test_a_tick_rehearses_once_at_most(world):
    slow = world(curve(8.0))
    for _ in range(400):
        before = slow.evaluations
        slow.tuning.tick(slow.now)
        assert slow.evaluations <= before + 1
        slow.now = max(slow.now + 0.01, min(slow.tuning.due(), 1e6))
    assert slow.evaluations > 50


def test_a_change_on_probation_is_judged_later_if_the_evaluator_fails(world, monkeypatch):
    lost = world(curve(8.0)).live(85)
    assert lost.tuner.report()["probation"]
    with monkeypatch.context() as failing:
        failing.setattr(lost.tuner._search, "_run", not_evaluated)
        lost.live(60)
    assert lost.told("no change: there is no evaluator")
    assert lost.tuner.report()["probation"] == "mixed_prefill_ratio 0.7 -> 2.8672"
    lost.live(60)
    assert lost.told("kept")


def test_the_report_has_settings_probation_and_log(world):
    told = world(curve(8.0)).live(85)
    report = told.tuner.report()
    assert report["probation"] == "mixed_prefill_ratio 0.7 -> 2.8672"
    assert report["measured_to_rehearsed"] == pytest.approx(1.0, abs=0.2)
    assert report["settings"]["mixed_prefill_ratio"]["value"] == pytest.approx(2.8672)
    assert report["log"][-1]["what"].startswith("mixed_prefill_ratio 0.7 -> 2.8672: rehearsed")


def test_max_running_begins_at_all_slots_and_a_static_batch_has_a_timeout():
    start = values(SETTINGS, Knobs(mixed_prefill_ratio=0.7))
    found = ranges(SETTINGS, start)
    assert list(found) == ["mixed_prefill_ratio", "max_num_batched_tokens", "max_running"]
    assert found["max_running"].step(0, True) is None
    assert found["max_running"].step(0, False) == 42
    static = live_settings(64, static=True)
    knobs = Knobs(mixed_prefill_ratio=0.7, static_batch_seconds=0.1)
    assert ranges(static, values(static, knobs))["static_batch_timeout"].step(0.1, False) == 0.05


def test_a_step_stays_between_its_bounds():
    whole = Range(64, 4096, 2.0, True)
    steps = [whole.step(2048, True), whole.step(4096, True), whole.step(100, False), whole.step(64, False)]
    assert steps == [4096, None, 64, None]
    assert Range(1, 64, 1.5, True).step(1, True) == 2
