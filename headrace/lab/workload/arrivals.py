"""Arrival times of requests, in seconds after the start of a run."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator, Sequence

from headrace.lab.workload.work import Work


def poisson(count: int, rate: float, seed: int, burstiness: float = 1.0) -> list[float]:
    """Arrival times at a mean of ``rate`` per second; an infinite rate means all at once.

    The gaps are gamma-distributed with shape ``burstiness``: 1 is a Poisson process, less is burstier, more is more
    regular. Gaps are scaled so that the last arrival is at its expected time; otherwise the offered load of short runs
    would vary.
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
    """The same work with new arrival times, in order of arrival."""
    return tuple(dataclasses.replace(w, arrival=t) for w, t in zip(work, sorted(times), strict=True))


def gamma_process(rate: float, rng: random.Random, burstiness: float = 1.0) -> Iterator[float]:
    """Endless arrival times at a mean of ``rate`` per second; gaps as in `poisson`."""
    now = 0.0
    while True:
        now += rng.gammavariate(burstiness, 1.0) / (burstiness * rate)
        yield now


def modulated(rate: float, rng: random.Random, ratio: float, stay: float) -> Iterator[float]:
    """A Poisson process that alternates between a calm and a burst state of ``ratio`` times the calm rate.

    Each state lasts ``stay`` seconds in the mean, exponentially distributed, and the overall mean is ``rate`` (a
    two-state Markov-modulated Poisson process).
    """
    calm = 2.0 * rate / (1.0 + ratio)
    now, bursting, until = 0.0, False, rng.expovariate(1.0 / stay)
    while True:
        due = now + rng.expovariate(calm * ratio if bursting else calm)
        if due < until:
            now = due
            yield now
        else:  # memoryless: draw again from the change of state
            now, bursting, until = until, not bursting, until + rng.expovariate(1.0 / stay)


DAY = 86_400.0
DEPTH = 0.7
"""Amplitude of a day's rate relative to its mean; production traces lie between 0.5 and 0.8."""


def diurnal(rate: float, rng: random.Random, peak_hour: float = 15.0, day: float = DAY) -> Iterator[float]:
    """A Poisson process with a daily cycle: a sinusoid around ``rate`` with its peak at ``peak_hour``.

    Time 0 is midnight. Drawn by thinning (Lewis and Shedler, 1979). ``day`` is the length of a day in seconds.
    """
    most = rate * (1.0 + DEPTH)
    now = 0.0
    while True:
        now += rng.expovariate(most)
        hour = 24.0 * now / day
        wanted = rate * (1.0 + DEPTH * math.cos(2.0 * math.pi * (hour - peak_hour) / 24.0))
        if rng.random() * most < wanted:
            yield now
