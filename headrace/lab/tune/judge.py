"""Judging settings in alternating pairs: both sides of a pair run the same window, and the order changes each time.

The difference of a pair is what counts, so noise that both sides share cancels. The interval holds however often it is
looked at (`observe.experiments.evidence`), so judging ends as soon as it is decided.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from headrace.lab.bench.record import Record
from headrace.lab.tune.goal import Goal
from headrace.lab.tune.space import Settings
from headrace.lab.workload.call import Call
from headrace.observe.experiments.evidence import Evidence, Interval

ALPHA = 0.05

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

    @property
    def decided(self) -> bool:
        """Whether more pairs are not needed."""
        return self.better or self.interval.high < 0.0


def judge(
    run: Run,
    goal: Goal,
    present: Settings,
    candidate: Settings,
    windows: Sequence[Sequence[Call]],
    proceed: Callable[[int], bool],
    *,
    stop_early: bool,
) -> Verdict:
    """Compare two settings in pairs over the windows, in turn, as long as ``proceed(pairs)`` allows another pair.

    With ``stop_early`` it ends as soon as it is decided. At least one pair is run.
    """
    evidence, before, after = Evidence(), 0.0, 0.0
    while True:
        window = windows[evidence.count % len(windows)]
        if evidence.count % 2:
            second = goal.value(run(candidate, window))
            first = goal.value(run(present, window))
        else:
            first = goal.value(run(present, window))
            second = goal.value(run(candidate, window))
        evidence.add(second - first)
        before, after = before + first, after + second
        count = evidence.count
        found = Verdict(before / count, after / count, evidence.mean, evidence.interval(ALPHA), count)
        if (stop_early and found.decided) or not proceed(count):
            return found


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
