"""What the linear fit of step times leaves: a table of factors by the number of tokens in the step.

```
 seconds     .---------    kernels compute tokens in tiles, and rows of one token in a way of their own:
        .----'             the truth is a staircase, `StepTimes` a line through it
 -------'
 tokens 1   8   16   32
```
Steps whose rows all have one token and steps with longer rows (drafts, prompts) have one table each. A class of sizes
that has not been seen takes its factor from the nearest smaller one, and the first is assumed to be cheap: it is tried,
and then known. Old observations lose their weight, so what once seemed slow is tried again.
"""

from __future__ import annotations

import math
from bisect import bisect_left

EDGES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""The largest number of tokens of each class; larger steps belong to a last one."""

HOPE = math.log(0.7)
"""The factor assumed for longer rows before any step with them was seen, as a logarithm."""

LIMIT = 1.0
"""An observation moves an estimate by at most this much (a factor of e): a step that was interrupted says little."""

NEWEST = 1 / 16
"""The least weight of a new observation."""

KEPT = 1 - 1 / 4000
"""What an observation of longer rows keeps of its weight at each step."""


class StepResiduals:
    """Factors by which steps took longer than their linear prediction."""

    def __init__(self) -> None:
        self._plain = [_Factor() for _ in range(len(EDGES) + 1)]
        self._longer = [_Factor() for _ in range(len(EDGES) + 1)]
        self._steps = 0

    def observe(self, rows: int, tokens: int, ratio: float) -> None:
        """A step took ``ratio`` times its prediction."""
        self._steps += 1
        table = self._plain if tokens == rows else self._longer
        table[bisect_left(EDGES, tokens)].learn(math.log(ratio), self._steps)

    def plain(self, tokens: int) -> float:
        """The factor of a step of ``tokens`` rows of one token."""
        return math.exp(self._plain[bisect_left(EDGES, tokens)].value)

    def longer(self, tokens: int) -> float:
        """The factor of a step of ``tokens`` tokens, of which some rows have several."""
        at = bisect_left(EDGES, tokens)
        value = HOPE
        for place in range(at, -1, -1):
            factor = self._longer[place]
            if factor.weight:
                trust = factor.weight * KEPT ** (self._steps - factor.seen)
                value = HOPE + (factor.value - HOPE) * trust / (trust + 0.25)
                break
        return math.exp(value)


class _Factor:
    __slots__ = ("seen", "value", "weight")

    def __init__(self) -> None:
        self.value = 0.0
        self.weight = 0.0
        self.seen = 0

    def learn(self, value: float, step: int) -> None:
        self.weight = self.weight * KEPT ** (step - self.seen) + 1
        self.seen = step
        change = max(-LIMIT, min(LIMIT, value - self.value))
        self.value += change * max(NEWEST, 1 / self.weight)
