"""Whether drafting pays in reality: the measured pace of steps with drafts against steps without, by number of rows.

```
 usual: drafts   d d d d d d d d d d d d d d d d | . . . . . . | d d d d ...     d  step with drafts
                         tokens / second           trial                        .  step without
 usual: none     . . . . . . . . . . . . . . . . | d d d d d d | . . . . ...
```
`DraftBudget` decides by predicted times, and a prediction can be wrong in its form. So now and then the other way is
tried for a few steps, and their pace is compared with that of the steps before. The better way is the usual one from
then on. A trial of the worse way loses time, so the steps between two trials grow with what a trial loses.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from statistics import median

from headrace.core.prediction.step_residuals import EDGES

TRIAL, COLD = 12, 2
"""Steps of a trial that are counted, and those before them that are not: their caches are those of the other way."""

FEW, CLEARLY = 4, 2.0
"""The fewest steps that are compared; after them a trial of a way that is this many times slower ends."""

FIRST, LONGEST = 16, 2048
"""The fewest and the most steps between two trials; a few times more where a trial loses a lot."""

SOON = 128
"""The most steps between the first trial and the second, which replaces it: drafts were still being learned before the
first one, and what they lost would put off the second for thousands of steps.
"""

LOSS = 0.01
"""Share of the time that trials of the worse way may lose."""

GAIN = 1.03
"""Drafting becomes the usual way when it is this much faster; it ends when it is slower."""

NEWEST = 0.4
"""The least weight of a new comparison."""

FARTHEST = 3.0
"""A step counts as at most this multiple of the median, because one that was interrupted says little; and a trial that
loses a lot comes after at most this multiple of `LONGEST` steps."""

MEMORY = 24
"""The last steps of the usual way that a trial is compared with."""

NAP = 16
"""The most steps for which a row is not asked for, because the number of rows may change meanwhile."""


class PaceTrials:
    """By class of rows: whether steps have drafts now, from the pace of the steps that were observed."""

    def __init__(self) -> None:
        self._classes: dict[int, _Class] = {}

    def rest(self, rows: int) -> int:
        """The next steps of so many rows that have no drafts; 0: they may have some."""
        return min(NAP, self._of(rows).rest)

    def drafts_usually(self, rows: int) -> bool:
        """Whether drafting is the faster way, by what is known."""
        return self._of(rows).drafts

    def observed(self, rows: int, drawn: int, seconds: float, drafted: bool) -> None:
        """A step of ``rows`` decode rows drew ``drawn`` tokens in ``seconds``, all work of the host included."""
        if seconds > 0:
            self._of(rows).observed(rows, drawn, seconds, drafted)

    def _of(self, rows: int) -> _Class:
        at = bisect_left(EDGES, rows)
        found = self._classes.get(at)
        if found is None:
            found = self._classes[at] = _Class()
        return found


class _Class:
    """Steps of about as many rows."""

    __slots__ = ("_first", "_interval", "_left", "_ratio", "_since", "_trial", "_ways", "drafts")

    def __init__(self) -> None:
        self.drafts = True  # the usual way
        self._ways = (_Pace(), _Pace())  # of the steps without drafts, and with them
        self._trial = False
        self._first = True  # whether no trial has been compared
        self._left = 0  # steps of the trial
        self._since = 0  # steps in the usual way since the last trial
        self._interval = FIRST
        self._ratio: float | None = None  # logarithm of the pace with drafts over that without

    @property
    def rest(self) -> int:
        """The next steps without drafts."""
        if self._trial:
            return self._left if self.drafts else 0
        return 0 if self.drafts else self._interval - self._since

    def observed(self, rows: int, drawn: int, seconds: float, drafted: bool) -> None:
        if self._trial:
            self._left -= 1
            if drafted != self.drafts and self._left < TRIAL:
                self._ways[drafted].add(rows, drawn, seconds)
            if self._left <= 0 or self._is_lost():
                self._compare()
            return
        if drafted != self.drafts:
            return  # a step for which nothing was proposed, or that was planned before the usual way changed
        self._since += 1
        self._ways[drafted].add(rows, drawn, seconds)
        if self._since >= self._interval:
            self._trial, self._left = True, TRIAL + COLD
            self._ways[not drafted].clear()

    def _is_lost(self) -> bool:
        """Whether a few steps have shown that the trial only loses time."""
        usual, tried = self._ways[self.drafts], self._ways[not self.drafts]
        return tried.steps >= FEW and tried.pace * CLEARLY < usual.pace

    def _compare(self) -> None:
        """A trial has ended."""
        self._trial, self._since = False, 0
        without, drafted = self._ways
        tried = without if self.drafts else drafted
        if tried.steps < FEW:
            return  # little was proposed
        found = math.log(drafted.pace / without.pace)
        known = self._ratio
        ratio = found if known is None else known + NEWEST * (found - known)
        changed = ratio < 0 if self.drafts else ratio > math.log(GAIN)
        if changed:
            self.drafts = not self.drafts
        # What a step of the next trial loses, in steps of the usual way: one with drafts takes the time of several.
        loss = -math.expm1(-ratio) if self.drafts else drafted.tokens * math.expm1(-ratio)
        longer = min(LONGEST, FIRST if changed else 2 * self._interval)
        self._interval = int(max(longer, min(FARTHEST * LONGEST, (tried.steps + COLD) * loss / LOSS)))
        if self._first:
            self._first, self._interval = False, min(SOON, self._interval)
        else:
            self._ratio = ratio


class _Pace:
    """The last steps of a way: tokens of a row, and seconds."""

    __slots__ = ("_seconds", "_tokens")

    def __init__(self) -> None:
        self._tokens: deque[float] = deque(maxlen=MEMORY)
        self._seconds: deque[float] = deque(maxlen=MEMORY)

    def clear(self) -> None:
        """Forget all steps."""
        self._tokens.clear()
        self._seconds.clear()

    def add(self, rows: int, drawn: int, seconds: float) -> None:
        """Count a step."""
        self._tokens.append(drawn / rows)
        self._seconds.append(seconds)

    @property
    def steps(self) -> int:
        """The steps that count."""
        return len(self._seconds)

    @property
    def pace(self) -> float:
        """Tokens of a row per second."""
        most = FARTHEST * median(self._seconds)
        return sum(self._tokens) / sum([min(most, each) for each in self._seconds])

    @property
    def tokens(self) -> float:
        """Tokens of a row per step."""
        return sum(self._tokens) / self.steps
