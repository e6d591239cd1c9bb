"""The trials of a sweep: values of three axes under each batching policy, coarse ones first, within a time budget."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple

from headrace.lab.bench.report import Run

GENERATIONS = 4
"""Requests of a trial per request that runs at once. All trials have the same share of start and end in them."""

LEAST_REQUESTS = 16
"""Requests of a trial at least."""


class Axis(StrEnum):
    """What is varied: slots of the engine with everything waiting; open requests of a closed loop; tokens of a step."""

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
    """How many requests a trial runs, on an engine that otherwise has so many ``slots``."""
    at_once = slots if trial.axis is Axis.CHUNK else trial.value
    return max(LEAST_REQUESTS, GENERATIONS * at_once)


def plan(values: Mapping[Axis, Sequence[int]], policies: Sequence[str]) -> list[Trial]:
    """All trials, so ordered that an early end leaves a coarse picture of every axis."""
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
    """The smallest and the largest value, then the middle between them, then the middles of the halves, and so on."""
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
    """The runs of each trial, in rounds that go through the trials forwards and backwards in turn.

    No trial begins when the budget is spent; the first one always runs. Trials without a run are left out.
    """
    began = clock()
    done: dict[Trial, list[Run]] = {}
    for number in range(rounds):
        for trial in trials if number % 2 == 0 else reversed(trials):
            if done and clock() - began >= budget_seconds:
                return done
            done.setdefault(trial, []).append(run(trial))
    return done
