"""When requests come: arrival times in seconds after the start of a run."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence

from headrace.lab.workload.work import Work


def poisson(count: int, rate: float, seed: int, burstiness: float = 1.0) -> list[float]:
    """Arrival times at a mean of ``rate`` per second; an infinite rate means all at once.

    The gaps are gamma-distributed with shape ``burstiness``: 1 is a Poisson process, below 1 comes in
    bursts, above 1 is more regular. Gaps are scaled so that the last arrival is at its expected time, which
    takes the luck of the draw out of a short run's offered load.
    """
    if math.isinf(rate):
        return [0.0] * count
    rng = random.Random(seed)
    gaps = [rng.gammavariate(burstiness, 1.0) for _ in range(count)]
    scale = count / rate / sum(gaps) if count else 0.0
    times, now = [], 0.0
    for gap in gaps:
        now += gap * scale
        times.append(now)
    return times


def arriving(work: Sequence[Work], times: Sequence[float]) -> tuple[Work, ...]:
    """The same work at other times, in order of arrival."""
    return tuple(dataclasses.replace(w, arrival=t) for w, t in zip(work, sorted(times), strict=True))
