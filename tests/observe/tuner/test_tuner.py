import itertools
import math
import random

from headrace.core.events import Arrived, Emitted, Finished
from headrace.core.knobs import Knobs
from headrace.core.request import FinishReason
from headrace.observe.experiments.run import Status
from headrace.observe.steering.engine import Steering
from headrace.observe.steering.settings import changed, live_settings, values
from headrace.observe.tuner.steps import Range, ranges
from headrace.observe.tuner.tuner import HOPE_PAIRS, METRIC, Mode

SETTINGS = live_settings(64)


class World:
    """A server whose latency depends on one setting; windows have noise and a load that drifts."""

    def __init__(self, best, mode=Mode.ON, seed=0, sensitivity=0.15):
        self.best, self.sensitivity = best, sensitivity
        self.rng = random.Random(seed)
        self.knobs = Knobs(mixed_prefill_ratio=0.7)
        self.load = 0.0
        numbers = itertools.count()
        self.steering = Steering(SETTINGS, lambda: self.knobs, lambda: f"e{next(numbers)}", mode, 10.0, 2.0)
        self.values = []

    def latency(self, ratio):
        return 0.02 * math.exp(self.sensitivity * abs(math.log(ratio / self.best)))

    def measure(self, now):
        self.load = 0.8 * self.load + 0.6 * self.rng.gauss(0, 0.1)
        seconds = self.latency(self.knobs.mixed_prefill_ratio) * math.exp(self.load + self.rng.gauss(0, 0.03))
        return {METRIC: seconds, "output_tokens_per_second": 1000.0, "itl_p99_seconds": seconds}, 1000.0

    def live(self, seconds):
        now = 0.0
        while now < seconds:
            while (change := self.steering.tick(now)) is not None:
                self.knobs = changed(SETTINGS, self.knobs, change.setting, change.value)
            if (meter := self.steering.conductor.meter) is not None:
                meter.close = self.measure
            self.values.append(self.knobs.mixed_prefill_ratio)
            now = max(now + 0.5, min(self.steering.due(), seconds))
        return self

    @property
    def settled(self):
        """The value outside trials."""
        running = self.steering.conductor.running
        ours = running is not None and running.spec.setting == "mixed_prefill_ratio"
        return running.spec.control if ours else self.knobs.mixed_prefill_ratio


def test_it_finds_a_setting_that_is_far_off_and_stays_in_bounds():
    worlds = [World(best=4.0, seed=seed).live(8 * 3600) for seed in range(5)]
    for world in worlds:
        assert world.latency(world.settled) < 0.5 * (world.latency(0.7) - 0.02) + 0.02
        assert max(world.values) <= 0.7 * 16 * 1.0001


def test_it_leaves_a_good_setting_alone_and_rests_longer_and_longer():
    world = World(best=0.7, seed=3).live(12 * 3600)
    assert world.settled == 0.7
    trials = [note.at for note in world.steering.tuner.notes if note.what.startswith("mixed")]
    assert 4 <= len(trials) <= 24
    early, late = sum(at < 4 * 3600 for at in trials), sum(at > 8 * 3600 for at in trials)
    assert late < early


def test_advice_changes_nothing():
    world = World(best=8.0, mode=Mode.ADVISE, seed=1).live(4 * 3600)
    assert world.settled == 0.7
    assert any("better" in note.what for note in world.steering.tuner.notes)


def test_off_does_nothing_and_turning_off_restores():
    world = World(best=8.0, mode=Mode.OFF)
    assert world.steering.due() == math.inf
    world.live(3600)
    assert set(world.values) == {0.7}
    world.steering.tuner.set_mode(Mode.ON, 3600.0)
    world.live(30)
    assert world.steering.conductor.running is not None
    world.steering.tuner.set_mode(Mode.OFF, 4000.0)
    world.live(10)
    assert world.knobs.mixed_prefill_ratio == 0.7


def test_a_persons_experiment_stops_the_trial_and_is_not_disturbed():
    world = World(best=8.0, seed=2).live(60)
    trial = world.steering.conductor.running
    body = {"setting": "max_step_seconds", "treatment": 0.2, "metric": METRIC, "max_seconds": 1e6}
    asked = world.steering.conductor.start(body, 61.0)
    assert trial.status is Status.STOPPED
    world.steering.tick(61.0)
    world.steering.tuner.tick(62.0, world.steering.present())
    assert world.steering.conductor.running is asked


def test_another_load_wakes_what_rests_and_the_first_value_is_tried_again():
    world = World(best=4.0, seed=1).live(8 * 3600)
    tuner, now = world.steering.tuner, 8 * 3600.0
    assert world.settled > 0.7
    while world.steering.conductor.running is not None:
        now += 10.0
        while (change := world.steering.tick(now)) is not None:
            world.knobs = changed(SETTINGS, world.knobs, change.setting, change.value)
    for second in range(400):
        tuner.signals.fold(Arrived(f"a{second}", 100, "t", 0, now + second), now + second)
    now += 400.0
    tuner.tick(now, world.steering.present())
    for second in range(400):
        for i in range(3):
            tuner.signals.fold(Arrived(f"b{second}.{i}", 100, "t", 0, now + second), now + second)
    now += 400.0
    if (running := world.steering.conductor.running) is not None:
        world.steering.conductor.stop(running.id, now)
        world.steering.tick(now)
        now += 60.0
    tuner.tick(now, world.steering.present())
    assert any("the load has changed" in note.what for note in tuner.notes)
    trial = world.steering.conductor.running
    assert (trial.spec.setting, trial.spec.treatment) == ("mixed_prefill_ratio", 0.7)


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
    assert [
        whole.step(2048, True),
        whole.step(4096, True),
        whole.step(100, False),
        whole.step(64, False),
    ] == [
        4096,
        None,
        64,
        None,
    ]
    assert Range(1, 64, 1.5, True).step(1, True) == 2


def test_a_trial_without_a_gain_ends_after_few_pairs_and_one_with_a_small_gain_goes_on():
    far = World(best=0.25, seed=1).live(8 * 3600)
    trials = far.steering.conductor.all()
    hopeless = [each for each in trials if "no gain so far" in each.why]
    assert hopeless
    assert all(len(each.pairs) >= HOPE_PAIRS and each.evidence.mean >= 0.0 for each in hopeless)
    assert all(each.status is Status.UNDECIDED for each in hopeless)
    assert any(len(each.pairs) > HOPE_PAIRS for each in trials)


def overloaded(world, now):
    """Requests that wait for nine tenths of their latency, and what the tuner then does."""
    for number in range(50):
        world.steering.tuner.signals.fold(Arrived(f"w{number}", 100, "t", 0, now), now)
        world.steering.tuner.signals.fold(Emitted(f"w{number}", (1,)), now + 9.0)
        finished = Finished(f"w{number}", FinishReason.LENGTH, 100, 2, 0)
        world.steering.tuner.signals.fold(finished, now + 10.0)
        now += 10.0
    while (change := world.steering.tick(now)) is not None:
        world.knobs = changed(SETTINGS, world.knobs, change.setting, change.value)


def test_what_a_low_load_has_taught_is_undone_at_once_when_requests_mostly_wait():
    world = World(best=0.1, seed=1).live(8 * 3600)
    assert world.settled < 0.7
    overloaded(world, 8 * 3600.0)
    assert world.knobs.mixed_prefill_ratio == 0.7
    assert any("back to the value at the start" in note.what for note in world.steering.tuner.notes)


def test_advice_undoes_nothing():
    world = World(best=0.1, seed=1).live(8 * 3600)
    adopted = world.settled
    world.steering.tuner.set_mode(Mode.ADVISE, 8 * 3600.0)
    overloaded(world, 8 * 3600.0)
    assert world.settled == adopted
    assert not any("back to the value at the start" in note.what for note in world.steering.tuner.notes)
