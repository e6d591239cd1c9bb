"""Paired comparison of settings: both sides of a pair run the same window, in alternating order.

Only the difference within a pair counts, so common noise cancels. The number of pairs depends on the workload or on the
time, never on the results, so Student's confidence interval is valid.
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

ALPHA = 0.05  # see docs/decisions/tuning.md#statistics-of-headrace-tune

LEAST_PAIRS = 6
"""Minimum number of pairs for an interval, which assumes a normal distribution."""


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
        """Whether the gain is significant."""
        return self.interval.low > 0.0


def judge(
    run: Run,
    goal: Goal,
    present: Settings,
    candidate: Settings,
    windows: Sequence[Sequence[Call]],
    proceed: Callable[[int], bool],
) -> Verdict:
    """Compares two settings in pairs, cycling through the windows, while ``proceed(pairs)`` is true.

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
    """97.5th percentile of Student's t, by expansion around the normal one (error below 0.2 % from 5 degrees on)."""
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
    """The settings with the best mean score; all candidates run a window before the next window begins."""
    totals = [0.0] * len(candidates)
    for number, window in enumerate(windows):
        if number and not proceed():
            break
        order = range(len(candidates))
        for place in order if number % 2 == 0 else reversed(order):
            totals[place] += goal.score(run(candidates[place], window))
    return candidates[max(range(len(candidates)), key=lambda place: totals[place])]
