import random

from headrace.lab.bench.record import Record
from headrace.lab.tune.goal import Goal
from headrace.lab.tune.judge import judge, select
from headrace.lab.tune.settings_file import reasons, settings_text

PRESENT, CANDIDATE = {"max_num_seqs": 64}, {"max_num_seqs": 16}
GOAL = Goal({})


class Engine:
    """An engine whose time per token has noise, shared by both sides of a window, and of its own."""

    def __init__(self, gain, seed=0):
        self.gain, self.rng, self.order = gain, random.Random(seed), []

    def run(self, settings, window):
        self.order.append(settings["max_num_seqs"])
        factor = 1.0 - self.gain if settings == CANDIDATE else 1.0
        e2e = window[0] * factor * (1 + 0.02 * self.rng.gauss(0, 1))
        return [Record("r", 0.0, e2e, (e2e,), 5, 10, 0, "length", "")]


WINDOWS = [[1.0], [3.0], [0.5], [2.0], [1.5]]


def verdict(gain, most=40, seed=0):
    engine = Engine(gain, seed)
    found = judge(engine.run, GOAL, PRESENT, CANDIDATE, WINDOWS, lambda pairs: pairs < most, stop_early=True)
    return found, engine


def test_a_real_gain_is_found_early_whatever_the_windows_are():
    found, engine = verdict(0.2)
    assert found.better
    assert found.pairs < 12
    assert engine.order[:4] == [64, 16, 16, 64], "the order alternates"


def test_noise_is_not_recommended():
    wrong = sum(verdict(0.0, seed=seed)[0].better for seed in range(40))
    assert wrong <= 2
    assert verdict(0.0)[0].pairs == 40


def test_a_loss_ends_early_too():
    found, _ = verdict(-0.2)
    assert found.decided
    assert not found.better


def test_select_takes_the_best_of_the_windows():
    engine = Engine(0.5)
    assert select(engine.run, GOAL, [PRESENT, CANDIDATE], WINDOWS, lambda: True) == CANDIDATE
    assert select(Engine(-0.5).run, GOAL, [PRESENT, CANDIDATE], WINDOWS, lambda: False) == PRESENT


def test_the_file_says_what_was_won_and_how_sure_that_is():
    found, _ = verdict(0.2)
    (first, second) = reasons(GOAL, found)
    assert "time per output token" in first
    assert "95 % interval" in second
    text = settings_text(CANDIDATE, PRESENT, [first], {"model": "m"})
    assert text.startswith("# time per output token")
    assert "model: m\n" in text
    assert "max-num-seqs: 16" in text
    assert "# was 64" in text
    assert "within the noise" in reasons(GOAL, verdict(0.0)[0])[-1]
    assert "present" in reasons(GOAL, None)[0]
