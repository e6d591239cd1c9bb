import random

import pytest

from headrace.core.prediction.step_residuals import StepResiduals
from headrace.core.prediction.step_times import StepTimes


def test_what_was_never_seen_is_hoped_to_be_cheap() -> None:
    assert StepResiduals().plain(4) == 1.0
    assert StepResiduals().longer(4) < 1.0


def test_a_stair_is_learned_from_a_few_steps() -> None:
    residuals = StepResiduals()
    for _ in range(8):
        residuals.observe(1, 1, 0.5)
        residuals.observe(1, 4, 0.4)
        residuals.observe(1, 40, 3.0)
    assert residuals.plain(1) == pytest.approx(0.5, rel=0.05)
    assert residuals.longer(4) == pytest.approx(0.4, rel=0.05)
    assert residuals.longer(40) == pytest.approx(3.0, rel=0.1)
    assert residuals.longer(8) == residuals.longer(4), "the nearest smaller class"
    assert residuals.plain(4) == 1.0


def test_an_interrupted_step_says_little() -> None:
    residuals = StepResiduals()
    for _ in range(30):
        residuals.observe(1, 4, 1.0)
    residuals.observe(1, 4, 100.0)
    assert residuals.longer(4) < 1.1


def test_what_once_seemed_slow_is_tried_again() -> None:
    residuals = StepResiduals()
    residuals.observe(1, 4, 2.7)
    assert residuals.longer(4) > 2
    for _ in range(10_000):
        residuals.observe(1, 1, 1.0)
    assert residuals.longer(4) < 1


def test_a_staircase_is_predicted_better_than_by_a_line() -> None:
    def truth(tokens: int) -> float:
        return 0.010 + 0.004 * (tokens // 9) + (0.003 if tokens > 1 else 0.0)

    rng, times = random.Random(3), StepTimes()
    for _ in range(3000):
        tokens = rng.choice((1, 1, 1, 2, 4, 6, 12, 30, 200))
        times.observe(1, tokens, tokens * 100, truth(tokens) * rng.gauss(1, 0.03))
    assert times.decodes(1, 100) == pytest.approx(truth(1), rel=0.05)
    for tokens in (2, 4, 6, 12, 30):
        assert times.drafted(1, tokens, tokens * 100) == pytest.approx(truth(tokens), rel=0.08)
