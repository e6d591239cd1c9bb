"""Whether drafting pays in reality: measured tokens per second with drafts and without, by number of rows.

```
 drafts on       d d d d d d d d d d d d d d d d | . . . . . . | d d d d ...     d  step with drafts
                         tokens / second           trial                        .  step without
 drafts off      . . . . . . . . . . . . . . . . | d d d d d d | . . . . ...
```
`DraftBudget` decides by predicted times, and its model of them can be wrong. So now and then the other mode is tried
for a few steps, and their tokens per second are compared with those of the steps before. The faster mode is used from
then on. A trial of the slower mode loses time, so the interval between two trials grows with that loss.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from statistics import median

from headrace.core.prediction.step_residuals import EDGES

TRIAL_STEPS, WARMUP_STEPS = 12, 2
"""Steps of a trial that are counted, and uncounted steps before them, whose CPU caches are cold."""

MIN_STEPS, CLEARLY_SLOWER = 4, 2.0
"""Minimum number of steps to compare; a trial that is this many times slower after them ends early."""

MIN_INTERVAL, MAX_INTERVAL = 16, 2048
"""Minimum and maximum number of steps between two trials; up to `MAX_RATIO` times more if a trial loses a lot."""

SECOND_TRIAL = 128  # see docs/decisions/speculative-decoding.md#trials-of-realised-speed
"""Maximum number of steps between the first and the second trial, whose result replaces that of the first. Acceptance
rates were still being learned before the first trial, and its loss could delay the second by thousands of steps.
"""

MAX_LOSS = 0.01
"""Share of the time that trials of the slower mode may lose."""

MIN_GAIN = 1.03
"""Drafting is switched on when it is this much faster, and off when it is slower."""

MIN_WEIGHT = 0.4
"""Weight of a new comparison in the mean."""

MAX_RATIO = 3.0
"""A step's duration counts as at most this multiple of the median, because a longer step was interrupted. The interval
before a trial that loses a lot is at most this multiple of `MAX_INTERVAL`."""

WINDOW = 24
"""Number of steps before a trial that it is compared with."""

MAX_SKIP = 16
"""Maximum number of steps without drafts that are announced at once, because the number of rows may change."""


class SpeedTrials:
    """Decides by class of rows whether steps have drafts, from the speed of observed steps."""

    def __init__(self) -> None:
        self._classes: dict[int, _Class] = {}

    def steps_without_drafts(self, rows: int) -> int:
        """How many of the next steps of ``rows`` rows have no drafts; 0: the next one may have some."""
        return min(MAX_SKIP, self._of(rows).steps_without_drafts)

    def prefers_drafts(self, rows: int) -> bool:
        """Whether drafting is faster, as far as known."""
        return self._of(rows).drafts

    def observed(self, rows: int, drawn: int, seconds: float, drafted: bool) -> None:
        """Observe that a step of ``rows`` decode rows drew ``drawn`` tokens in ``seconds``, host work included."""
        if seconds > 0:
            self._of(rows).observed(rows, drawn, seconds, drafted)

    def _of(self, rows: int) -> _Class:
        at = bisect_left(EDGES, rows)
        found = self._classes.get(at)
        if found is None:
            found = self._classes[at] = _Class()
        return found


class _Class:
    """The state of one class of rows."""

    __slots__ = (
        "_in_trial",
        "_interval",
        "_is_first",
        "_ratio",
        "_since_trial",
        "_speeds",
        "_trial_left",
        "drafts",
    )

    def __init__(self) -> None:
        self.drafts = True  # the mode outside trials
        self._speeds = (_Speed(), _Speed())  # of steps without drafts, and with them
        self._in_trial = False
        self._is_first = True  # whether no trial has been compared
        self._trial_left = 0  # steps left of the trial
        self._since_trial = 0  # steps since the last trial
        self._interval = MIN_INTERVAL
        self._ratio: float | None = None  # logarithm of the speed with drafts over that without

    @property
    def steps_without_drafts(self) -> int:
        """The number of next steps without drafts."""
        if self._in_trial:
            return self._trial_left if self.drafts else 0
        return 0 if self.drafts else self._interval - self._since_trial

    def observed(self, rows: int, drawn: int, seconds: float, drafted: bool) -> None:
        if self._in_trial:
            self._trial_left -= 1
            if drafted != self.drafts and self._trial_left < TRIAL_STEPS:
                self._speeds[drafted].add(rows, drawn, seconds)
            if self._trial_left <= 0 or self._is_lost():
                self._compare()
            return
        if drafted != self.drafts:
            return  # nothing was proposed, or the step was planned before the mode changed
        self._since_trial += 1
        self._speeds[drafted].add(rows, drawn, seconds)
        if self._since_trial >= self._interval:
            self._in_trial, self._trial_left = True, TRIAL_STEPS + WARMUP_STEPS
            self._speeds[not drafted].clear()

    def _is_lost(self) -> bool:
        """Whether the first steps of the trial are clearly slower."""
        usual, tried = self._speeds[self.drafts], self._speeds[not self.drafts]
        return tried.steps >= MIN_STEPS and tried.speed * CLEARLY_SLOWER < usual.speed

    def _compare(self) -> None:
        """End the trial, choose the faster mode, and set the interval to the next trial."""
        self._in_trial, self._since_trial = False, 0
        without, drafted = self._speeds
        tried = without if self.drafts else drafted
        if tried.steps < MIN_STEPS:
            return  # too few steps had proposals
        found = math.log(drafted.speed / without.speed)
        known = self._ratio
        ratio = found if known is None else known + MIN_WEIGHT * (found - known)
        changed = ratio < 0 if self.drafts else ratio > math.log(MIN_GAIN)
        if changed:
            self.drafts = not self.drafts
        # What a step of the next trial loses, in steps of the present mode: one with drafts takes the time of several.
        loss = -math.expm1(-ratio) if self.drafts else drafted.tokens * math.expm1(-ratio)
        longer = min(MAX_INTERVAL, MIN_INTERVAL if changed else 2 * self._interval)
        self._interval = int(
            max(longer, min(MAX_RATIO * MAX_INTERVAL, (tried.steps + WARMUP_STEPS) * loss / MAX_LOSS))
        )
        if self._is_first:
            self._is_first, self._interval = False, min(SECOND_TRIAL, self._interval)
        else:
            self._ratio = ratio


class _Speed:
    """The last steps of a mode: tokens per row, and seconds."""

    __slots__ = ("_seconds", "_tokens")

    def __init__(self) -> None:
        self._tokens: deque[float] = deque(maxlen=WINDOW)
        self._seconds: deque[float] = deque(maxlen=WINDOW)

    def clear(self) -> None:
        """Forget all steps."""
        self._tokens.clear()
        self._seconds.clear()

    def add(self, rows: int, drawn: int, seconds: float) -> None:
        """Add a step."""
        self._tokens.append(drawn / rows)
        self._seconds.append(seconds)

    @property
    def steps(self) -> int:
        """The number of steps."""
        return len(self._seconds)

    @property
    def speed(self) -> float:
        """Tokens per row and second."""
        longest = MAX_RATIO * median(self._seconds)
        return sum(self._tokens) / sum([min(longest, each) for each in self._seconds])

    @property
    def tokens(self) -> float:
        """Tokens per row and step."""
        return sum(self._tokens) / self.steps
