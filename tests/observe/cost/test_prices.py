"""Prices of device time and of tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.plan import Row
from headrace.observe.cost.ledger import Account
from headrace.observe.cost.prices import BadPrice, Pricing, TokenPrices, parse_device_price, shares


@pytest.mark.parametrize(
    ("text", "per_second"),
    [
        ("3600/h", 1.0),
        ("2.5/h", 2.5 / 3600),
        ("2.5 / hour", 2.5 / 3600),
        ("0.5/s", 0.5),
        ("0.5 per second", 0.5),
    ],
)
def test_a_device_price(text: str, per_second: float) -> None:
    assert parse_device_price(text) == pytest.approx(per_second)


@pytest.mark.parametrize("text", ["", "2.5", "/h", "-1/h", "2.5/day", "two/h", "2.5/h each", "nan/h"])
def test_what_is_no_device_price(text: str) -> None:
    with pytest.raises(BadPrice, match="expected a price such as"):
        parse_device_price(text)


def test_cached_tokens_have_their_own_price() -> None:
    prices = TokenPrices(prompt=10.0, cached=1.0, output=40.0)
    assert prices.of(1_000_000, 0, 0) == 10.0
    assert prices.of(0, 1_000_000, 500_000) == 21.0
    assert prices.saved_by_prefix(1_000_000) == 9.0
    assert prices.saved(1_000_000, 1_000_000) == 50.0


def test_prices_of_tokens_come_before_the_price_of_the_device() -> None:
    used = Account()
    used.seconds, used.prompt_tokens, used.output_tokens = 10.0, 1000, 100
    by_device = used.cost(Pricing(0.5))
    assert (by_device.total, by_device.device, by_device.tokens) == (5.0, 5.0, 0.0)
    both = used.cost(Pricing(0.5, TokenPrices(1000.0, 0.0, 10_000.0)))
    assert (both.total, both.device, both.tokens) == (2.0, 5.0, 2.0)
    assert both.device_seconds == 10.0


def test_whether_there_is_a_price() -> None:
    assert not Pricing(currency="EUR").given
    assert Pricing(0.1).given
    assert Pricing(tokens=TokenPrices(output=1.0)).given


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
