"""Anytime-valid evidence of a mean difference: it may be checked after every observation, and stopped at any time.

Repeated t-tests raise a false alarm in far more than 5 % of experiments without a difference. An e-process does not:
without a difference its expectation is at most 1, so by Ville's inequality it reaches ``1 / alpha`` with probability at
most ``alpha``, however often it is checked. Its confidence sequence holds at all times simultaneously.

`Evidence` is the only statistic of experiments and of ``headrace tune``. What it assumes about the variance is passed
in: `NormalSequence` for a few normal differences of pairs, `AsymptoticSequence` for many units of any distribution.
`Difference` reduces the variance of units by what is known before their arm is drawn (CUPED).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class Interval(NamedTuple):
    """An anytime-valid confidence interval; infinite while there is too little evidence."""

    low: float
    high: float


class ConfidenceSequence(Protocol):
    """How sure a mean of so many observations is, by their t-statistic; ``least`` is the number that may decide."""

    least: int

    def log_e_value(self, count: int, t: float) -> float:
        """Logarithm of the evidence against a mean of zero."""

    def half_width(self, count: int, alpha: float) -> float:
        """Half the width of the interval for observations of standard deviation 1; infinite if they are too few."""


class NormalSequence:
    """For normal differences of unknown variance: exact, also for few of them.

    The scale-invariant mixture over the effect size (mean divided by standard deviation) with a normal prior of
    variance ``spread``: Wang and Ramdas, "Anytime-valid t-tests and confidence sequences for Gaussian means with
    unknown variance", 2023, section 4. With ``n`` differences, ``t`` their t-statistic, ``v = n - 1`` and
    ``h = 1 + n * spread``:

        e = h ** -0.5 * ((1 + t² / v) / (1 + t² / (v * h))) ** (n / 2)
    """

    least = 4  # the normal distribution is only an assumption

    def __init__(self, spread: float) -> None:
        self._spread = spread

    def log_e_value(self, count: int, t: float) -> float:
        """As `ConfidenceSequence`."""
        v, h = count - 1, 1 + count * self._spread
        return count / 2 * (math.log1p(t * t / v) - math.log1p(t * t / (v * h))) - 0.5 * math.log(h)

    def half_width(self, count: int, alpha: float) -> float:
        """The t-statistic at which the e-value is ``1 / alpha``, divided by the root of the count."""
        if count < self.least:
            return math.inf
        v, h = count - 1, 1 + count * self._spread
        q = math.exp((math.log(1 / alpha) + 0.5 * math.log(h)) * 2 / count)
        return math.sqrt(v * (q - 1) / (1 - q / h) / count) if q < h else math.inf


class AsymptoticSequence:
    """For many units of any distribution with a finite variance: valid as their number grows.

    With ``n`` units of mean ``m`` and standard deviation ``s`` the interval is

        m ± s * sqrt(2 * (n * r² + 1) / (n² * r²) * log(sqrt(n * r² + 1) / alpha))

    Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas, "Time-uniform central limit theory and asymptotic confidence
    sequences", 2021 (Annals of Statistics, 2024), theorem 2.2; ``r`` makes it tightest after about ``tuned`` units
    (their appendix B.2). Units may depend on each other if their arms are drawn independently (their theorem 2.5, for
    martingale differences). ``least`` is large enough for the limit theorem and the estimate of the variance.
    """

    def __init__(self, tuned: int, least: int) -> None:
        self.least = least
        log = -2.0 * math.log(0.05)
        self._r2 = (log + math.log(log) + 1.0) / tuned

    def log_e_value(self, count: int, t: float) -> float:
        """As `ConfidenceSequence`."""
        grown = count * self._r2 + 1.0
        return self._r2 * count * t * t / (2.0 * grown) - 0.5 * math.log(grown)

    def half_width(self, count: int, alpha: float) -> float:
        """As `ConfidenceSequence`."""
        if count < self.least:
            return math.inf
        grown = count * self._r2 + 1.0
        return math.sqrt(2.0 * grown / (count * count * self._r2) * math.log(math.sqrt(grown) / alpha))


PAIRS = NormalSequence(0.3)
"""For pairs of windows: fastest for differences of about half a standard deviation."""

LEAST_OF_ARM = 50
"""Units that each arm needs on average before a split decides."""


def units(share: float) -> AsymptoticSequence:
    """For requests or tenants of which ``share`` have the treatment: the smaller arm decides when there are enough."""
    smaller = min(share, 1.0 - share)
    return AsymptoticSequence(math.ceil(500 / smaller), math.ceil(LEAST_OF_ARM / smaller))


class Evidence:
    """Running mean and variance of observations, and the evidence that their mean is not zero."""

    def __init__(self, sequence: ConfidenceSequence) -> None:
        self._sequence = sequence
        self.count = 0
        self.mean = 0.0
        self._squares = 0.0  # sum of squared deviations from the mean (Welford)

    def add(self, observation: float) -> None:
        """Add one observation."""
        self.count += 1
        off = observation - self.mean
        self.mean += off / self.count
        self._squares += off * (observation - self.mean)

    @property
    def deviation(self) -> float:
        """Standard deviation of the observations; infinite with fewer than two."""
        return math.sqrt(self._squares / (self.count - 1)) if self.count > 1 else math.inf

    @property
    def e_value(self) -> float:
        """Evidence against a mean of zero; ``1 / alpha`` and more rejects it at level ``alpha``."""
        if self.count < self._sequence.least:
            return 1.0
        if self._squares <= 0.0:
            return 1.0 if self.mean == 0.0 else math.inf
        t = self.mean * math.sqrt(self.count) / self.deviation
        return math.exp(min(700.0, self._sequence.log_e_value(self.count, t)))

    def interval(self, alpha: float) -> Interval:
        """All means that the evidence does not reject at level ``alpha``."""
        width = self._sequence.half_width(self.count, alpha)
        if math.isinf(width):
            return Interval(-math.inf, math.inf)
        half = self.deviation * width
        return Interval(self.mean - half, self.mean + half)

    def to_json(self) -> list[float]:
        """The state, as `restore` reads it."""
        return [self.count, self.mean, self._squares]

    def restore(self, stored: list[float]) -> None:
        """Continue from what `to_json` wrote."""
        self.count, self.mean, self._squares = int(stored[0]), stored[1], stored[2]


class Prediction:
    """Predicts a unit's metric from covariates that are known before its arm is drawn (CUPED).

    A linear regression (ridge) on ``size`` covariates, fitted again after every `REFIT` units: Deng, Xu, Kohavi and
    Walker, "Improving the sensitivity of online controlled experiments by utilizing pre-experiment data", WSDM 2013.
    A unit is predicted before the regression learns from it, so even a wrong prediction does not bias the mean.
    """

    REFIT = 16

    def __init__(self, size: int) -> None:
        self.count = 0
        self._products = np.zeros((size + 1, size + 1))
        self._sums = np.zeros(size + 1)
        self._weights: NDArray[np.float64] = np.zeros(size + 1)

    @property
    def ready(self) -> bool:
        """Whether it has been fitted."""
        return self.count >= self.REFIT

    def predict(self, covariates: tuple[float, ...]) -> float:
        """The expected value of a unit with these covariates."""
        return float(self._weights @ np.array((1.0, *covariates)))

    def learn(self, covariates: tuple[float, ...], value: float) -> None:
        """Learn from a unit with ``value``."""
        row = np.array((1.0, *covariates))
        self._products += np.outer(row, row)
        self._sums += row * value
        self.count += 1
        if self.count % self.REFIT == 0:
            self._fit()

    def _fit(self) -> None:
        ridge = np.eye(len(self._sums)) * 1e-3
        self._weights[:] = np.linalg.solve(self._products + ridge, self._sums)

    def to_json(self) -> dict[str, Any]:
        """The state, as `from_json` reads it."""
        return {"count": self.count, "products": self._products.tolist(), "sums": self._sums.tolist()}

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Prediction:
        """Read what `to_json` wrote."""
        made = cls(len(stored["sums"]) - 1)
        made.count = stored["count"]
        made._products, made._sums = np.array(stored["products"]), np.array(stored["sums"])
        if made.ready:
            made._fit()
        return made


class Difference:
    """The difference of a metric between two arms; a unit has the treatment with the probability ``share``.

    A unit contributes ``(value - prediction) / share`` in the treatment arm, ``-(value - prediction) / (1 - share)`` in
    the control arm. Its expectation is the effect of the treatment on this unit (inverse probability weighting).
    """

    def __init__(self, covariates: int, share: float = 0.5) -> None:
        self.mean = Evidence(units(share))
        self._weights = (-1.0 / (1.0 - share), 1.0 / share)
        self._prediction = Prediction(covariates)

    def add(self, treated: bool, value: float, covariates: tuple[float, ...]) -> None:
        """Add one unit."""
        if self._prediction.ready:
            self.mean.add(self._weights[treated] * (value - self._prediction.predict(covariates)))
        self._prediction.learn(covariates, value)

    def to_json(self) -> dict[str, Any]:
        """The state, as `from_json` reads it."""
        return {"mean": self.mean.to_json(), "prediction": self._prediction.to_json()}

    @classmethod
    def from_json(cls, stored: dict[str, Any], share: float = 0.5) -> Difference:
        """Read what `to_json` wrote."""
        made = cls(0, share)
        made.mean.restore(stored["mean"])
        made._prediction = Prediction.from_json(stored["prediction"])
        return made
