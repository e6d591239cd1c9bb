"""A step's seconds divided among its rows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.plan import Row
from headrace.observe.cost.split import shares


def row(start: int, length: int) -> Row:
    return Row(0, start, length, (), True)


numbers = st.floats(0.0, 1e3)
coefficients = st.tuples(numbers, numbers, numbers, numbers)
rows = st.lists(st.builds(row, st.integers(0, 100_000), st.integers(1, 8192)), min_size=1, max_size=64)


@given(rows, st.floats(1e-6, 1e3), coefficients)
def test_the_shares_are_the_step(
    step: list[Row], seconds: float, learnt: tuple[float, float, float, float]
) -> None:
    tokens = sum(each.length for each in step)
    parts = shares(step, tokens, seconds, learnt)
    assert len(parts) == len(step)
    assert min(parts) >= 0.0
    assert sum(parts) == pytest.approx(seconds, rel=1e-9)


def test_what_all_rows_share_counts_by_tokens() -> None:
    assert shares([row(0, 1), row(0, 3)], 4, 8.0, (5.0, 0.0, 0.0, 0.0)) == pytest.approx([2.0, 6.0])


def test_attention_counts_by_context() -> None:
    assert shares([row(100, 1), row(300, 1)], 2, 4.0, (0.0, 0.0, 1.0, 0.0)) == pytest.approx([2.0, 2.0])
    assert shares([row(100, 1), row(300, 1)], 2, 4.0, (0.0, 0.0, 0.0, 1.0)) == pytest.approx([1.0, 3.0])


def test_a_prompt_attends_to_its_own_tokens() -> None:
    """Positions 0, 1 and 2 attend to 0, 1 and 2 earlier ones; position 3 alone to three."""
    assert shares([row(0, 3), row(3, 1)], 4, 6.0, (0.0, 0.0, 0.0, 1.0)) == pytest.approx([3.0, 3.0])


def test_without_any_coefficient_tokens_count() -> None:
    assert shares([row(9, 1), row(0, 3)], 4, 4.0, (0.0, 0.0, 0.0, 0.0)) == pytest.approx([1.0, 3.0])
