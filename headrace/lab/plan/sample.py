"""Simulation of large fleets by a sample of their replicas, and the sampling error of a simulated share.

Of a fleet of equal replicas, `CELL` are simulated behind the router, with their share of the arrivals. The time of a
simulation then depends on the number of requests, not of replicas. A router over the whole fleet has more choice and is
not worse, so the figures are conservative.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

CELL = 8
"""Maximum number of simulated replicas."""

BATCHES = 10
"""Number of batches for the method of batch means. Requests within a batch are correlated: they share a queue."""

STUDENT = 2.262
"""The 97.5 % quantile of Student's t distribution with `BATCHES` - 1 degrees of freedom."""


def simulated_replicas(replicas: int) -> int:
    """Number of replicas of a fleet that are simulated."""
    return min(replicas, CELL)


def error_bound(met: Sequence[bool]) -> float:
    """Half the width of the 95 % confidence interval of the share of requests that met a target (batch means).

    ``met`` has a value per request, in order of arrival. The result is infinite with fewer than `BATCHES` requests.
    """
    size = len(met) // BATCHES
    if not size:
        return math.inf
    shares = [sum(met[i * size : (i + 1) * size]) / size for i in range(BATCHES)]
    mean = sum(shares) / BATCHES
    variance = sum((share - mean) ** 2 for share in shares) / (BATCHES - 1)
    return STUDENT * math.sqrt(variance / BATCHES)
