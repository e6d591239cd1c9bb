"""Bound of a workload: the maximum gain of continuous batching over static batching.

Only output lengths matter: if all outputs are equally long, no scheduler can gain anything.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass


def _constant(rows: int) -> float:
    return 1.0


@dataclass(frozen=True, slots=True)
class Bound:
    """Time to decode a workload, in units of the step cost (default: in steps).

    ``static`` waits for each batch's longest output; rows of finished outputs are empty. ``padded`` is the same, but
    finished rows are still computed (padded ``generate``). ``refilled`` gives a free row to the next request at once.
    ``floor`` is a lower bound for any order of the requests.
    """

    static: float
    padded: float
    refilled: float
    floor: float

    @property
    def gain(self) -> float:
        """Speedup of refilling in order of arrival over static batching."""
        return self.static / self.refilled

    @property
    def most(self) -> float:
        """Upper bound of the speedup of any scheduler over static batching."""
        return self.static / self.floor


def bound(
    lengths: Sequence[int],
    batch: int,
    step_cost: Callable[[int], float] = _constant,
    refill: int | None = None,
) -> Bound:
    """The bound of these output lengths for a static batch of ``batch`` rows.

    ``step_cost`` gives the cost of a decode step by its number of rows. By default every step costs 1, which holds if
    reading the weights dominates. ``refill`` is the number of rows for continuous batching (default: ``batch``).

    Raises:
        ValueError: no lengths, a length below 1, or a batch below 1.
    """
    rows = batch if refill is None else refill
    if not lengths or min(lengths) < 1 or batch < 1 or rows < 1:
        raise ValueError("bound needs at least one length, and lengths and batch sizes of at least 1")
    groups = [lengths[i : i + batch] for i in range(0, len(lengths), batch)]
    cheapest = min(step_cost(n) / n for n in range(1, rows + 1))
    return Bound(
        static=sum(_decode(group, step_cost) for group in groups),
        padded=sum(max(group) * step_cost(len(group)) for group in groups),
        refilled=_refill(lengths, rows, step_cost),
        floor=max(
            max(lengths) * step_cost(1),
            math.fsum(lengths) * cheapest,
            _ceil_steps(lengths, rows) * step_cost(1),
        ),
    )


def _ceil_steps(lengths: Sequence[int], rows: int) -> int:
    return -(-sum(lengths) // rows)


def _decode(group: Sequence[int], step_cost: Callable[[int], float]) -> float:
    """Cost of decoding one group, in which finished rows leave."""
    cost, done = 0.0, 0
    ordered = sorted(group)
    for i, length in enumerate(ordered):
        cost += (length - done) * step_cost(len(ordered) - i)
        done = length
    return cost


def _refill(lengths: Sequence[int], rows: int, step_cost: Callable[[int], float]) -> float:
    """Cost of decoding when every free row takes the next length in order."""
    ends: list[int] = []
    cost, step = 0.0, 0
    for length in lengths:
        heapq.heappush(ends, step + length)
        if len(ends) < rows:
            continue
        cost += (ends[0] - step) * step_cost(len(ends))
        step = heapq.heappop(ends)
    while ends:
        cost += (ends[0] - step) * step_cost(len(ends))
        step = heapq.heappop(ends)
    return cost
