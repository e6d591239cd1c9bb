"""The measured seconds of a step by its number of tokens: a table, and a roofline between its entries.

```
 seconds            .'     between two measured sizes, a step takes as long as the smaller one (reading weights), or
          .-------.'       its share of the larger one's time (arithmetic), whichever is longer
 --------'
 tokens  32      512
```
The line of `StepTimes` is fitted to the recent steps, so it is wrong for sizes that the present settings do not make.
Under load every step is mixed, and the line through mixed steps says that decoding takes almost no time. The table
remembers all sizes. Beyond the largest measured size, each further token costs the slope of that line or the mean per
token of that size, whichever is less. A step of one token takes what the line says, at most as long as the smallest
size, until it has been measured: otherwise a deadline would be rejected, or decoding slowed down by prompts, only
because no small step has run yet.

Attention to earlier positions is kept apart. Each size has its own cost of a position, because decoding reads the keys
and values of each one, while the tokens of a chunk share that and cost arithmetic, an order of magnitude less. It is
the slope of the seconds over the positions, among steps of this size and at equal tokens. Until these differ enough, it
is the arithmetic of attention, as a share of that of a token.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from typing import NamedTuple

# `StepCost`: the relative cost of a step in tokens, known before the first step has run.


class StepCost(NamedTuple):
    """The relative cost of a step.

    ``fixed_tokens`` is the cost of a step without any row. ``context_tokens`` is the context at which a token's
    attention costs as much as the rest of it.
    """

    fixed_tokens: float = 0.0
    context_tokens: float = math.inf

    def rows(self, tokens: int, contexts: int) -> float:
        """The cost of rows with ``tokens`` tokens, the sum of whose contexts is ``contexts``."""
        return tokens + contexts / self.context_tokens

    def longest(self, start: int, budget: float) -> int:
        """The longest row from position ``start`` that costs at most ``budget``.

        Solves ``length * (1 + (start + length / 2) / context_tokens) = budget``.
        """
        return longest_row(budget, 1 + start / self.context_tokens, 1 / self.context_tokens)


def longest_row(budget: float, token: float, context: float) -> int:
    """The largest n with ``token * n + context / 2 * n ** 2 <= budget``; unbounded if tokens cost nothing."""
    if budget <= 0:
        return 0
    if budget == math.inf:
        return sys.maxsize
    # in the form that has no difference of almost equal numbers
    divisor = token + math.sqrt(token * token + 2 * context * budget)
    return int(2 * budget / divisor) if divisor > 0 else sys.maxsize


TOKENS_ONLY = StepCost()
"""Every token costs the same, and a step has no fixed cost."""


CELLS_PER_DOUBLING = 2
"""Number of classes of sizes per doubling: each is larger than the one before by the square root of 2."""

NEWEST = 1 / 500  # see docs/decisions/tuning.md#accuracy-of-rehearsals
"""Minimum weight of a new observation. A period of the tuner has thousands of fast steps. With a larger weight, a
machine that was busy during the last of them would make the whole engine seem slow."""

LIMIT = 3.0
"""A step that took longer than this many times its estimate was interrupted, and counts as this many times."""

FEW = 8
"""Number of observations of a size from which on its steps show the machine's pace, and its time is its own."""

PACE_MEMORY = 32
"""Steps over which the pace is averaged."""

LEAST_REST = 0.1  # see docs/decisions/scheduling.md#step-times-for-dividing-prompts
"""Minimum share of a step's time that is not attention, because the cost of a position is not exact."""

ASSUMED = 8
"""Weight of the assumed cost of a position, in steps whose positions differ by as much as their mean."""


@dataclass(slots=True)
class Cell:
    """Steps of about one size: their number, and the means and covariances of their tokens, contexts and seconds."""

    tokens: float
    contexts: float
    seconds: float
    steps: int = 0
    tokens_squared: float = 0.0
    contexts_squared: float = 0.0
    token_contexts: float = 0.0
    token_seconds: float = 0.0
    contexts_seconds: float = 0.0

    def add(self, tokens: int, contexts: int, seconds: float) -> None:
        """Count one step."""
        self.steps += 1
        weight = max(NEWEST, 1 / self.steps)
        kept, by_tokens, by_contexts = 1 - weight, tokens - self.tokens, contexts - self.contexts
        ratio = min(LIMIT, seconds / self.seconds)
        later = weight * (ratio - 1) * self.seconds
        self.tokens_squared = kept * (self.tokens_squared + weight * by_tokens * by_tokens)
        self.contexts_squared = kept * (self.contexts_squared + weight * by_contexts * by_contexts)
        self.token_contexts = kept * (self.token_contexts + weight * by_tokens * by_contexts)
        self.token_seconds = kept * (self.token_seconds + by_tokens * later)
        self.contexts_seconds = kept * (self.contexts_seconds + by_contexts * later)
        self.tokens += by_tokens * weight
        self.contexts += by_contexts * weight
        # A geometric mean: a first step that was slow is soon forgotten.
        self.seconds *= ratio**weight

    def position(self, assumed: float) -> float:
        """Seconds per position attended to: a regression within the size, drawn towards what is ``assumed``."""
        if not self.contexts:
            return assumed
        squared, product = self.contexts_squared, self.contexts_seconds
        if self.tokens_squared:
            share = self.token_contexts / self.tokens_squared
            squared, product = squared - share * self.token_contexts, product - share * self.token_seconds
        weight = max(ASSUMED * NEWEST, ASSUMED / self.steps) * self.contexts * self.contexts
        cost = (product + weight * assumed) / (squared + weight)
        return max(0.0, min(cost, (1 - LEAST_REST) * self.seconds / self.contexts))


class MeasuredSteps(NamedTuple):
    """What a `StepCurve` has measured, as a value that other processes can get: its cells, by class of sizes."""

    line: tuple[float, float, float]
    context_tokens: float
    cells: Mapping[int, Cell]


class StepCurve:
    """The measured seconds of steps, by their number of tokens; before the first one, what the ``line`` says.

    ``line`` is the seconds per step, token, and position attended to. ``context_tokens`` is as in `StepCost`, and
    ``contexts`` are as in `StepTimes`.
    """

    def __init__(
        self, line: tuple[float, float, float] = (0.0, math.inf, 0.0), context_tokens: float = math.inf
    ) -> None:
        self._cells: dict[int, Cell] = {}  # by class
        # Tokens, seconds without attention, and seconds of a position, of each size; empty: to be rebuilt.
        self._points: list[tuple[float, float, float]] = []
        self._fixed, self._token, self._context = line
        self._context_tokens = context_tokens
        self._pace = 1.0  # recent seconds of a step, relative to the table

    def observe(self, tokens: int, contexts: int, seconds: float) -> None:
        """Observe the duration of a step."""
        number = int(CELLS_PER_DOUBLING * math.log2(tokens))
        cell = self._cells.get(number)
        if cell is None:
            cell = self._cells[number] = Cell(tokens, contexts, seconds)
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

    def measured(self) -> MeasuredSteps:
        """What has been measured up to now."""
        line = self._fixed, self._token, self._context
        return MeasuredSteps(line, self._context_tokens, _copies(self._cells))

    @classmethod
    def of(cls, measured: MeasuredSteps) -> StepCurve:
        """The curve of these steps, at their usual pace."""
        made = cls(measured.line, measured.context_tokens)
        made._cells = _copies(measured.cells)
        return made

    def seconds(self, tokens: int, contexts: int = 0) -> float:
        """Seconds of a step of ``tokens`` tokens."""
        points = self._points or self._make_points()
        at = bisect_left(points, (tokens, 0.0, 0.0))
        if at == len(points):
            size, larger, context = points[-1]
            rest = larger + self._slope_beyond(size, larger) * (tokens - size)
        elif at:
            size, larger, context = points[at]
            rest = max(larger * tokens / size, points[at - 1][1])
        else:
            _, rest, context = points[0]
        return self._pace * (rest + context * contexts)

    def longest(self, start: int, seconds: float, tokens: int = 0, contexts: int = 0) -> int:
        """The longest row from position ``start`` that keeps a step with ``tokens`` others within ``seconds``.

        0 if not even a row of no tokens fits.
        """
        if seconds < self.seconds(tokens, contexts):
            return 0
        points, left = self._points or self._make_points(), seconds / self._pace
        at, fits = bisect_left(points, (tokens, math.inf, 0.0)), 0
        smaller = points[max(0, at - 1)][1]
        for size, larger, context in points[at:]:
            length, room = size - tokens, left - context * contexts
            if larger + context * length * (start + length / 2) > room:
                slope = larger / size
                within = min(
                    longest_row(room - slope * tokens, slope + context * start, context),
                    longest_row(room - smaller, context * start, context),
                    int(length),
                )
                return max(fits, within)
            fits, smaller = int(length), larger
        size, larger, context = points[-1]
        slope, room = self._slope_beyond(size, larger), left - context * contexts
        row = longest_row(room - larger + slope * (size - tokens), slope + context * start, context)
        return max(fits, row)

    def _slope_beyond(self, tokens: float, seconds: float) -> float:
        """Seconds of each token beyond the largest size, which has ``tokens`` and takes ``seconds``."""
        slope = self._token / self._pace
        return min(slope, seconds / tokens) if tokens else slope

    def _make_points(self) -> list[tuple[float, float, float]]:
        """The table without attention, in which a size takes at most as long as a larger one."""
        cells = [self._cells[number] for number in sorted(self._cells)]
        if not cells:
            return [(0.0, self._fixed, self._context)]
        assumed = min(cell.seconds / cell.tokens for cell in cells) / self._context_tokens
        positions = [cell.position(assumed) for cell in cells]
        rests = [
            cell.seconds - context * cell.contexts for cell, context in zip(cells, positions, strict=True)
        ]
        least = math.inf
        for at in range(len(cells) - 1, -1, -1):
            least = min(least, rests[at], _between(cells, rests, at))
            self._points.append((cells[at].tokens, least, positions[at]))
        if cells[0].tokens > 1:
            self._points.append((1.0, min(least, (self._fixed + self._token) / self._pace), positions[0]))
        self._points.reverse()
        return self._points


def _copies(cells: Mapping[int, Cell]) -> dict[int, Cell]:
    return {number: copy(cell) for number, cell in cells.items()}


def _between(cells: list[Cell], rests: list[float], at: int) -> float:
    """The most that a size with few observations takes: the line between a smaller and a larger size with as many, or
    the mean per token of the smaller one if there is no larger one.

    Steps whose size seems too slow are avoided, so no later one would show that its first step was slow by chance, such
    as the first one of a server.
    """
    few = cells[at].steps
    if few >= FEW:
        return math.inf
    smaller = next((i for i in range(at - 1, -1, -1) if cells[i].steps >= few), None)
    larger = next((i for i in range(at + 1, len(cells)) if cells[i].steps >= few), None)
    if smaller is None:
        return math.inf
    if larger is None:
        return rests[smaller] * cells[at].tokens / cells[smaller].tokens
    first, last = cells[smaller].tokens, cells[larger].tokens
    share = (cells[at].tokens - first) / (last - first)
    return rests[smaller] + share * (rests[larger] - rests[smaller])
