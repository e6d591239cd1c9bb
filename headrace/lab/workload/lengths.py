"""Lengths of prompts and outputs, in tokens.

Schedulers differ by the spread of output lengths: with equal lengths a static batch wastes nothing.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

HIGH_VARIANCE: tuple[tuple[float, int, int], ...] = ((0.80, 4, 29), (0.16, 30, 200), (0.04, 801, 1200))
"""Shares of outputs with their minimum and maximum tokens: many short ones, few long ones."""


def log_normal(count: int, median: int, sigma: float, low: int, high: int, rng: random.Random) -> list[int]:
    """Lengths whose logarithm is normal, as production traces have them, cut to ``[low, high]``.

    ``sigma`` is the standard deviation of the logarithm: 0 gives the median always, 1 is a wide spread.
    """
    most = math.log(high / median)  # what is beyond is cut anyway, and may be beyond all numbers
    drawn = (median * math.exp(min(most, rng.gauss(0.0, sigma))) for _ in range(count))
    return [min(high, max(low, round(length))) for length in drawn]


def mixture(count: int, shares: Sequence[tuple[float, int, int]], rng: random.Random) -> list[int]:
    """Lengths of which each share is uniform in its range, in shuffled order.

    The shares are exact up to rounding, not drawn: a workload with 4 % long outputs has exactly that share. The
    remainder of rounding goes to the first share.
    """
    lengths = [rng.randint(low, high) for share, low, high in shares[1:] for _ in range(round(share * count))]
    _, low, high = shares[0]
    lengths += [rng.randint(low, high) for _ in range(count - len(lengths))]
    rng.shuffle(lengths)
    return lengths


Length = Callable[[random.Random], int]
"""Draws one length."""

LONGEST = 32
"""Times the median that a drawn log-normal length may reach."""

_FORMS = "N (fixed), uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA"


def length(text: str) -> Length:
    """A distribution of lengths from its name: ``200``, ``uniform:50:400`` or ``lognormal:800:1.0``.

    Log-normal lengths are cut at `LONGEST` times their median.

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
