"""How fairly service was shared: what each should have got, and one number for how near that came.

Demands differ, so equal service is not fair service: who asks for little and gets all of it has lost nothing to who
asks for much. Service is therefore judged against the weighted max-min share of what was there to give.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping


def jain(values: Iterable[float]) -> float:
    """Jain's index of ``values``: 1 when all are equal, 1/n when one has everything; 1 of nothing.

    Jain, Chiu and Hawe, DEC-TR-301, 1984. To judge allocations under unequal demands, give it each allocation
    divided by the fair one, as they do.
    """
    listed = list(values)
    squares = math.fsum(value * value for value in listed)
    if squares == 0.0:
        return 1.0
    return math.fsum(listed) ** 2 / (len(listed) * squares)


def fair_shares(
    demands: Mapping[str, float], weights: Mapping[str, float], capacity: float
) -> dict[str, float]:
    """Weighted max-min shares of ``capacity``: nobody gets more than he demands, and what he leaves goes to the rest.

    ``weights`` names everyone in ``demands`` and is positive.
    """
    shares: dict[str, float] = {}
    left, weight_left = capacity, math.fsum(weights[name] for name in demands)
    for name in sorted(demands, key=lambda name: demands[name] / weights[name]):
        share = min(demands[name], left * min(1.0, weights[name] / weight_left)) if weight_left > 0 else left
        shares[name] = share
        left = max(0.0, left - share)
        weight_left -= weights[name]
    return shares
