"""Fairness of service between tenants: weighted max-min shares, and Jain's index over them.

Demands differ, so equal service is not fair service: a tenant that demands little and gets all of it has lost nothing
to one that demands much. Service is therefore compared with the weighted max-min share of the capacity.
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
    """Weighted max-min shares of ``capacity``: no tenant gets more than its demand; what it leaves goes to the rest.

    ``weights`` has a positive entry for each name in ``demands``.
    """
    shares: dict[str, float] = {}
    left, weight_left = capacity, math.fsum(weights[name] for name in demands)
    for name in sorted(demands, key=lambda name: demands[name] / weights[name]):
        share = min(demands[name], left * min(1.0, weights[name] / weight_left)) if weight_left > 0 else left
        shares[name] = share
        left = max(0.0, left - share)
        weight_left -= weights[name]
    return shares
