"""Power analysis of an experiment: the smallest detectable change, and the time to detect a change.

A change is detected when the interval around the estimate excludes zero. Since the estimate varies, a change is
detected with probability `POWER` if it exceeds half the interval by that quantile of the estimate's error.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any, NamedTuple

from headrace.tuning.experiments.arms import By
from headrace.tuning.experiments.asymptotic import LEAST_UNITS, half_widths
from headrace.tuning.experiments.evidence import LEAST_PAIRS, half_width
from headrace.tuning.experiments.spec import Spec
from headrace.tuning.experiments.units import is_share

POWER = 0.8
"""Probability of detecting the reported smallest change."""

MOST = 1 << 30
"""Maximum number of units or pairs."""

CHANGES = (0.01, 0.02, 0.05, 0.1, 0.2)
"""The changes of `forecast`."""


class Expected(NamedTuple):
    """A ``change`` is detected after ``needed`` units or pairs, in ``seconds`` (None: not in a reasonable time)."""

    change: float
    needed: int | None
    seconds: float | None


LARGEST = 100.0
"""Maximum logarithm of a detectable change; a larger width means that the number of pairs is too small."""


def smallest_change(count: int, deviation: float, spec: Spec) -> float | None:
    """The smallest change that ``count`` units or pairs of this standard ``deviation`` detect; None if too few."""
    if count < _least(spec):
        return None
    half = deviation * _width(count, spec)
    if half > LARGEST:
        return None
    return half if _plain(spec) else math.expm1(half)


def units_for(change: float, deviation: float, spec: Spec) -> int | None:
    """The number of units or pairs needed to detect a change; None if too many."""
    effect = abs(change) if _plain(spec) else abs(math.log1p(change))
    low, high = _least(spec), MOST
    if deviation * _width(high, spec) > effect:
        return None
    while low < high:
        middle = (low + high) // 2
        if deviation * _width(middle, spec) <= effect:
            high = middle
        else:
            low = middle + 1
    return low


def forecast(spec: Spec, deviation: float, units_per_second: float | None = None) -> list[Expected]:
    """The time to detect each of `CHANGES`. ``units_per_second`` is not used for pairs of windows."""
    rate = 1.0 / spec.pair_seconds if spec.unit == By.TIME else units_per_second
    found = []
    for change in CHANGES:
        count = units_for(change, deviation, spec)
        found.append(Expected(change, count, None if count is None or not rate else count / rate))
    return found


def to_json(spec: Spec, deviation: float, units_per_second: float | None = None) -> dict[str, Any]:
    """`forecast` and the smallest change by the end of the experiment, as JSON."""
    rate = 1.0 / spec.pair_seconds if spec.unit == By.TIME else units_per_second
    most = int(spec.max_seconds * rate) if rate else None
    return {
        "power": POWER,
        "alpha": spec.alpha,
        "deviation": deviation,
        "most": most,
        "smallest_change": None if most is None else smallest_change(most, deviation, spec),
        "changes": [each._asdict() for each in forecast(spec, deviation, units_per_second)],
    }


def _plain(spec: Spec) -> bool:
    """Whether the change is a difference (of shares), not a ratio."""
    return spec.unit != By.TIME and is_share(spec.metric)


def _least(spec: Spec) -> int:
    return LEAST_PAIRS if spec.unit == By.TIME else LEAST_UNITS


def _width(count: int, spec: Spec) -> float:
    """The smallest detectable change in standard deviations."""
    half = half_width(count, spec.alpha) if spec.unit == By.TIME else float(half_widths(count, spec.alpha))
    return half + NormalDist().inv_cdf(POWER) / math.sqrt(count)
