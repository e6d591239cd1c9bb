"""How large a change an experiment finds, and after how long: what to know before it begins.

An experiment has found a change when the interval around the estimate leaves zero out. The estimate varies, too, so a
change is found with probability `POWER` if it is larger than half the interval by that quantile of its error.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any, NamedTuple

from headrace.observe.experiments.arms import By
from headrace.observe.experiments.asymptotic import LEAST_UNITS, half_widths
from headrace.observe.experiments.evidence import LEAST_PAIRS, half_width
from headrace.observe.experiments.spec import Spec
from headrace.observe.experiments.units import is_share

POWER = 0.8
"""The probability with which a change of the smallest size that is reported is found."""

MOST = 1 << 30
"""More units or pairs are never awaited."""

CHANGES = (0.01, 0.02, 0.05, 0.1, 0.2)
"""The changes of `forecast`."""


class Expected(NamedTuple):
    """A ``change`` is found after ``needed`` units or pairs, in ``seconds``; None: not within a reasonable time."""

    change: float
    needed: int | None
    seconds: float | None


LARGEST = 100.0
"""Logarithm of a change beyond which none can be found: so few pairs have no interval."""


def smallest_change(count: int, deviation: float, spec: Spec) -> float | None:
    """The smallest change that ``count`` units or pairs find, if each varies by ``deviation``; None if too few."""
    if count < _least(spec):
        return None
    half = deviation * _width(count, spec)
    if half > LARGEST:
        return None
    return half if _plain(spec) else math.expm1(half)


def units_for(change: float, deviation: float, spec: Spec) -> int | None:
    """The number of units or pairs that find a change; None if they are too many."""
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
    """After how long changes of usual sizes are found. Pairs of windows have a rate of their own."""
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
    """Whether the change is a difference, not a ratio."""
    return spec.unit != By.TIME and is_share(spec.metric)


def _least(spec: Spec) -> int:
    return LEAST_PAIRS if spec.unit == By.TIME else LEAST_UNITS


def _width(count: int, spec: Spec) -> float:
    """What a change must exceed, in standard deviations."""
    half = half_width(count, spec.alpha) if spec.unit == By.TIME else float(half_widths(count, spec.alpha))
    return half + NormalDist().inv_cdf(POWER) / math.sqrt(count)
