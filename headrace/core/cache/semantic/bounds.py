"""Exact bounds on how often a cached answer is wrong, and the threshold that they allow.

The promise is P(wrong | served) <= max_error with a given confidence. It is bought with labelled decisions that the
score was not fitted on: `certified_threshold` tests thresholds by the exact binomial bound, in a way that may look at
several without spending the confidence twice (Learn then Test, arXiv:2110.01052). `core.cache.semantic.audits`
watches the promise afterwards. Pure arithmetic on counts: knows neither texts nor scores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

CONFIDENCE = 0.95
"""With which everything here is promised, refused and switched off."""

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
    """The largest error rate that ``wrong`` of ``served`` does not refute (Clopper and Pearson, 1934).

    One-sided: for independent trials the true rate lies above it with probability at most 1 - confidence.
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
    """What serving at ``threshold`` and above did on labelled decisions."""

    threshold: float
    served: int
    wrong: int


class Certificate(NamedTuple):
    """A threshold whose error among served answers is at most ``bound``, with the confidence asked for."""

    tally: Tally
    bound: float


def certified_threshold(
    tallies: Sequence[Tally], starts: Sequence[int], max_error: float, confidence: float
) -> Certificate | None:
    """The loosest threshold that the data support, or None where they support none.

    ``tallies`` go from strict to loose, ``starts`` are indices among them. The allowed doubt, 1 - confidence, is shared
    out among the starts. From each of them thresholds are tested in order with one and the same doubt until one
    fails, where it is spent; who comes as far as the next start takes up the doubt that lies there (the fallback
    procedure: Wiens and Dmitrienko, 2005). Thresholds and starts must have been chosen without the data that
    ``tallies`` count; `promising_starts` does that on other data. Beginning at the strictest would stall at once: too
    little is served there to prove anything.
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
    """Where `certified_threshold` should begin on ``growth`` times as much data like these, without having seen them.

    Where most can be proved (error rates taken with half an error more than was seen, because none in a few proves
    nothing), and where half as much is served, in case these tallies were lucky: a score errs least on the rows that it
    was fitted on.
    """
    best = min(range(len(tallies)), key=lambda index: _foreseen(tallies[index], 0.5, max_error, growth))
    half = min(range(best + 1), key=lambda index: abs(tallies[index].served - tallies[best].served / 2))
    return sorted({half, best})


def is_promising(tallies: Sequence[Tally], max_error: float, confidence: float, growth: float) -> bool:
    """Whether some threshold would pass on ``growth`` times as much data of just these error rates."""
    return any(_foreseen(tally, 0.0, max_error, growth) <= 1.0 - confidence for tally in tallies)


def served_to_prove(max_error: float, confidence: float) -> int:
    """Served answers, all of them right, that `certified_threshold` needs from one start: fewer can prove nothing."""
    return math.ceil(math.log1p(-confidence) / math.log1p(-max_error))


def _foreseen(tally: Tally, more: float, max_error: float, growth: float) -> float:
    """The doubt that ``growth`` times as much data would leave, with ``more`` errors than ``tally`` has."""
    served = round(tally.served * growth)
    wrong = math.ceil((tally.wrong + more) * growth)
    return _chance_of_so_few(min(wrong, served), served, max_error)


def _chance_of_so_few(wrong: int, served: int, rate: float) -> float:
    """P(X <= wrong) for X binomial with ``served`` trials at ``rate``."""
    return 1.0 if wrong >= served else 1.0 - beta_cdf(rate, wrong + 1, served - wrong)


def _away_from_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY
