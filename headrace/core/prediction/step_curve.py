"""The measured seconds of a step by its number of tokens: a table, and a roofline between its entries.

```
 seconds            .'     between two measured sizes, a step takes as long as the smaller one (reading weights), or
          .-------.'       its share of the larger one's time (arithmetic), whichever is longer
 --------'
 tokens  32      512
```
`StepTimes` is a line through the recent steps, so it is wrong about sizes that the present settings do not make. Beyond
the largest measured size it is all that is known: a token costs its slope, or the share of that size if it is less.
"""

from __future__ import annotations

import math
from bisect import bisect_left

CELLS_PER_DOUBLING = 2
"""Classes of sizes: each is larger than the one before by the square root of 2."""

NEWEST = 1 / 500
"""The least weight of a new observation. A scene of the tuner has thousands of fast steps: with a shorter memory, a
machine that was busy in the last of them would be taken for the engine's pace in all."""

LIMIT = 3.0
"""A step that took this many times its estimate, or longer, counts as this: it was interrupted."""


class StepCurve:
    """Learns from observed steps."""

    def __init__(self) -> None:
        self._cells: dict[int, list[float]] = {}  # by class: observations, mean tokens, mean seconds
        self._points: list[tuple[float, float]] = []  # tokens and seconds in order; empty: to be made

    def observe(self, tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long."""
        number = int(CELLS_PER_DOUBLING * math.log2(tokens))
        cell = self._cells.get(number)
        if cell is None:
            cell = self._cells[number] = [0.0, float(tokens), seconds]
        cell[0] += 1.0
        weight = max(NEWEST, 1.0 / cell[0])
        cell[1] += (tokens - cell[1]) * weight
        # A geometric mean: a first step that was slow is soon forgotten.
        cell[2] *= min(LIMIT, seconds / cell[2]) ** weight
        self._points = []

    def copy(self) -> StepCurve:
        """What has been learned; another thread may observe meanwhile."""
        made = StepCurve()
        made._cells = {number: list(cell) for number, cell in list(self._cells.items())}
        return made

    @property
    def known(self) -> bool:
        """Whether a step has been observed."""
        return bool(self._cells)

    def seconds(self, tokens: int, slope: float = math.inf) -> float:
        """Seconds of a step of so many tokens; at least one step must have been observed.

        ``slope`` is what a token costs beyond the largest size, at most.
        """
        points = self._points
        if not points:
            points = self._points = sorted((cell[1], cell[2]) for cell in self._cells.values())
        at = bisect_left(points, (tokens, 0.0))
        if at == len(points):
            last, seconds = points[-1]
            return seconds + min(seconds / last, slope) * (tokens - last)
        size, seconds = points[at]
        share = seconds * tokens / size
        return max(share, min(seconds, points[at - 1][1])) if at else max(share, seconds)
