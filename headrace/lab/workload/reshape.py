"""Transformations of a trace: speedup, and resampling to another number of calls."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence

from headrace.lab.workload.call import Call

RUN_CALLS = 64
"""Block size of the block bootstrap in calls; blocks preserve bursts."""


def speedup(calls: Iterable[Call], factor: float) -> Iterator[Call]:
    """The calls with arrival times divided by ``factor``.

    Raises:
        ValueError: the factor is not above 0.
    """
    if not factor > 0:
        raise ValueError(f"--speedup: expected a number above 0, got {factor:g}")
    return (call._replace(arrival=call.arrival / factor) for call in calls)


def resampled(calls: Sequence[Call], count: int, seed: int = 0) -> Iterator[Call]:
    """``count`` calls drawn with replacement in blocks of `RUN_CALLS` neighbours (block bootstrap).

    A call keeps its gap to the call before it in the trace, and its content: drawn twice, it has the same tokens.

    Raises:
        ValueError: the trace has no calls.
    """
    if not calls:
        raise ValueError("--resample: the trace has no requests")
    return _runs(calls, count, random.Random(seed))


def _runs(calls: Sequence[Call], count: int, rng: random.Random) -> Iterator[Call]:
    now: float | None = None
    for start in range(0, count, RUN_CALLS):
        at = rng.randrange(len(calls))
        for i in range(at, at + min(RUN_CALLS, count - start)):
            before, call = calls[(i - 1) % len(calls)], calls[i % len(calls)]
            now = 0.0 if now is None else now + max(0.0, call.arrival - before.arrival)
            yield call._replace(arrival=now)
