"""Judging settings in alternating pairs: both sides of a pair run the same window, and the order changes each time.

The difference of a pair is what counts, so noise that both sides share cancels. The number of pairs follows from the
workload or from the time, never from the results, so Student's interval holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist, fmean, stdev
from typing import NamedTuple

from headrace.lab.bench.record import Record
from headrace.lab.tune.goal import Goal
from headrace.lab.tune.space import Settings
from headrace.lab.workload.call import Call

ALPHA = 0.05

LEAST_PAIRS = 6
"""Fewer pairs give no interval: a normal distribution is an assumption."""


class Interval(NamedTuple):
    """A 95 % confidence interval of the gain."""

    low: float
    high: float


Run = Callable[[Settings, Sequence[Call]], Sequence[Record]]
"""Runs a window with these settings."""


class Verdict(NamedTuple):
    """The mean values of both sides, the mean gain, its 95 % interval, and the number of pairs."""

    present: float
    candidate: float
    gain: float
    interval: Interval
    pairs: int

    @property
    def better(self) -> bool:
        """Whether the gain is above the noise."""
        return self.interval.low > 0.0


def judge(
    run: Run,
    goal: Goal,
    present: Settings,
    candidate: Settings,
    windows: Sequence[Sequence[Call]],
    proceed: Callable[[int], bool],
) -> Verdict:
    """Compare two settings in pairs over the windows, in turn, as long as ``proceed(pairs)`` allows another pair.

    At least one pair is run.
    """
    first: list[float] = []
    second: list[float] = []
    while not first or proceed(len(first)):
        window = windows[len(first) % len(windows)]
        sides = [(present, first), (candidate, second)]
        for settings, values in sides if len(first) % 2 == 0 else reversed(sides):
            values.append(goal.value(run(settings, window)))
    differences = [after - before for before, after in zip(first, second, strict=True)]
    return Verdict(fmean(first), fmean(second), fmean(differences), interval(differences), len(differences))


def interval(differences: Sequence[float]) -> Interval:
    """Student's 95 % interval of the mean difference; infinite with fewer than `LEAST_PAIRS`."""
    count = len(differences)
    if count < LEAST_PAIRS:
        return Interval(-math.inf, math.inf)
    mean, half = fmean(differences), _student(count - 1) * stdev(differences) / math.sqrt(count)
    return Interval(mean - half, mean + half)


def _student(freedom: int) -> float:
    """The 97.5th percentile of Student's t, by its expansion around the normal one (within 0.2 % from 5 degrees on)."""
    z, v = NormalDist().inv_cdf(1 - ALPHA / 2), freedom
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return sum(term / float(v) ** power for power, term in enumerate(terms))


def select(
    run: Run,
    goal: Goal,
    candidates: Sequence[Settings],
    windows: Sequence[Sequence[Call]],
    proceed: Callable[[], bool],
) -> Settings:
    """The settings with the best mean score over the windows, each of which all of them run before the next begins."""
    totals = [0.0] * len(candidates)
    for number, window in enumerate(windows):
        if number and not proceed():
            break
        order = range(len(candidates))
        for place in order if number % 2 == 0 else reversed(order):
            totals[place] += goal.score(run(candidates[place], window))
    return candidates[max(range(len(candidates)), key=lambda place: totals[place])]
