""""""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.prediction.step_curve import TOKENS_ONLY, StepCost
from headrace.core.prediction.step_times import StepResiduals, StepTimes


@pytest.mark.parametrize("start", [0, 1, 100, 10_000])
@pytest.mark.parametrize("budget", [0.0, 1.0, 7.5, 300.0])
def test_the_longest_row_costs_the_budget_and_not_more(start: int, budget: float) -> None:
    cost = StepCost(context_tokens=512)

    def of(length: int) -> float:
        return length * (1 + (start + length / 2) / 512)

    length = cost.longest(start, budget)
    assert of(length) <= budget + 1e-6
    assert of(length + 1) > budget


def test_without_a_price_for_context_tokens_are_counted() -> None:
    assert TOKENS_ONLY.longest(1_000_000, 12.9) == 12
    assert TOKENS_ONLY.rows(3, 10**9) == 3
    assert TOKENS_ONLY.context_tokens == math.inf


def test_contexts_are_priced() -> None:
    assert StepCost(context_tokens=100).rows(2, 300) == 5


TRUTH = (0.008, 2e-4, 9e-4, 4e-7)


def truth(rows: int, tokens: int, contexts: int) -> float:
    fixed, row, token, context = TRUTH
    return fixed + row * rows + token * tokens + context * contexts


def steps(seed: int) -> Iterator[tuple[int, int, int]]:
    """Rows, tokens and contexts of steps that decode, two in five of them with a chunk of a prompt beside."""
    rng = random.Random(seed)
    while True:
        rows = rng.randint(1, 32)
        contexts = sum(rng.randint(50, 2000) for _ in range(rows))
        if rng.random() < 0.6:
            yield rows, rows, contexts
        else:
            length, start = rng.randint(16, 400), rng.randint(0, 3000)
            yield rows + 1, rows + length, contexts + length * start + length * length // 2


def errors(times: StepTimes, factor: float = 1.0) -> list[float]:
    shapes = steps(99)
    asked = [next(shapes) for _ in range(400)]
    return sorted(abs(times.predict(*shape) / (factor * truth(*shape)) - 1) for shape in asked)


def teach(times: StepTimes, count: int, *, outliers: float = 0.0, factor: float = 1.0, seed: int = 1) -> None:
    rng = random.Random(seed)
    shapes = steps(seed)
    for _ in range(count):
        shape = next(shapes)
        stolen = rng.uniform(3, 50) if rng.random() < outliers else 1.0
        times.observe(*shape, factor * truth(*shape) * rng.lognormvariate(0, 0.03) * stolen)


@pytest.mark.parametrize("cost", [TOKENS_ONLY, StepCost(8, 512), StepCost(256, 4096)])
@pytest.mark.parametrize("outliers", [0.0, 0.05])
def test_seconds_are_recovered_whatever_the_ratios_before(cost, outliers):
    times = StepTimes(cost)
    teach(times, 3000, outliers=outliers)
    off = errors(times)
    assert off[len(off) // 2] < 0.01
    assert off[int(0.95 * len(off))] < 0.03
    assert times.coefficients[:3] == pytest.approx(TRUTH[:3], rel=0.15)
    assert times.coefficients[3] == pytest.approx(TRUTH[3], rel=0.25)
    assert times.spread < 0.06


def test_before_any_step_the_ratios_hold_and_the_first_sets_the_scale():
    times = StepTimes(StepCost(8, 512), token_seconds=1e-4)
    assert times.predict(1, 1, 512) == pytest.approx(1e-3)
    times.observe(1, 92, 0, 5.0)
    assert times.predict(1, 92, 0) == pytest.approx(5.0)
    assert times.predict(1, 1, 0) == pytest.approx(0.45, rel=0.2)


def test_a_first_step_that_took_far_too_long_is_soon_made_good():
    times = StepTimes(StepCost(8, 512))
    times.observe(4, 4, 1000, 60.0)
    teach(times, 60)
    assert errors(times)[200] < 0.1


def test_a_machine_that_changes_its_pace_is_followed_within_some_batches():
    times = StepTimes(StepCost(8, 512))
    teach(times, 2000, outliers=0.05)
    teach(times, 130, outliers=0.05, factor=2.5, seed=2)
    assert errors(times, factor=2.5)[200] < 0.1
    teach(times, 2000, outliers=0.05, factor=0.7, seed=3)
    assert errors(times, factor=0.7)[200] < 0.02


def test_a_single_interruption_changes_nothing():
    times = StepTimes(StepCost(8, 512))
    teach(times, 1000)
    before = times.predict(8, 8, 8000)
    times.observe(8, 8, 8000, 30.0)
    teach(times, 31, seed=5)
    assert times.predict(8, 8, 8000) == pytest.approx(before, rel=0.02)


def test_what_steps_that_only_decode_cannot_tell_is_left_to_the_ratios():
    times = StepTimes(StepCost(10, 1000))
    for i in range(2000):
        rows = 1 + i % 4
        times.observe(rows, rows, 500 * rows, 1e-3 * (10 + 1.5 * rows))
    assert times.predict(4, 4, 2000) == pytest.approx(0.016, rel=0.02)
    assert times.predict(1, 200, 200 * 100) == pytest.approx(0.230, rel=0.3), (
        "the ratios say 230 tokens' worth"
    )


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(st.integers(1, 500), st.integers(0, 5000), st.integers(0, 10**9), st.floats(1e-7, 1e4)),
        min_size=1,
        max_size=120,
    )
)
def test_whatever_is_observed_no_coefficient_is_negative_or_undefined(observed):
    times = StepTimes(StepCost(4, 100))
    for rows, more, contexts, seconds in observed:
        times.observe(rows, rows + more, contexts, seconds)
    assert all(value >= 0 and math.isfinite(value) for value in times.coefficients)
    assert sum(times.coefficients) > 0


def test_steps_without_time_or_tokens_teach_nothing():
    times = StepTimes(StepCost(8, 512))
    times.observe(3, 3, 30, 0.0)
    times.observe(0, 0, 0, 1.0)
    assert times.coefficients == StepTimes(StepCost(8, 512)).coefficients


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


def staircase(tokens: int) -> float:
    return 0.010 + 0.004 * (tokens // 9) + (0.003 if tokens > 1 else 0.0)


def observed(steps: int) -> StepTimes:
    """Times of an engine whose steps take what `staircase` says."""
    rng, times = random.Random(3), StepTimes()
    for _ in range(steps):
        tokens = rng.choice((1, 1, 1, 2, 4, 6, 12, 30, 60))
        times.observe(1, tokens, tokens * 100, staircase(tokens))
    return times


def test_the_table_says_what_the_step_times_say_and_never_falls() -> None:
    times = observed(2000)
    stairs = times.verify_times(1, 100, 90)
    assert stairs[0] == times.decode_seconds(1, 100)
    assert list(stairs) == sorted(stairs)
    highest = stairs[0]
    for drafted in range(1, 91):
        highest = max(highest, times.verify_seconds(1, 1 + drafted, 100 * (1 + drafted)))
        assert stairs[drafted] == pytest.approx(highest, rel=0.02)


def test_a_table_is_kept_while_little_changes() -> None:
    times = StepTimes(StepCost(fixed_tokens=10.0, context_tokens=1000.0))
    kept = times.verify_times(1, 1000, 8)
    assert times.verify_times(1, 1010, 4) is kept
    assert times.verify_times(1, 2000, 4) is not kept
    assert times.verify_times(2, 1000, 4) is not kept
    kept = times.verify_times(1, 1000, 8)
    for _ in range(20):
        times.observe(1, 1, 100, 0.02)
    assert times.verify_times(1, 1000, 8) is not kept


def test_what_is_new_is_in_the_next_table() -> None:
    times = observed(0)
    for _ in range(40):
        times.observe(1, 1, 100, 0.01)
    before = times.verify_times(1, 100, 8)[8]
    times.observe(1, 9, 900, 0.09, drafted=True)
    assert times.verify_times(1, 100, 8)[8] == pytest.approx(times.verify_seconds(1, 9, 900))
    assert times.verify_times(1, 100, 8)[8] != before


def test_tables_of_many_numbers_of_rows_are_not_all_kept() -> None:
    times = observed(100)
    for rows in range(1, 200):
        times.verify_times(rows, 100 * rows, 16)
    assert len(times._verify_times) <= 16
