"""What the linear fit of step times leaves: tables by the numbers of rows and tokens of a step.

```
 seconds     .---------    kernels compute tokens in tiles, and rows of one token in a way of their own:
        .----'             the truth is a staircase, `StepTimes` a line through it
 -------'
 tokens 1   8   16   32
```
Of steps whose rows all have one token, the table has the ratio to the line. Of steps with drafts it has the ratio to a
step of the same rows with one token each. Old observations lose their weight, so that what once seemed slow is tried
again.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

EDGES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""The largest number of each class of rows or tokens; larger ones belong to a last class."""

LIMIT = 1.0
"""An observation moves an estimate by at most this much (a factor of e): a step that was interrupted says little."""

NEWEST = 1 / 16
"""The least weight of a new observation."""

KEPT = 1 - 1 / 4000
"""What an observation keeps of its weight at each step."""


ENOUGH = 12.0
"""The weight of observations that suffice to compare a step with drafts with one without."""

LITTLE = 4.0
"""The weight of a few observations."""


FURTHER = 2
"""A step with drafts may have this multiple of the tokens of the largest known one: how long it takes is a guess."""

ALWAYS = 15
"""Drafted positions that any step may have. The first step with drafts is several times slower than later ones, because
its code is not in the caches. Steps limited to twice its few positions would never be worth that time."""


class Longer(NamedTuple):
    """Known steps with drafts: ``ratio`` to one-token rows, at so many ``tokens``, and the ``trust`` (0 to 1).

    ``larger``: they have more tokens than the step asked for, which takes no longer.
    """

    ratio: float
    tokens: float
    trust: float
    larger: bool = False


class StepResiduals:
    """Ratios learned from observed steps."""

    def __init__(self) -> None:
        self._plain = [_Cell() for _ in range(len(EDGES) + 1)]
        self._longer: dict[int, list[_Cell]] = {}  # by class of rows, then of tokens
        self._steps = 0
        self.news = 0
        """Observations of steps with drafts of which little was known."""

    def observe(self, rows: int, tokens: int, ratio: float, expected: float = 1.0) -> None:
        """A step took ``ratio`` times the line (rows of one token), or a step of the same rows without drafts.

        The first observation counts from the ``expected`` ratio, since it moves an estimate by `LIMIT` at most.
        """
        self._steps += 1
        at = bisect_left(EDGES, tokens)
        if tokens == rows:
            cells = self._plain
        else:
            cells = self._longer.setdefault(bisect_left(EDGES, rows), [])
            if not cells:
                cells += [_Cell() for _ in range(len(EDGES) + 1)]
            self.news += cells[at].weight < LITTLE
        if not cells[at].weight and tokens > rows:
            cells[at].value = math.log(min(expected, ratio))
        cells[at].learn(math.log(ratio), tokens, self._steps)

    def plain(self, rows: int) -> float:
        """The ratio of a step of ``rows`` rows of one token to the line."""
        return math.exp(self._plain[bisect_left(EDGES, rows)].value)

    def knows(self, rows: int) -> bool:
        """Whether steps of as many rows of one token, by class, have been observed often enough, and lately enough."""
        cell = self._plain[bisect_left(EDGES, rows)]
        return cell.weight * KEPT ** (self._steps - cell.seen) >= ENOUGH

    def reach(self, rows: int) -> int:
        """The most drafted positions of a step of ``rows`` rows that is not far beyond the known ones."""
        cells = self._longer.get(bisect_left(EDGES, rows), ())
        known = max([rows, *(cell.tokens for cell in cells if cell.weight)])
        return max(ALWAYS, int(FURTHER * known) - rows)

    def line_moved(self, line: Callable[[float], float], before: Sequence[float]) -> None:
        """The line was refitted and was ``before``, as `of_line` gives it: what was observed stays as it was."""
        for cell, was, now in zip(self._plain, before, self.of_line(line), strict=True):
            if was > 0 and now > 0:
                cell.value += math.log(was / now)

    def of_line(self, line: Callable[[float], float]) -> list[float]:
        """The seconds of the line for the observed steps of one-token rows, by class of rows; 0 without any."""
        return [line(cell.tokens) if cell.weight else 0.0 for cell in self._plain]

    def longer(self, rows: int, tokens: int) -> Longer | None:
        """What is known of the nearest steps with as many rows and at most as many tokens, by class; of those with more
        tokens if there are no others.
        """
        cells = self._longer.get(bisect_left(EDGES, rows))
        if cells is None:
            return None
        middle = bisect_left(EDGES, tokens)
        for at in (*range(middle, -1, -1), *range(middle + 1, len(cells))):
            cell = cells[at]
            if cell.weight:
                weight = cell.weight * KEPT ** (self._steps - cell.seen)
                # More tokens take no less time; a single observation of them says little.
                known = [other.value for other in cells[at + 1 :] if other.weight >= LITTLE]
                value = min([cell.value, *known])
                return Longer(math.exp(value), cell.tokens, weight / (weight + 0.25), at > middle)
        return None


class _Cell:
    __slots__ = ("seen", "tokens", "value", "weight")

    def __init__(self) -> None:
        self.value = 0.0
        self.tokens = 0.0
        self.weight = 0.0
        self.seen = 0

    def learn(self, value: float, tokens: int, step: int) -> None:
        self.weight = self.weight * KEPT ** (step - self.seen) + 1
        self.seen = step
        rate = max(NEWEST, 1 / self.weight)
        change = value - self.value
        self.value += max(-LIMIT, min(LIMIT, change)) * rate
        self.tokens += (tokens - self.tokens) * rate
