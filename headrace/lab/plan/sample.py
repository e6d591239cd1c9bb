"""Large fleets from a sample of their replicas, and the sampling error of a simulated share.

A fleet of thousands of equal replicas is simulated as `CELL` of them behind the router, with that share of the
arrivals. So a fleet of any size takes the time of its requests, and not of its replicas. A router over the whole fleet
has more replicas to choose from and is not worse, so the figures err on the safe side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

CELL = 8
"""Replicas that are simulated of a fleet that has more."""

BATCHES = 10
"""Stretches of a run whose means are compared. Requests of one stretch depend on each other: they share its queue."""

STUDENT = 2.262
"""The 97.5 % quantile of Student's t distribution with `BATCHES` - 1 degrees of freedom."""


def simulated_replicas(replicas: int) -> int:
    """How many replicas of a fleet are simulated."""
    return min(replicas, CELL)


def error_bound(met: Sequence[bool]) -> float:
    """Half the width of the 95 % confidence interval of the share of requests that met a target.

    ``met`` are the requests in order of arrival (method of batch means). Infinite if there are fewer than `BATCHES`.
    """
    size = len(met) // BATCHES
    if not size:
        return math.inf
    shares = [sum(met[i * size : (i + 1) * size]) / size for i in range(BATCHES)]
    mean = sum(shares) / BATCHES
    variance = sum((share - mean) ** 2 for share in shares) / (BATCHES - 1)
    return STUDENT * math.sqrt(variance / BATCHES)
