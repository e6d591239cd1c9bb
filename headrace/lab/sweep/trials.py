"""The trials of a sweep: values of three axes under each batching policy, coarse ones first, within a time budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from headrace.lab.bench.report import Run

GENERATIONS = 4
"""Requests of a trial per concurrent request, so that ramp-up and drain have the same share in all trials."""

LEAST_REQUESTS = 16
"""Minimum number of requests of a trial."""


class Axis(StrEnum):
    """The varied setting: engine slots with all requests waiting, open requests of a closed loop, tokens per step."""

    BATCH = "batch-size"
    CONCURRENCY = "concurrency"
    CHUNK = "chunk-size"

    @property
    def words(self) -> str:
        """The name in tables and sentences."""
        return self.value.replace("-", " ")


class Trial(NamedTuple):
    """One value of one axis under one policy, ``continuous`` or ``static``."""

    axis: Axis
    value: int
    policy: str


def requests_of(trial: Trial, slots: int) -> int:
    """Number of requests of a trial; ``slots`` are those of the engine in trials of another axis."""
    at_once = slots if trial.axis is Axis.CHUNK else trial.value
    return max(LEAST_REQUESTS, GENERATIONS * at_once)


def plan(values: Mapping[Axis, Sequence[int]], policies: Sequence[str]) -> list[Trial]:
    """All trials, ordered so that an early end leaves coarse results for every axis."""
    orders = {axis: coarse_first(each) for axis, each in values.items()}
    longest = max(map(len, orders.values()), default=0)
    return [
        Trial(axis, order[place], policy)
        for place in range(longest)
        for axis, order in orders.items()
        if place < len(order)
        for policy in policies
    ]


def coarse_first(values: Sequence[int]) -> list[int]:
    """The values in the order of a bisection: smallest, largest, the middle, then the middles of the halves."""
    ordered = sorted(set(values))
    if len(ordered) < 3:
        return ordered
    found, spans = [ordered[0], ordered[-1]], [(0, len(ordered) - 1)]
    while spans:
        low, high = spans.pop(0)
        if high - low > 1:
            middle = (low + high) // 2
            found.append(ordered[middle])
            spans += [(low, middle), (middle, high)]
    return found


def sweep(
    trials: Sequence[Trial],
    run: Callable[[Trial], Run],
    rounds: int,
    budget_seconds: float,
    clock: Callable[[], float],
) -> dict[Trial, list[Run]]:
    """The runs of each trial; every second round runs the trials in reverse order.

    No trial begins after the budget is spent, except the first one. Trials without a run are omitted.
    """
    began = clock()
    done: dict[Trial, list[Run]] = {}
    for number in range(rounds):
        for trial in trials if number % 2 == 0 else reversed(trials):
            if done and clock() - began >= budget_seconds:
                return done
            done.setdefault(trial, []).append(run(trial))
    return done
