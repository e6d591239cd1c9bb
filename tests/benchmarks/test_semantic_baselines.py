from __future__ import annotations

import numpy as np
import pytest

from benchmarks.semantic.baselines import FixedCosine, Outcome, PerEntry, pick, play_rule
from headrace.response_cache.semantic.calibrate import PlayedStream, Question, Stream, embed_stream
from tests.response_cache.semantic.synthetic import Traffic


def test_a_fixed_cosine():
    vectors = {
        "a": np.array([1.0, 0.0], np.float32).tobytes(),
        "b": np.array([0.8, 0.6], np.float32).tobytes(),
        "c": np.array([0.6, 0.8], np.float32).tobytes(),
    }
    stream = Stream("s", tuple(Question(text, answer) for text, answer in zip("abc", "xyy", strict=True)))
    played = PlayedStream(embed_stream(stream, lambda texts: [vectors[text] for text in texts]))
    assert play_rule(played, FixedCosine(0.99)) == Outcome(3, 0, 0)
    assert play_rule(played, FixedCosine(0.9)) == Outcome(3, 1, 0)  # c is served by b
    assert play_rule(played, FixedCosine(0.7)) == Outcome(3, 1, 1)  # b by a; c is far from a


def test_the_rule_per_entry_needs_observations_and_learns_from_them():
    rule = PerEntry(0.05, seed=1)
    for _ in range(3):
        assert not rule.serve(0, 0.95)
        assert not rule.learn(0, 0.95, right=True)
    for _ in range(200):
        rule.learn(0, 0.95, right=True)
        rule.learn(0, 0.6, right=False)
    assert rule.learn(0, 0.6, right=False)
    served = sum(rule.serve(0, 0.97) for _ in range(200))
    assert served > 150
    assert sum(rule.serve(0, 0.6) for _ in range(200)) < 30


def test_the_rule_per_entry_keeps_its_own_promise():
    traffic = Traffic(1500, seed=3)
    outcome = play_rule(PlayedStream(embed_stream(traffic.stream, traffic.embed)), PerEntry(0.05, seed=3))
    assert outcome.served > 0
    assert outcome.wrong <= 0.05 * outcome.asked


def test_picking_by_errors():
    outcomes = [Outcome(100, 0, 0), Outcome(100, 20, 0), Outcome(100, 40, 1), Outcome(100, 60, 9)]
    assert pick(outcomes, 0.03) == 2
    assert pick(outcomes, 0.0) == 1
    assert pick(outcomes[:1] + outcomes[3:], 0.01) is None
    assert outcomes[2].hit_rate == pytest.approx(0.4)
    assert outcomes[2].wrong_per_hit == pytest.approx(0.025)
