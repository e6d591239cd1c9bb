import random

import pytest

from headrace.core.prediction.step_residuals import StepResiduals
from headrace.core.prediction.step_times import StepTimes


def test_nothing_is_known_at_first() -> None:
    assert StepResiduals().decode_ratio(4) == 1.0
    assert StepResiduals().verify_ratio(4, 8) is None


def test_a_stair_is_learned_from_a_few_steps() -> None:
    residuals = StepResiduals()
    for _ in range(12):
        residuals.observe(1, 1, 0.5)
        residuals.observe(2, 4, 1.1)
        residuals.observe(2, 40, 3.0)
    assert residuals.decode_ratio(1) == pytest.approx(0.5, rel=0.05)
    assert residuals.decode_ratio(4) == 1.0
    known = residuals.verify_ratio(2, 4)
    assert known is not None
    assert (known.ratio, known.tokens) == pytest.approx((1.1, 4.0), rel=0.05)
    assert residuals.verify_ratio(2, 8) == known, "the nearest smaller class"
    large = residuals.verify_ratio(2, 40)
    assert large is not None
    assert large.ratio == pytest.approx(3.0, rel=0.1)
    assert residuals.verify_ratio(1, 4) is None


def test_a_few_recent_steps_of_as_many_rows_are_enough() -> None:
    residuals = StepResiduals()
    for _ in range(12):
        residuals.observe(4, 4, 1.0)
    assert not residuals.is_measured(4)
    residuals.observe(4, 4, 1.0)
    assert residuals.is_measured(4)
    assert not residuals.is_measured(16)
    for _ in range(4000):
        residuals.observe(4, 20, 1.0)
    assert not residuals.is_measured(4)


def test_an_interrupted_step_says_little() -> None:
    residuals = StepResiduals()
    for _ in range(30):
        residuals.observe(1, 4, 1.0)
    residuals.observe(1, 4, 100.0)
    known = residuals.verify_ratio(1, 4)
    assert known is not None
    assert known.ratio < 1.1


def test_what_once_seemed_slow_is_forgotten() -> None:
    residuals = StepResiduals()
    residuals.observe(1, 4, 2.7)
    known = residuals.verify_ratio(1, 4)
    assert known is not None
    assert known.confidence == pytest.approx(0.8)
    for _ in range(20_000):
        residuals.observe(1, 1, 1.0)
    known = residuals.verify_ratio(1, 4)
    assert known is not None
    assert known.confidence < 0.05


def test_a_larger_step_that_was_quicker_bounds_a_smaller_one() -> None:
    residuals = StepResiduals()
    residuals.observe(1, 4, 2.0)
    for _ in range(5):
        residuals.observe(1, 16, 1.5)
    known = residuals.verify_ratio(1, 4)
    assert known is not None
    assert known.ratio == pytest.approx(1.5)


def test_a_larger_step_bounds_what_smaller_ones_are_hoped_to_take() -> None:
    times = StepTimes()
    for _ in range(40):
        times.observe(1, 1, 10, 0.010)
    hoped = times.verify_seconds(1, 9, 90)
    for _ in range(8):
        times.observe(1, 30, 300, 0.012, drafted=True)
    assert times.verify_seconds(1, 9, 90) == pytest.approx(0.012, rel=0.1)
    assert hoped > 0.04
    for _ in range(8):
        times.observe(1, 30, 300, 10.0, drafted=True)
    assert times.verify_seconds(1, 9, 90) <= hoped * 1.01, "a slow larger step says nothing"


def test_steps_with_drafts_do_not_change_what_steps_without_are_predicted_to_take() -> None:
    times = StepTimes()
    for _ in range(40):
        times.observe(4, 4, 400, 0.010)
        times.observe(4, 104, 10_400, 0.050)
    before = times.decode_seconds(4, 400)
    for _ in range(1000):
        times.observe(4, 20, 2000, 0.030, drafted=True)
    assert times.decode_seconds(4, 400) == before == pytest.approx(0.010, rel=0.1)
    assert times.verify_seconds(4, 20, 2000) == pytest.approx(0.030, rel=0.05)


def test_other_steps_do_not_change_what_was_observed_of_rows_of_one_token() -> None:
    """Prompts are quicker than the line said: it moves, and the known steps stay."""
    times = StepTimes()
    for _ in range(100):
        times.observe(16, 16, 1600, 0.002)
        times.observe(1, 100, 5000, 0.050)
    before = times.decode_seconds(16, 1600)
    assert before == pytest.approx(0.002, rel=0.05)
    for _ in range(400):
        times.observe(1, 100, 5000, 0.040)
        times.observe(4, 300, 20_000, 0.120)
    assert times.decode_seconds(16, 1600) == pytest.approx(before, rel=0.1)


def test_new_steps_are_hoped_to_be_cheaper_than_the_line() -> None:
    times = StepTimes()
    for _ in range(200):
        times.observe(1, 1, 10, 0.010)
        times.observe(4, 400, 4000, 0.100)
    assert times.decode_seconds(1, 10) < times.verify_seconds(1, 9, 90) < times.predict(1, 9, 90) * 1.2


def test_a_staircase_is_predicted_better_than_by_a_line() -> None:
    def truth(tokens: int) -> float:
        return 0.010 + 0.004 * (tokens // 9) + (0.003 if tokens > 1 else 0.0)

    rng, times = random.Random(3), StepTimes()
    for _ in range(3000):
        tokens = rng.choice((1, 1, 1, 2, 4, 6, 12, 30, 200))
        seconds = truth(tokens) * rng.gauss(1, 0.03)
        times.observe(1, tokens, tokens * 100, seconds, drafted=1 < tokens < 200)
    assert times.decode_seconds(1, 100) == pytest.approx(truth(1), rel=0.05)
    for tokens in (2, 4, 6, 12, 30):
        assert times.verify_seconds(1, tokens, tokens * 100) == pytest.approx(truth(tokens), rel=0.08)


def test_a_single_step_of_more_tokens_does_not_bound_those_of_fewer() -> None:
    residuals = StepResiduals()
    residuals.observe(32, 600, 11.0)
    for _ in range(40):
        residuals.observe(32, 400, 9.0)
    fewer, more = residuals.verify_ratio(32, 400), residuals.verify_ratio(32, 600)
    assert fewer is not None
    assert fewer.ratio == pytest.approx(9.0, rel=0.05)
    assert more is not None
    assert more.ratio < fewer.ratio, "it is little known itself"


def test_the_first_step_of_more_tokens_counts_from_what_is_expected() -> None:
    residuals = StepResiduals()
    residuals.observe(32, 600, 11.0, expected=9.0)
    known = residuals.verify_ratio(32, 600)
    assert known is not None
    assert known.ratio == pytest.approx(11.0, rel=0.01)


def test_the_line_says_what_is_expected_of_the_first_step_with_drafts() -> None:
    times = StepTimes()
    for _ in range(100):
        times.observe(16, 16, 1600, 0.001)
        times.observe(16, 512, 8192, 0.032)
    times.observe(16, 256, 25_600, 0.016, drafted=True)
    times.observe(16, 256, 25_600, 0.016, drafted=True)
    assert times.verify_seconds(16, 256, 25_600) == pytest.approx(0.016, rel=0.1)


def test_prompts_say_nothing_of_steps_with_drafts() -> None:
    times = StepTimes()
    for _ in range(100):
        times.observe(16, 16, 1600, 0.001)
        times.observe(16, 512, 8192, 0.032)
    assert times.residuals.verify_ratio(16, 512) is None


def test_steps_with_drafts_grow_from_what_is_known() -> None:
    residuals = StepResiduals()
    assert (residuals.max_drafted(1), residuals.max_drafted(16)) == (15, 16)
    residuals.observe(16, 16, 1.0)
    assert residuals.max_drafted(16) == 16, "a step without drafts"
    residuals.observe(16, 24, 1.5)
    assert residuals.max_drafted(16) == 32
    assert residuals.max_drafted(14) == 34, "of the same class of rows"
    assert residuals.max_drafted(8) == 15


def test_one_cold_step_with_a_draft_does_not_limit_the_next_one() -> None:
    residuals = StepResiduals()
    residuals.observe(1, 2, 4.0)
    assert residuals.max_drafted(1) == 15


def test_a_single_step_without_drafts_between_others_is_no_measure_of_steps_without() -> None:
    times = StepTimes(token_seconds=0.001)
    for _ in range(100):
        times.observe(4, 4, 0, 0.001)
    calm = times.decode_seconds(4, 0)
    for _ in range(100):
        times.observe(4, 20, 0, 0.003, drafted=True)
        times.observe(4, 4, 0, 0.002)
    assert times.decode_seconds(4, 0) == calm
    for _ in range(100):
        times.observe(4, 4, 0, 0.002)
    assert times.decode_seconds(4, 0) > 1.8 * calm
