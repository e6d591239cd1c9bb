"""Exact bounds on the error rate of served responses, and the threshold that they allow.

The bound is P(wrong | served) <= max_error with a given confidence. It is proved with labelled decisions that the
score was not fitted on. `certified_threshold` tests thresholds with the exact binomial bound, in a way that tests
several without spending the confidence twice (Learn then Test, arXiv:2110.01052). `audits`
monitors the bound afterwards. Pure arithmetic on counts: it knows no texts or scores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

CONFIDENCE = 0.95
"""The confidence of certificates, rejections and audits."""

_ITERATIONS = 300
_TINY = 1e-300
_PRECISION = 1e-15


def beta_cdf(x: float, a: float, b: float) -> float:
    """The regularized incomplete beta function I_x(a, b), by its continued fraction (DLMF 8.17.22)."""
    if x <= 0.0:
        return 0.0
    if x >= 1.0:
        return 1.0
    if x > (a + 1.0) / (a + b + 2.0):
        return 1.0 - beta_cdf(1.0 - x, b, a)  # where the fraction converges quickly
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    )
    c, d = 1.0, 1.0 / _away_from_zero(1.0 - (a + b) * x / (a + 1.0))
    fraction = d
    for m in range(1, _ITERATIONS):
        for step in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1.0 / _away_from_zero(1.0 + step * d)
            c = _away_from_zero(1.0 + step / c)
            fraction *= c * d
        if abs(c * d - 1.0) < _PRECISION:
            break
    return front * fraction / a


def upper_error(wrong: int, served: int, confidence: float) -> float:
    """The largest error rate that ``wrong`` of ``served`` does not reject (Clopper and Pearson, 1934).

    One-sided: for independent trials the true rate is above it with probability at most 1 - confidence.
    """
    if not 0 <= wrong <= served:
        raise ValueError(f"{wrong} wrong of {served} served")
    if wrong == served:
        return 1.0
    if wrong == 0:
        return -math.expm1(math.log1p(-confidence) / served)
    low, high = wrong / served, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if _chance_of_so_few(wrong, served, middle) > 1.0 - confidence:
            low = middle
        else:
            high = middle
    return high


class Tally(NamedTuple):
    """The result of serving at ``threshold`` and above on labelled decisions."""

    threshold: float
    served: int
    wrong: int


class Certificate(NamedTuple):
    """A threshold whose error rate among served responses is at most ``bound``, with the given confidence."""

    tally: Tally
    bound: float


def certified_threshold(
    tallies: Sequence[Tally], starts: Sequence[int], max_error: float, confidence: float
) -> Certificate | None:
    """The loosest threshold that the data support, or None if they support none.

    ``tallies`` go from strict to loose, ``starts`` are indices among them. The allowed error probability, 1 -
    confidence, is split among the starts. From each start thresholds are tested in order at the same level until one
    fails, which ends that level. A sequence of tests that reaches the next start adds that start's level to its own
    (the fallback procedure: Wiens and Dmitrienko, 2005). Thresholds and starts must have been chosen without the data
    that ``tallies`` count; `promising_starts` does that on other data. Starting at the strictest threshold would fail
    at once: too little is served there to prove anything.
    """
    found: Certificate | None = None
    doubt = 0.0
    for index, tally in enumerate(tallies):
        if index in starts:
            doubt += (1.0 - confidence) / len(starts)
        if doubt and tally.served and _chance_of_so_few(tally.wrong, tally.served, max_error) <= doubt:
            found = Certificate(tally, upper_error(tally.wrong, tally.served, 1.0 - doubt))
        else:
            doubt = 0.0
    return found


def promising_starts(tallies: Sequence[Tally], max_error: float, growth: float) -> list[int]:
    """The starts for `certified_threshold` on ``growth`` times as much data, chosen without that data.

    One start is where most can be proved; half an error is added to each count, because zero errors in a few rows
    prove nothing. The other is where half as much is served, in case these tallies were lucky: a score errs least on
    the rows that it was fitted on.
    """
    best = min(range(len(tallies)), key=lambda index: _expected_doubt(tallies[index], 0.5, max_error, growth))
    half = min(range(best + 1), key=lambda index: abs(tallies[index].served - tallies[best].served / 2))
    return sorted({half, best})


def is_promising(tallies: Sequence[Tally], max_error: float, confidence: float, growth: float) -> bool:
    """Whether some threshold would pass on ``growth`` times as much data with the same error rates."""
    return any(_expected_doubt(tally, 0.0, max_error, growth) <= 1.0 - confidence for tally in tallies)


def served_to_prove(max_error: float, confidence: float) -> int:
    """The number of served responses without an error that `certified_threshold` needs from one start."""
    return math.ceil(math.log1p(-confidence) / math.log1p(-max_error))


def _expected_doubt(tally: Tally, more: float, max_error: float, growth: float) -> float:
    """The error probability on ``growth`` times as much data, with ``more`` errors than ``tally`` has."""
    served = round(tally.served * growth)
    wrong = math.ceil((tally.wrong + more) * growth)
    return _chance_of_so_few(min(wrong, served), served, max_error)


def _chance_of_so_few(wrong: int, served: int, rate: float) -> float:
    """P(X <= wrong) for X binomial with ``served`` trials at ``rate``."""
    return 1.0 if wrong >= served else 1.0 - beta_cdf(rate, wrong + 1, served - wrong)


def _away_from_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY
