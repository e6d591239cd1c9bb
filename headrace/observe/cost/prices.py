"""Prices: of a device's time, and of a million tokens.

With token prices, a request's cost is that of its tokens; otherwise it is that of its device time. Both amounts are
always reported, so that a provider sees its margin.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from headrace.core.plan import Row

_MILLION = 1e6

_UNITS = {"s": 1.0, "second": 1.0, "h": 3600.0, "hour": 3600.0}

_DEVICE_PRICE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:/|per)\s*(second|hour|s|h)")


class BadPrice(ValueError):
    """A price that cannot be read."""


def parse_device_price(text: str) -> float:
    """The price of a second from a price such as ``2.5/h`` or ``0.0007/s``.

    Raises:
        BadPrice: the text cannot be parsed.
    """
    match = _DEVICE_PRICE.fullmatch(text.strip().lower())
    if match is None:
        raise BadPrice(f"expected a price such as 2.5/h or 0.0007/s, got {text!r}")
    return float(match[1]) / _UNITS[match[2]]


class TokenPrices(NamedTuple):
    """Prices of a million tokens: computed prompt tokens, prompt tokens from the prefix cache, generated tokens."""

    prompt: float = 0.0
    cached: float = 0.0
    output: float = 0.0

    def of(self, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> float:
        """Cost of tokens; ``prompt_tokens`` do not include the cached ones."""
        return (
            prompt_tokens * self.prompt + cached_tokens * self.cached + output_tokens * self.output
        ) / _MILLION

    def saved(self, prompt_tokens: int, output_tokens: int) -> float:
        """Saved cost of a cached response."""
        return self.of(prompt_tokens, 0, output_tokens)

    def saved_by_prefix(self, tokens: int) -> float:
        """Saved cost of prompt tokens from the prefix cache."""
        return self.of(tokens, 0, 0) - self.of(0, tokens, 0)


NO_PRICES = TokenPrices()


def free() -> TokenPrices:
    """Prices of 0."""
    return NO_PRICES


class Pricing(NamedTuple):
    """Price of a second of the device, prices of tokens, and the currency's label, which may be empty."""

    device_second: float = 0.0
    tokens: TokenPrices = NO_PRICES
    currency: str = ""

    @property
    def by_token(self) -> bool:
        """Whether requests are billed by tokens instead of device time."""
        return self.tokens != NO_PRICES

    @property
    def given(self) -> bool:
        """Whether there is any price."""
        return self.by_token or self.device_second > 0.0


# Divides a step's seconds among its rows, by what each row would add to the duration of the step.

Coefficients = tuple[float, float, float, float]
"""Seconds per step, row, token, and position attended to."""

BY_TOKENS: Coefficients = (1.0, 0.0, 0.0, 0.0)
"""Coefficients with which every token costs the same."""


def shares(rows: Sequence[Row], tokens: int, seconds: float, coefficients: Coefficients) -> list[float]:
    """The seconds of each row of a step that computed ``tokens`` tokens in ``seconds``."""
    fixed, per_row, per_token, per_context = coefficients
    per_token += fixed / tokens
    if tokens == len(rows):
        per_row += per_token
        weights = [per_row + per_context * row[1] for row in rows]
    else:
        weights = [
            per_row + row[2] * (per_token + per_context * (row[1] + 0.5 * (row[2] - 1))) for row in rows
        ]
    total = sum(weights)
    if total <= 0.0:
        return shares(rows, tokens, seconds, BY_TOKENS)
    scale = seconds / total
    return [scale * weight for weight in weights]
