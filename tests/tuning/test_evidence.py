import math
import random

import pytest

from headrace.tuning.evidence import PAIRS, Evidence


def looked_at(rng, effect, deviation=0.1, pairs=120):
    """The pair at which an experiment of normal differences, looked at after each, finds something."""
    evidence = Evidence(PAIRS)
    for pair in range(1, pairs + 1):
        evidence.add(rng.gauss(effect, deviation))
        if evidence.e_value >= 20:
            return pair
    return None


def test_the_deviation_is_that_of_a_sample():
    evidence = Evidence(PAIRS)
    for each in (1.0, 3.0):
        evidence.add(each)
    assert (evidence.mean, evidence.deviation) == (2.0, math.sqrt(2.0))


def test_looking_after_every_pair_does_not_cry_wolf():
    rng = random.Random(1)
    alarms = sum(looked_at(rng, 0.0) is not None for _ in range(2000))
    assert alarms / 2000 <= 0.05


def test_real_effects_are_found():
    rng = random.Random(2)
    found = [looked_at(rng, 0.05) for _ in range(200)]
    assert sum(each is not None for each in found) >= 190


def test_heavy_tails_do_not_cry_wolf():
    rng = random.Random(3)
    alarms = 0
    for _ in range(1000):
        evidence = Evidence(PAIRS)
        for _ in range(120):
            evidence.add(
                rng.gauss(0, 1) / math.sqrt(rng.gammavariate(2, 0.5))
            )  # Student's t, 4 degrees of freedom
            if evidence.e_value >= 20:
                alarms += 1
                break
    assert alarms / 1000 <= 0.05


def test_the_e_value_has_an_expectation_of_one_without_an_effect():
    rng = random.Random(4)
    total = 0.0
    for _ in range(20_000):
        evidence = Evidence(PAIRS)
        for _ in range(6):
            evidence.add(rng.gauss(0, 3.0))
        total += min(evidence.e_value, 1000.0)
    assert total / 20_000 == pytest.approx(1.0, abs=0.15)


def test_the_interval_leaves_zero_out_exactly_when_the_e_value_decides():
    rng = random.Random(5)
    for _ in range(300):
        evidence = Evidence(PAIRS)
        for _ in range(rng.randint(PAIRS.least, 40)):
            evidence.add(rng.gauss(rng.choice([0.0, 0.1]), 0.1))
        interval = evidence.interval(0.05)
        assert (not interval.low <= 0.0 <= interval.high) == (evidence.e_value >= 20)


def test_scale_does_not_matter():
    one, thousand = Evidence(PAIRS), Evidence(PAIRS)
    for value in (0.1, 0.3, 0.2, 0.25, 0.15):
        one.add(value)
        thousand.add(1000 * value)
    assert one.e_value == pytest.approx(thousand.e_value)


def test_too_few_pairs_say_nothing():
    evidence = Evidence(PAIRS)
    for _ in range(PAIRS.least - 1):
        evidence.add(5.0)
        assert evidence.e_value == 1.0
        assert evidence.interval(0.05) == (-math.inf, math.inf)
    evidence.add(5.0)
    assert evidence.e_value == math.inf
