"""Calibrations of drawn traffic: they keep their promise on what they have not seen, or are refused."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.core.cache.calibration import Unsupported
from headrace.lab.semantic.calibrate import calibrate
from headrace.lab.semantic.decisions import PAIR_EVIDENCE, PlayedStream, decide_pairs
from headrace.lab.semantic.plot import plot_calibration
from headrace.lab.semantic.rows import Question, Stream
from tests.lab.semantic.synthetic import Likeness, Traffic


@pytest.mark.parametrize("seed", range(2))
def test_a_streams_promise_holds_on_the_other_half(seed):
    traffic = Traffic(1400, seed)
    first, second = traffic.stream.halves()
    calibration = calibrate(first, traffic.embed, "drawn", seed)
    threshold = calibration.certificate(0.05, 0.95).tally.threshold
    decisions = PlayedStream(second, traffic.embed).play(lambda found: calibration.score(found) >= threshold)
    served = [each for each in decisions if each.served]
    assert len(served) > 0.2 * len(decisions), "the test must be able to fail"
    assert sum(not each.right for each in served) <= 0.05 * len(served)


@pytest.mark.parametrize("seed", range(4))
def test_the_promise_of_pairs_holds_on_the_other_half(seed):
    drawn = Likeness(6000, seed)
    first, second = drawn.pairs.halves()
    calibration = calibrate(first, drawn.embed, "drawn", seed)
    assert {name for name, _ in calibration.score.curves} <= set(PAIR_EVIDENCE)
    threshold = calibration.certificate(0.05, 0.95).tally.threshold
    served = [
        each.right
        for each in decide_pairs(second, drawn.embed)
        if each.evidence and calibration.score(each.evidence) >= threshold
    ]
    assert len(served) > 300
    assert served.count(False) <= 0.05 * len(served)


def test_too_few_rows_prove_nothing():
    traffic = Traffic(300, seed=1)
    calibration = calibrate(traffic.stream, traffic.embed, "drawn")
    with pytest.raises(Unsupported, match="299 served without an error are the least"):
        calibration.certificate(0.01, 0.95)


def test_rows_of_one_outcome_fit_nothing():
    traffic = Traffic(40, seed=1, intents=1)
    with pytest.raises(Unsupported, match="too few rows"):
        calibrate(traffic.stream, traffic.embed, "drawn")


def test_what_is_served_is_not_cached():
    same = np.array([1.0, 0.0], np.float32).tobytes()
    stream = Stream(
        "s", tuple(Question(text, "answer") for text in ("red shoes", "blue shoes", "green shoes"))
    )
    played = PlayedStream(stream, lambda texts: [same for _ in texts])
    evidence = [each.evidence for each in played.play(lambda _: True)]
    assert evidence[0] is None
    assert evidence[2] is not None
    assert evidence[2].agreement == 0.1  # one neighbour of ten: the second question was served, not kept
    kept = played.play(lambda _: False)[2].evidence
    assert kept is not None
    assert kept.agreement == 0.2


def test_questions_without_a_vector_are_left_out():
    vector = np.array([1.0, 0.0], np.float32).tobytes()
    stream = Stream(
        "s", (Question("red shoes", "a"), Question("far too long", "a"), Question("blue shoes", "a"))
    )
    played = PlayedStream(stream, lambda texts: [None if "long" in text else vector for text in texts])
    assert len(played) == 2
    assert list(played.earlier(1)) == [(0, 1.0)]


def test_a_plot(tmp_path):
    pytest.importorskip("matplotlib")
    traffic = Traffic(400, seed=2)
    calibration = calibrate(traffic.stream, traffic.embed, "drawn")
    found = [calibration.certificate(0.1, 0.95)]
    plot_calibration(calibration, found, 0.95, tmp_path / "new" / "curve.png", "drawn")
    assert (tmp_path / "new" / "curve.png").read_bytes().startswith(b"\x89PNG")
