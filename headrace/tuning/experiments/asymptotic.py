"""Anytime-valid confidence for the mean of many units: an asymptotic confidence sequence.

A confidence interval of the central limit theorem is valid at one time that was fixed before. This sequence of
intervals is valid at all times simultaneously, so it may be checked after every unit and stopped at any time. With
``n`` units of mean ``m`` and standard deviation ``s`` it is

    m ± s * sqrt(2 * (n * r² + 1) / (n² * r²) * log(sqrt(n * r² + 1) / alpha))

Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas, "Time-uniform central limit theory and asymptotic confidence
sequences", 2021 (Annals of Statistics, 2024), theorem 2.2; ``r`` makes it tightest after about `TUNED` units (their
appendix B.2). The only assumption about the distribution is a finite variance. Units may depend on each other if their
arms are drawn independently (their theorem 2.5, for martingale differences).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.tuning.experiments.evidence import Interval

TUNED = 1000
"""The number of units after which the sequence is tightest."""

LEAST_UNITS = 100
"""Minimum number of units for a decision, for the limit theorem and for the estimate of the variance."""

_LOG = -2.0 * math.log(0.05)
_R2 = (_LOG + math.log(_LOG) + 1.0) / TUNED


class AsymptoticMean:
    """Running mean and variance of contributions, and the evidence that their mean is not zero."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self._squares = 0.0  # sum of squared deviations from the mean (Welford)

    def add(self, contribution: float) -> None:
        """Add one unit."""
        self.count += 1
        off = contribution - self.mean
        self.mean += off / self.count
        self._squares += off * (contribution - self.mean)

    @property
    def deviation(self) -> float:
        """Standard deviation of the contributions; infinite with fewer than two."""
        return math.sqrt(self._squares / (self.count - 1)) if self.count > 1 else math.inf

    @property
    def e_value(self) -> float:
        """Evidence against a mean of zero; ``1 / alpha`` and more rejects it at level ``alpha``."""
        if self.count < LEAST_UNITS:
            return 1.0
        if self._squares <= 0.0:
            return 1.0 if self.mean == 0.0 else math.inf
        grown = self.count * _R2 + 1.0
        score = (self.count * self.mean / self.deviation) ** 2
        return math.exp(min(700.0, _R2 * score / (2.0 * grown) - 0.5 * math.log(grown)))

    def interval(self, alpha: float) -> Interval:
        """All means that the evidence does not reject at level ``alpha``."""
        if self.count < LEAST_UNITS:
            return Interval(-math.inf, math.inf)
        half = self.deviation * float(half_widths(self.count, alpha))
        return Interval(self.mean - half, self.mean + half)

    def to_json(self) -> list[float]:
        """The state, as `from_json` reads it."""
        return [self.count, self.mean, self._squares]

    @classmethod
    def from_json(cls, stored: list[float]) -> AsymptoticMean:
        """Read what `to_json` wrote."""
        made = cls()
        made.count, made.mean, made._squares = int(stored[0]), stored[1], stored[2]
        return made


def half_widths(counts: int | NDArray[np.int64], alpha: float) -> NDArray[np.float64]:
    """Half the width of the intervals after these numbers of units of standard deviation 1; infinite if too few."""
    n = np.asarray(counts, np.float64)
    grown = n * _R2 + 1.0
    with np.errstate(divide="ignore"):
        width = np.sqrt(2.0 * grown / (n * n * _R2) * np.log(np.sqrt(grown) / alpha))
    return np.where(n < LEAST_UNITS, np.inf, width)


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
    """The difference of a metric between two arms to which units are assigned with probability 1/2.

    A unit contributes ``2 * (value - prediction)``, negated in the control arm. Its expectation is the effect of the
    treatment on this unit (inverse probability weighting).
    """

    def __init__(self, covariates: int) -> None:
        self.mean = AsymptoticMean()
        self._prediction = Prediction(covariates)

    def add(self, treated: bool, value: float, covariates: tuple[float, ...]) -> None:
        """Add one unit."""
        if self._prediction.ready:
            off = 2.0 * (value - self._prediction.predict(covariates))
            self.mean.add(off if treated else -off)
        self._prediction.learn(covariates, value)

    def to_json(self) -> dict[str, Any]:
        """The state, as `from_json` reads it."""
        return {"mean": self.mean.to_json(), "prediction": self._prediction.to_json()}

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Difference:
        """Read what `to_json` wrote."""
        made = cls(0)
        made.mean = AsymptoticMean.from_json(stored["mean"])
        made._prediction = Prediction.from_json(stored["prediction"])
        return made
