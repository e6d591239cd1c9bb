"""Corrections of the linear fit of step times: tables by the numbers of rows and tokens of a step.

```
 seconds     .---------    kernels compute tokens in tiles, and rows of one token by another kernel:
        .----'             real step times are a staircase, `StepTimes` is a line through it
 -------'
 tokens 1   8   16   32
```
For steps whose rows all have one token, the table has the ratio to the line. For steps with drafts it has the ratio to
a step of the same rows with one token each. The weight of old observations decays, so that sizes that once seemed slow
are tried again.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

EDGES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Upper bounds of the classes of rows or tokens; larger numbers belong to a last class."""

MAX_CHANGE = 1.0
"""Largest change of a logarithmic estimate by one observation (a factor of e), because a step may be interrupted."""

MIN_NEW_WEIGHT = 1 / 16
"""Minimum weight of a new observation."""

DECAY = 1 - 1 / 4000
"""Factor by which the weight of an observation decays at each step."""

ENOUGH_WEIGHT = 12.0
"""Total weight of observations that is enough to compare a step with drafts with one without."""

SOME_WEIGHT = 4.0
"""Total weight of a few observations."""

MAX_GROWTH = 2
"""A step with drafts may have at most this multiple of the tokens of the largest measured one."""

MIN_DRAFTED = 15  # see docs/decisions/speculative-decoding.md#growth-of-steps-with-drafts
"""Drafted positions that any step may have. The first step with drafts is several times slower than later ones, because
its code is not in the CPU caches. Steps limited to twice its few positions would never seem to pay."""


class VerifyRatio(NamedTuple):
    """Measured steps with drafts: their ``ratio`` to one-token rows, mean ``tokens``, and its ``confidence`` (0 to 1).

    ``larger``: they have more tokens than the requested step, which takes no longer than they do.
    """

    ratio: float
    tokens: float
    confidence: float
    larger: bool = False


class StepResiduals:
    """Ratios learned from observed steps."""

    def __init__(self) -> None:
        self._decode = [_Cell() for _ in range(len(EDGES) + 1)]
        self._verify: dict[int, list[_Cell]] = {}  # by class of rows, then of tokens
        self._steps = 0
        self.revision = 0
        """Increases with each observation of a class of steps with drafts that has few observations."""

    def observe(self, rows: int, tokens: int, ratio: float, expected: float = 1.0) -> None:
        """Observe a step's ``ratio`` to the line (rows of one token), or to a step of the same rows without drafts.

        The first estimate of a class starts at the ``expected`` ratio, because it changes by `MAX_CHANGE` at most.
        """
        self._steps += 1
        at = bisect_left(EDGES, tokens)
        if tokens == rows:
            cells = self._decode
        else:
            cells = self._verify.setdefault(bisect_left(EDGES, rows), [])
            if not cells:
                cells += [_Cell() for _ in range(len(EDGES) + 1)]
            self.revision += cells[at].weight < SOME_WEIGHT
        if not cells[at].weight and tokens > rows:
            cells[at].value = math.log(min(expected, ratio))
        cells[at].learn(math.log(ratio), tokens, self._steps)

    def decode_ratio(self, rows: int) -> float:
        """The ratio of a step of ``rows`` rows of one token to the line."""
        return math.exp(self._decode[bisect_left(EDGES, rows)].value)

    def is_measured(self, rows: int) -> bool:
        """Whether enough steps of this class of rows, with one token each, have been observed lately."""
        cell = self._decode[bisect_left(EDGES, rows)]
        return cell.weight * DECAY ** (self._steps - cell.seen) >= ENOUGH_WEIGHT

    def max_drafted(self, rows: int) -> int:
        """Maximum number of drafted positions of a step of ``rows`` rows: few more than have been measured."""
        cells = self._verify.get(bisect_left(EDGES, rows), ())
        known = max([rows, *(cell.tokens for cell in cells if cell.weight)])
        return max(MIN_DRAFTED, int(MAX_GROWTH * known) - rows)

    def line_changed(self, line: Callable[[float], float], before: Sequence[float]) -> None:
        """Adapt the ratios to a refitted line, so that the estimated seconds stay the same.

        ``before`` are the `line_seconds` of the old line.
        """
        for cell, was, now in zip(self._decode, before, self.line_seconds(line), strict=True):
            if was > 0 and now > 0:
                cell.value += math.log(was / now)

    def line_seconds(self, line: Callable[[float], float]) -> list[float]:
        """The seconds of the line for the observed steps of one-token rows, by class of rows; 0 without any."""
        return [line(cell.tokens) if cell.weight else 0.0 for cell in self._decode]

    def verify_ratio(self, rows: int, tokens: int) -> VerifyRatio | None:
        """The nearest measured class of steps with drafts: of as many rows and at most as many tokens, or else of more.

        None if no step with drafts of so many rows was observed.
        """
        cells = self._verify.get(bisect_left(EDGES, rows))
        if cells is None:
            return None
        middle = bisect_left(EDGES, tokens)
        for at in (*range(middle, -1, -1), *range(middle + 1, len(cells))):
            cell = cells[at]
            if cell.weight:
                weight = cell.weight * DECAY ** (self._steps - cell.seen)
                # More tokens do not take less time. A single observation of them is not enough to say so.
                known = [other.value for other in cells[at + 1 :] if other.weight >= SOME_WEIGHT]
                value = min([cell.value, *known])
                return VerifyRatio(math.exp(value), cell.tokens, weight / (weight + 0.25), at > middle)
        return None


class _Cell:
    __slots__ = ("seen", "tokens", "value", "weight")

    def __init__(self) -> None:
        self.value = 0.0
        self.tokens = 0.0
        self.weight = 0.0
        self.seen = 0

    def learn(self, value: float, tokens: int, step: int) -> None:
        self.weight = self.weight * DECAY ** (step - self.seen) + 1
        self.seen = step
        rate = max(MIN_NEW_WEIGHT, 1 / self.weight)
        change = value - self.value
        self.value += max(-MAX_CHANGE, min(MAX_CHANGE, change)) * rate
        self.tokens += (tokens - self.tokens) * rate
