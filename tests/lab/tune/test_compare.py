import math
import random

from headrace.lab.bench.stats import Record
from headrace.lab.tune import Goal, compare, reasons, select, settings_text

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


def compared(gain, most=20, seed=0):
    engine = Engine(gain, seed)
    found = compare(engine.run, GOAL, PRESENT, CANDIDATE, WINDOWS, lambda pairs: pairs < most)
    return found, engine


def test_a_real_gain_is_found_early_whatever_the_windows_are():
    found, engine = compared(0.2)
    assert found.better
    assert found.evidence.count < 8, "it ends when the evidence decides"
    assert found.interval.low < found.evidence.mean < found.interval.high
    assert engine.order[:6] == [64, 16, 16, 64, 64, 16], "the order alternates"
    small = [compared(0.03, 40, seed)[0] for seed in range(50)]
    assert sum(each.better for each in small) >= 45


def test_noise_is_not_recommended_and_a_loss_is_not_either():
    """Looked at after every pair."""
    wrong = sum(compared(0.0, 40, seed)[0].better for seed in range(400))
    assert wrong <= 20, "5 % at most"
    assert not compared(-0.2)[0].better


def test_few_pairs_have_no_interval():
    found, _ = compared(0.5, most=3)
    assert not found.better
    assert found.interval.low == -math.inf


def test_select_takes_the_best_of_the_windows():
    engine = Engine(0.5)
    assert select(engine.run, GOAL, [PRESENT, CANDIDATE], WINDOWS, lambda: True) == CANDIDATE
    assert select(Engine(-0.5).run, GOAL, [PRESENT, CANDIDATE], WINDOWS, lambda: False) == PRESENT


def test_the_file_says_what_was_won_and_how_sure_that_is():
    found, _ = compared(0.2)
    (first, second) = reasons(GOAL, found)
    assert "time per output token" in first
    assert "95 % interval" in second
    text = settings_text(CANDIDATE, PRESENT, [first], {"model": "m"})
    assert text.startswith("# time per output token")
    assert "model: m\n" in text
    assert "max-num-seqs: 16" in text
    assert "# was 64" in text
    assert "within the noise" in reasons(GOAL, compared(0.0)[0])[-1]
    assert "present" in reasons(GOAL, None)[0]
