"""Prices of device time and of tokens."""

from __future__ import annotations

import pytest

from headrace.observe.cost.account import Account
from headrace.observe.cost.prices import BadPrice, Pricing, TokenPrices, parse_device_price


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
