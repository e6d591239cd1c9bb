from __future__ import annotations

import math

import pytest

from headrace.core.cost import TOKENS_ONLY, StepCost


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
