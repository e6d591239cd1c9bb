"""The order of windows, and the difference within each pair: a switchback experiment.

Both values of a setting share one engine, its memory and its queue. Splitting the requests would therefore let one
arm's requests slow the other's. So the whole engine runs one arm at a time, in pairs of windows whose order a seeded
coin decides:

    | burn-in  A | burn-in  B |   | burn-in  B | burn-in  A |   ...
        pair 1: A first              pair 2: B first

Load drifts over hours; within a pair it hardly does, and the coin removes the rest. The difference of a pair is that of
the logarithms, so it is a relative change, corrected for the difference of the two windows' load (CUPED: Deng et al.,
WSDM '13) with a coefficient learned from the pairs before it.
"""

from __future__ import annotations

import hashlib
import math
from typing import NamedTuple

LEAST_FOR_LOAD = 8
"""Pairs before the load is corrected for: a slope through fewer points is noise."""

FLOOR = 1e-3
"""Added to shares before their logarithm is taken, because a share may be 0."""


class Measured(NamedTuple):
    """The metrics of one window, and its offered load."""

    treatment: bool
    values: dict[str, float]
    load: float


def treatment_first(seed: int, pair: int) -> bool:
    """The coin of one pair: whether the treatment comes first. The same seed gives the same order."""
    return hashlib.sha256(f"{seed}:{pair}".encode()).digest()[0] < 128


def log_change(metric: str, control: Measured, treatment: Measured) -> float | None:
    """The relative change of a metric as a difference of logarithms; None if a window has no value."""
    before, after = control.values.get(metric), treatment.values.get(metric)
    if before is None or after is None:
        return None
    floor = FLOOR if metric.endswith(("_share", "_per_request")) else 0.0
    if before + floor <= 0.0 or after + floor <= 0.0:
        return None
    return math.log((after + floor) / (before + floor))


def log_load(control: Measured, treatment: Measured) -> float:
    """How much more load the treatment's window had."""
    return math.log((treatment.load + 1.0) / (control.load + 1.0))


class LoadCorrection:
    """A running regression of differences on differences of load, through their means."""

    def __init__(self) -> None:
        self.count = 0
        self._load_mean = self._mean = self._squares = self._products = 0.0

    def correct(self, difference: float, load: float) -> float:
        """``difference`` without what the load explains, by the pairs before this one; then learn from it.

        The coin makes the expected difference of load 0, so the correction does not shift the mean.
        """
        corrected = difference
        if self.count >= LEAST_FOR_LOAD and self._squares > 0.0:
            corrected -= self._products / self._squares * load
        self.count += 1
        off = load - self._load_mean
        self._load_mean += off / self.count
        self._squares += off * (load - self._load_mean)
        self._mean += (difference - self._mean) / self.count
        self._products += off * (difference - self._mean)
        return corrected
