"""The seconds of a step by the number of its drafted positions: a table that is built rarely and read at every step.

```
 seconds          .-----     0 positions: the step without drafts
            .-----'          more positions never take less time
 ----------'
 positions  0   7   15
```
Within a class of `step_residuals`, `StepTimes.verify_seconds` is linear. So the table needs two values per class.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from headrace.core.prediction.step_residuals import EDGES

LIFETIME = 16
"""Number of observed steps after which a table is rebuilt."""

DRIFT = 1 / 32
"""Relative change of the seconds without drafts after which a table is rebuilt."""

VerifySeconds = Callable[[int, int, int], float]
"""The seconds of a step by its rows, tokens and contexts."""


class VerifyTimes:
    """The table of a step of ``rows`` rows of one token, whose contexts are ``contexts``.

    ``plain`` are the seconds without drafts, and ``verify_seconds`` computes those with drafts at the same mean
    context. ``seen`` counts the steps that `StepTimes` has observed, and ``revision`` is `StepResiduals.revision`.
    """

    def __init__(
        self,
        rows: int,
        contexts: int,
        plain: float,
        verify_seconds: VerifySeconds,
        *,
        seen: int,
        revision: int,
    ) -> None:
        self._rows = rows
        self._contexts = contexts
        self._verify_seconds = verify_seconds
        self._expires = seen + LIFETIME
        self._revision = revision
        self._seconds = [plain]

    def is_valid(self, plain: float, seen: int, revision: int) -> bool:
        """Whether the table is still valid if a step without drafts takes ``plain`` seconds now."""
        known = self._seconds[0]
        return seen < self._expires and revision == self._revision and abs(plain - known) <= DRIFT * known

    def up_to(self, count: int) -> list[float]:
        """Seconds by the number of drafted positions, for 0 to at least ``count`` of them."""
        seconds = self._seconds
        while len(seconds) <= count:
            first = self._rows + len(seconds)
            at = bisect_left(EDGES, first)
            last = EDGES[at] if at < len(EDGES) else 2 * first
            begin = max(seconds[-1], self._at(first))
            slope = max(0.0, self._at(last) - begin) / max(1, last - first)
            seconds += [begin + slope * more for more in range(last - first + 1)]
        return seconds

    def _at(self, tokens: int) -> float:
        return self._verify_seconds(self._rows, tokens, self._contexts * tokens // self._rows)
