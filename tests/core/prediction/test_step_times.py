from __future__ import annotations

import math
import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.prediction.step_cost import TOKENS_ONLY, StepCost
from headrace.core.prediction.step_times import StepTimes


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


@settings(max_examples=50, deadline=None)
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
