"""The seconds of a step by the number of its drafted positions: a table that is made rarely and read at every step.

```
 seconds          .-----     0 positions: the step without drafts
            .-----'          more positions never take less time
 ----------'
 positions  0   7   15
```
Between the bounds of the classes that `step_residuals` learns, the seconds of `StepTimes.drafted` lie on a line. So a
table needs two of them for each class.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from headrace.core.prediction.step_residuals import EDGES

LIFETIME = 16
"""Observed steps after which a table is made anew."""

DRIFT = 1 / 32
"""Relative change of the seconds without drafts with which a table is made anew."""

Drafted = Callable[[int, int, int], float]
"""The seconds of a step by its rows, tokens and contexts."""


class DraftStairs:
    """The table of a step of ``rows`` rows of one token, whose contexts are ``contexts``.

    ``plain`` are the seconds without drafts, and ``drafted`` gives those with drafts of the same mean context. ``seen``
    and ``news`` say what `StepTimes` had observed.
    """

    def __init__(
        self, rows: int, contexts: int, plain: float, drafted: Drafted, *, seen: int, news: int
    ) -> None:
        self._rows = rows
        self._contexts = contexts
        self._drafted = drafted
        self._expires = seen + LIFETIME
        self._news = news
        self._seconds = [plain]

    def holds(self, plain: float, seen: int, news: int) -> bool:
        """Whether the table can still be used, if a step without drafts takes ``plain`` seconds now."""
        known = self._seconds[0]
        return seen < self._expires and news == self._news and abs(plain - known) <= DRIFT * known

    def upto(self, most: int) -> list[float]:
        """Seconds by the number of drafted positions, for 0 to ``most`` of them or more."""
        seconds = self._seconds
        while len(seconds) <= most:
            first = self._rows + len(seconds)
            at = bisect_left(EDGES, first)
            last = EDGES[at] if at < len(EDGES) else 2 * first
            begin = max(seconds[-1], self._at(first))
            slope = max(0.0, self._at(last) - begin) / max(1, last - first)
            seconds += [begin + slope * more for more in range(last - first + 1)]
        return seconds

    def _at(self, tokens: int) -> float:
        return self._drafted(self._rows, tokens, self._contexts * tokens // self._rows)
