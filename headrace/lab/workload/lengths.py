"""Distributions of prompt and output lengths, in tokens.

The spread of output lengths matters: with equal lengths, static batching wastes nothing.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

HIGH_VARIANCE: tuple[tuple[float, int, int], ...] = ((0.80, 4, 29), (0.16, 30, 200), (0.04, 801, 1200))
"""Shares of outputs with their minimum and maximum tokens: many short ones, few long ones."""


def log_normal(count: int, median: int, sigma: float, low: int, high: int, rng: random.Random) -> list[int]:
    """Log-normal lengths, as in production traces, clamped to ``[low, high]``.

    ``sigma`` is the standard deviation of the logarithm: 0 always gives the median, 1 is a wide spread.
    """
    most = math.log(high / median)  # avoids overflow in exp; larger values are clamped anyway
    drawn = (median * math.exp(min(most, rng.gauss(0.0, sigma))) for _ in range(count))
    return [min(high, max(low, round(length))) for length in drawn]


def mixture(count: int, shares: Sequence[tuple[float, int, int]], rng: random.Random) -> list[int]:
    """Lengths in given ranges with given shares, uniform within a range, shuffled.

    The shares are exact up to rounding, not random; the first share takes the rounding remainder.
    """
    lengths = [rng.randint(low, high) for share, low, high in shares[1:] for _ in range(round(share * count))]
    _, low, high = shares[0]
    lengths += [rng.randint(low, high) for _ in range(count - len(lengths))]
    rng.shuffle(lengths)
    return lengths


Length = Callable[[random.Random], int]
"""Draws one length."""

LONGEST = 32
"""Maximum log-normal length as a multiple of its median."""

_FORMS = "N (fixed), uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA"


def length(text: str) -> Length:
    """Parses a distribution of lengths: ``200``, ``uniform:50:400`` or ``lognormal:800:1.0``.

    Log-normal lengths are limited to `LONGEST` times their median.

    Raises:
        ValueError: another form, or lengths below 1.
    """
    kind, _, rest = text.partition(":")
    try:
        numbers = [float(part) for part in (rest or kind).split(":")]
        if not rest and numbers[0] >= 1:
            fixed = int(numbers[0])
            return lambda rng: fixed
        first, second = numbers
        if kind == "uniform" and 1 <= first <= second:
            low, high = int(first), int(second)
            return lambda rng: rng.randint(low, high)
        if kind == "lognormal" and first >= 1 and 0 <= second < math.inf:
            most = int(LONGEST * first)
            return lambda rng: log_normal(1, int(first), second, 1, most, rng)[0]
    except (ValueError, IndexError, OverflowError):
        pass
    raise ValueError(f"expected {_FORMS}, with lengths of at least 1 token, got {text!r}")
