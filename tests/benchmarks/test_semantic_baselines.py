from __future__ import annotations

import numpy as np
import pytest

from benchmarks.semantic import Outcome, pick, play_cosine
from headrace.response_cache.semantic.calibrate import PlayedStream, Question, Stream, embed_stream


def test_a_fixed_cosine():
    vectors = {
        "a": np.array([1.0, 0.0], np.float32).tobytes(),
        "b": np.array([0.8, 0.6], np.float32).tobytes(),
        "c": np.array([0.6, 0.8], np.float32).tobytes(),
    }
    stream = Stream("s", tuple(Question(text, answer) for text, answer in zip("abc", "xyy", strict=True)))
    played = PlayedStream(embed_stream(stream, lambda texts: [vectors[text] for text in texts]))
    assert play_cosine(played, 0.99) == Outcome(3, 0, 0)
    assert play_cosine(played, 0.9) == Outcome(3, 1, 0)  # c is served by b
    assert play_cosine(played, 0.7) == Outcome(3, 1, 1)  # b by a; c is far from a


def test_picking_by_errors():
    outcomes = [Outcome(100, 0, 0), Outcome(100, 20, 0), Outcome(100, 40, 1), Outcome(100, 60, 9)]
    assert pick(outcomes, 0.03) == outcomes[2]
    assert pick(outcomes, 0.0) == outcomes[1]
    assert pick(outcomes[:1] + outcomes[3:], 0.01) == Outcome(100, 0, 0)
    assert outcomes[2].hit_rate == pytest.approx(0.4)
    assert outcomes[2].wrong_per_hit == pytest.approx(0.025)
