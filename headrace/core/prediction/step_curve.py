"""The measured seconds of a step by its number of tokens: a table, and a roofline between its entries.

```
 seconds            .'     between two measured sizes, a step takes as long as the smaller one (reading weights), or
          .-------.'       its share of the larger one's time (arithmetic), whichever is longer
 --------'
 tokens  32      512
```
The line of `StepTimes` is fitted to the recent steps, so it is wrong for sizes that the present settings do not make.
Under load every step is mixed, and the line through mixed steps says that decoding takes almost no time. The table
remembers all sizes. Attention to earlier positions is kept apart: each costs what the line says. Beyond the largest
measured size, each further token costs the slope of that line or the mean per token of that size, whichever is less. A
step of one token takes what the line says, at most as long as the smallest size, until it has been measured: otherwise
a deadline would be rejected, or decoding slowed down by prompts, only because no small step has run yet.
"""

from __future__ import annotations

import math
from bisect import bisect_left

from headrace.core.prediction.step_cost import longest_row

CELLS_PER_DOUBLING = 2
"""Number of classes of sizes per doubling: each is larger than the one before by the square root of 2."""

NEWEST = 1 / 500
"""Minimum weight of a new observation. A scene of the tuner has thousands of fast steps. With a larger weight, a
machine that was busy during the last of them would make the whole engine seem slow."""

LIMIT = 3.0
"""A step that took longer than this many times its estimate was interrupted, and counts as this many times."""

FEW = 8
"""Number of observations of a size from which on its steps show the machine's pace."""

PACE_MEMORY = 32
"""Steps over which the pace is averaged."""

LEAST_REST = 0.1
"""Minimum share of a step's time that is not attention, because the line's cost of a position is not exact."""


class _Cell:
    """Steps of about one size: their number, and their means."""

    __slots__ = ("contexts", "seconds", "steps", "tokens")

    def __init__(self, tokens: float, contexts: float, seconds: float, steps: int = 0) -> None:
        self.tokens, self.contexts, self.seconds, self.steps = tokens, contexts, seconds, steps

    def add(self, tokens: int, contexts: int, seconds: float) -> None:
        self.steps += 1
        weight = max(NEWEST, 1 / self.steps)
        self.tokens += (tokens - self.tokens) * weight
        self.contexts += (contexts - self.contexts) * weight
        # A geometric mean: a first step that was slow is soon forgotten.
        self.seconds *= min(LIMIT, seconds / self.seconds) ** weight


class StepCurve:
    """The measured seconds of steps, by their number of tokens; before the first one, what the ``line`` says.

    ``line`` is the seconds per step, token, and position attended to. ``contexts`` are as in `StepTimes`.
    """

    def __init__(self, line: tuple[float, float, float] = (0.0, math.inf, 0.0)) -> None:
        self._cells: dict[int, _Cell] = {}  # by class
        # Tokens, and seconds without attention; empty: to be rebuilt.
        self._points: list[tuple[float, float]] = []
        self._fixed, self._token, self._context = line
        self._pace = 1.0  # recent seconds of a step, relative to the table

    def observe(self, tokens: int, contexts: int, seconds: float) -> None:
        """Observe the duration of a step."""
        number = int(CELLS_PER_DOUBLING * math.log2(tokens))
        cell = self._cells.get(number)
        if cell is None:
            cell = self._cells[number] = _Cell(tokens, contexts, seconds)
        if cell.steps >= FEW:
            ratio = seconds / self.seconds(tokens, contexts)
            self._pace *= min(LIMIT, max(1 / LIMIT, ratio)) ** (1 / PACE_MEMORY)
        else:
            self._points = []
        cell.add(tokens, contexts, seconds)

    def line_changed(self, line: tuple[float, float, float]) -> None:
        """Take over a new ``line``."""
        self._fixed, self._token, self._context = line
        self._points = []

    def copy(self) -> StepCurve:
        """A copy at the usual pace; another thread may call `observe` meanwhile."""
        made = StepCurve((self._fixed, self._token, self._context))
        made._cells = {
            number: _Cell(cell.tokens, cell.contexts, cell.seconds, cell.steps)
            for number, cell in list(self._cells.items())
        }
        return made

    def seconds(self, tokens: int, contexts: int = 0) -> float:
        """Seconds of a step of ``tokens`` tokens."""
        points = self._points or self._make_points()
        at = bisect_left(points, (tokens, 0.0))
        if at == len(points):
            size, larger = points[-1]
            rest = larger + self._slope_beyond(size, larger) * (tokens - size)
        elif at:
            size, larger = points[at]
            rest = max(larger * tokens / size, points[at - 1][1])
        else:
            rest = points[0][1]
        return self._pace * rest + self._context * contexts

    def longest(self, start: int, seconds: float, tokens: int = 0, contexts: int = 0) -> int:
        """The longest row from position ``start`` that keeps a step with ``tokens`` others within ``seconds``.

        0 if not even a row of no tokens fits.
        """
        if seconds < self.seconds(tokens, contexts):
            return 0
        points = self._points or self._make_points()
        left, context = (seconds - self._context * contexts) / self._pace, self._context / self._pace
        at, fits = bisect_left(points, (tokens, math.inf)), 0
        smaller = points[max(0, at - 1)][1]
        for size, larger in points[at:]:
            length = size - tokens
            if larger + context * length * (start + length / 2) > left:
                slope = larger / size
                within = min(
                    longest_row(left - slope * tokens, slope + context * start, context),
                    longest_row(left - smaller, context * start, context),
                    int(length),
                )
                return max(fits, within)
            fits, smaller = int(length), larger
        size, larger = points[-1]
        slope = self._slope_beyond(size, larger)
        return max(
            fits, longest_row(left - larger + slope * (size - tokens), slope + context * start, context)
        )

    def _slope_beyond(self, tokens: float, seconds: float) -> float:
        """Seconds of each token beyond the largest size, which has ``tokens`` and takes ``seconds``."""
        slope = self._token / self._pace
        return min(slope, seconds / tokens) if tokens else slope

    def _make_points(self) -> list[tuple[float, float]]:
        """The table without attention, in which a size takes at most as long as a larger one."""
        if not self._cells:
            return [(0.0, self._fixed)]
        least = math.inf
        for number in sorted(self._cells, reverse=True):
            cell = self._cells[number]
            rest = cell.seconds - self._context / self._pace * cell.contexts
            least = min(least, max(rest, LEAST_REST * cell.seconds))
            self._points.append((cell.tokens, least))
        if cell.tokens > 1:
            self._points.append((1.0, min(least, (self._fixed + self._token) / self._pace)))
        self._points.reverse()
        return self._points
