"""Exact bounds on how often a cached answer is wrong, and the threshold that they allow.

The promise is P(wrong | served) <= max_error with a given confidence. It is bought with labelled decisions that
the score was not fitted on: `certify` tests thresholds by the exact binomial bound, in a way that may look at
several without spending the confidence twice (Learn then Test, arXiv:2110.01052). `AuditBound` keeps watching the
promise afterwards, on answers that were computed although the cache had one; it may be asked after every answer
(Ville's inequality; Howard et al., arXiv:1810.08240). Pure arithmetic on counts: knows neither texts nor scores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

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


def certify(
    tallies: Sequence[Tally], max_error: float, confidence: float, starts: int = 4
) -> Certificate | None:
    """The loosest threshold that the data support, or None where they support none.

    ``tallies`` go from the strictest threshold to the loosest; their thresholds must have been chosen without the
    data that they count. The sequence is cut into ``starts`` parts of equal length; each spends an equal
    share of the allowed doubt, tests its first threshold and goes looser, also into the next parts, until a
    threshold fails. A single sequence from the strictest would stall at once, because too little is served there to
    prove anything; and testing all thresholds independently would spend the doubt on neighbours.
    """
    if not tallies:
        return None
    starts = min(starts, len(tallies))
    doubt = (1.0 - confidence) / starts
    best = -1
    for start in range(starts):
        for index in range(start * len(tallies) // starts, len(tallies)):
            _, served, wrong = tallies[index]
            if not served or _chance_of_so_few(wrong, served, max_error) > doubt:
                break
            best = max(best, index)
    if best < 0:
        return None
    tally = tallies[best]
    return Certificate(tally, upper_error(tally.wrong, tally.served, 1.0 - doubt))


def served_to_prove(max_error: float, confidence: float, starts: int = 4) -> int:
    """Served answers, all of them right, that `certify` needs at the least: fewer can prove nothing."""
    return math.ceil(math.log((1.0 - confidence) / starts) / math.log1p(-max_error))


class AuditBound:
    """Watches the error rate of served answers through audited ones; ``violated`` may be asked after each.

    A bet against the promise: its wealth, started at one, is expected never to grow while the rate is at most
    ``max_error``, so it reaches 1 / (1 - confidence) with probability at most 1 - confidence, however often one
    looks. It is split over several alternatives, so that both a slight and a gross breach are found.
    """

    _WORSE = (1.5, 2.0, 4.0, 8.0, 16.0)

    def __init__(self, max_error: float, confidence: float) -> None:
        self.audited = 0
        self.wrong = 0
        self.violated = False
        rates = [min(0.9, max_error * times) for times in self._WORSE]
        self._if_wrong = [math.log(rate / max_error) for rate in rates]
        self._if_right = [math.log((1.0 - rate) / (1.0 - max_error)) for rate in rates]
        self._log_wealth = [0.0] * len(rates)
        self._limit = -math.log1p(-confidence)

    def observe(self, wrong: bool) -> None:
        """One served answer was audited."""
        self.audited += 1
        self.wrong += wrong
        for index, gain in enumerate(self._if_wrong if wrong else self._if_right):
            self._log_wealth[index] += gain
        top = max(self._log_wealth)
        mean = sum(math.exp(wealth - top) for wealth in self._log_wealth) / len(self._log_wealth)
        self.violated = self.violated or top + math.log(mean) >= self._limit


def _chance_of_so_few(wrong: int, served: int, rate: float) -> float:
    """P(X <= wrong) for X binomial with ``served`` trials at ``rate``."""
    return 1.0 if wrong >= served else 1.0 - beta_cdf(rate, wrong + 1, served - wrong)


def _away_from_zero(value: float) -> float:
    return value if abs(value) > _TINY else _TINY
