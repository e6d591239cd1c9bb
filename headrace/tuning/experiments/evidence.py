"""Anytime-valid evidence of a mean difference: it may be checked after every pair, and stopped at any time.

Repeated t-tests raise a false alarm in far more than 5 % of experiments without a difference. An e-process does not:
without a difference its expectation is at most 1, so by Ville's inequality it reaches ``1 / alpha`` with probability at
most ``alpha``, however often it is checked.

This one is the scale-invariant mixture over the effect size (mean divided by standard deviation) with a normal prior
of variance `SPREAD`, for normal differences of unknown variance: Wang and Ramdas, "Anytime-valid t-tests and
confidence sequences for Gaussian means with unknown variance", 2023, section 4. With ``n`` differences, ``t`` their
t-statistic, ``v = n - 1`` and ``h = 1 + n * SPREAD``:

    e = h ** -0.5 * ((1 + t² / v) / (1 + t² / (v * h))) ** (n / 2)
"""

from __future__ import annotations

import math
from typing import NamedTuple

SPREAD = 0.3
"""Prior variance of the effect size: the test is fastest for differences of about half a standard deviation."""

LEAST_PAIRS = 4
"""Minimum number of differences for a decision, since the normal distribution is only an assumption."""


class Interval(NamedTuple):
    """An anytime-valid confidence interval; infinite while there is too little evidence."""

    low: float
    high: float


class Evidence:
    """Running mean and variance of differences, and the evidence that their mean is not zero."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self._squares = 0.0  # sum of squared deviations from the mean (Welford)

    def add(self, difference: float) -> None:
        """Add one difference."""
        self.count += 1
        off = difference - self.mean
        self.mean += off / self.count
        self._squares += off * (difference - self.mean)

    @property
    def deviation(self) -> float:
        """Standard deviation of the differences; infinite with fewer than two."""
        return math.sqrt(self._squares / (self.count - 1)) if self.count > 1 else math.inf

    @property
    def e_value(self) -> float:
        """Evidence against a mean of zero; ``1 / alpha`` and more rejects it at level ``alpha``."""
        if self.count < LEAST_PAIRS:
            return 1.0
        if self._squares <= 0.0:
            return 1.0 if self.mean == 0.0 else math.inf
        v, h = self.count - 1, 1 + self.count * SPREAD
        t2 = self.count * self.mean**2 / (self._squares / v)
        power = self.count / 2 * (math.log1p(t2 / v) - math.log1p(t2 / (v * h)))
        return math.exp(min(700.0, power - 0.5 * math.log(h)))

    def interval(self, alpha: float) -> Interval:
        """All means that the evidence does not reject at level ``alpha``."""
        if self.count < LEAST_PAIRS:
            return Interval(-math.inf, math.inf)
        half = self.deviation * half_width(self.count, alpha)
        return Interval(self.mean - half, self.mean + half)


def half_width(count: int, alpha: float) -> float:
    """Half the width of the interval after ``count`` differences of standard deviation 1; infinite if too few.

    It is the t-statistic at which the e-value is ``1 / alpha``, divided by the root of the count.
    """
    if count < LEAST_PAIRS:
        return math.inf
    v, h = count - 1, 1 + count * SPREAD
    q = math.exp((math.log(1 / alpha) + 0.5 * math.log(h)) * 2 / count)
    return math.sqrt(v * (q - 1) / (1 - q / h) / count) if q < h else math.inf
