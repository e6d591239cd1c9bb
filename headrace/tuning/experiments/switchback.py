"""Switchback experiments: the random order of windows, and the difference within each pair.

Requests share one engine with its memory and queue, so with a split of the requests one arm could slow the other.
Instead, the whole engine runs one arm at a time, in pairs of windows whose order is random (seeded):

    | burn-in  A | burn-in  B |   | burn-in  B | burn-in  A |   ...
        pair 1: A first              pair 2: B first

Load drifts little within a pair, and the random order cancels the rest. The difference of a pair is a difference of
logarithms, that is a relative change. It is corrected for the load difference of the two windows (CUPED: Deng et al.,
WSDM '13) with a coefficient learned from earlier pairs, unless clients wait for responses before they send more.
"""

from __future__ import annotations

import hashlib
import math
from typing import NamedTuple

LEAST_FOR_LOAD = 8  # see docs/decisions/tuning.md#correction-for-load
"""Minimum number of pairs for the load correction."""

FLOOR = 1e-3
"""Added to shares before their logarithm is taken, because a share may be 0."""


class Measured(NamedTuple):
    """The metrics of one window, and its offered load."""

    treatment: bool
    values: dict[str, float]
    load: float


def treatment_first(seed: int, pair: int) -> bool:
    """Whether the treatment comes first in a pair; random, determined by the seed."""
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
    """Relative load difference of the treatment's window, as a difference of logarithms."""
    return math.log((treatment.load + 1.0) / (control.load + 1.0))


def stalled(control: Measured, treatment: Measured) -> bool:
    """Whether requests arrived and no token was generated under the treatment alone; latencies have no value then."""
    name = "output_tokens_per_second"
    return treatment.load > 0.0 and treatment.values.get(name) == 0.0 and control.values.get(name, 0.0) > 0.0


class LoadCorrection:
    """A running regression of differences of the metric on differences of load.

    Clients that wait for responses before they send more (a closed loop) make the load follow the setting, and a
    correction for it would remove the effect. They keep the number of open requests constant, so load and latency move
    against each other (Little's law). Differences are therefore corrected only while both rise together.
    """

    def __init__(self) -> None:
        self.count = 0
        self._load_mean = self._squares = self._mean = self._products = 0.0
        self._latency_mean = self._latency_products = 0.0

    def correct(self, difference: float, load: float, latency: float | None) -> float:
        """``difference`` corrected for the load by a regression on earlier pairs, which then learns from this one.

        ``latency`` is the relative change of the time per token; a pair without it is not corrected. If the load does
        not depend on the setting, the random order makes the expected load difference 0, so the correction does not
        bias the mean.
        """
        if latency is None:
            return difference
        corrected = difference
        if self.count >= LEAST_FOR_LOAD and self._squares > 0.0 and self._latency_products > 0.0:
            corrected -= self._products / self._squares * load
        self.count += 1
        off = load - self._load_mean
        self._load_mean += off / self.count
        self._squares += off * (load - self._load_mean)
        self._mean += (difference - self._mean) / self.count
        self._products += off * (difference - self._mean)
        self._latency_mean += (latency - self._latency_mean) / self.count
        self._latency_products += off * (latency - self._latency_mean)
        return corrected
