"""The measured seconds of a step by its number of tokens: a table, and a roofline between its entries.

```
 seconds            .'     between two measured sizes, a step takes as long as the smaller one (reading weights), or
          .-------.'       its share of the larger one's time (arithmetic), whichever is longer
 --------'
 tokens  32      512
```
`StepTimes` is a line through the recent steps, so it is wrong for sizes that the present settings do not produce.
Beyond the largest measured size, each further token costs the slope of that line or the mean per token of that size,
whichever is less.
"""

from __future__ import annotations

import math
from bisect import bisect_left

CELLS_PER_DOUBLING = 2
"""Number of classes of sizes per doubling: each is larger than the one before by the square root of 2."""

NEWEST = 1 / 500
"""Minimum weight of a new observation. A scene of the tuner has thousands of fast steps. With a larger weight, a
machine that was busy during the last of them would make the whole engine seem slow."""

LIMIT = 3.0
"""A step that took longer than this many times its estimate was interrupted, and counts as this many times."""


class StepCurve:
    """The measured seconds of steps, by their number of tokens."""

    def __init__(self) -> None:
        self._cells: dict[int, list[float]] = {}  # by class: observations, mean tokens, mean seconds
        self._points: list[tuple[float, float]] = []  # sorted tokens and seconds; empty: to be rebuilt

    def observe(self, tokens: int, seconds: float) -> None:
        """Observe the duration of a step."""
        number = int(CELLS_PER_DOUBLING * math.log2(tokens))
        cell = self._cells.get(number)
        if cell is None:
            cell = self._cells[number] = [0.0, float(tokens), seconds]
        cell[0] += 1.0
        weight = max(NEWEST, 1.0 / cell[0])
        cell[1] += (tokens - cell[1]) * weight
        # A geometric mean, so that a slow first step soon loses its influence.
        cell[2] *= min(LIMIT, seconds / cell[2]) ** weight
        self._points = []

    def copy(self) -> StepCurve:
        """A copy; another thread may call `observe` meanwhile."""
        made = StepCurve()
        made._cells = {number: list(cell) for number, cell in list(self._cells.items())}
        return made

    @property
    def known(self) -> bool:
        """Whether a step has been observed."""
        return bool(self._cells)

    def seconds(self, tokens: int, slope: float = math.inf) -> float:
        """Seconds of a step of ``tokens`` tokens; at least one step must have been observed.

        ``slope`` is the maximum cost of a token beyond the largest size, in seconds.
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
