"""Python's search for garbage, which stops all threads, waits for moments in which nobody is there.

Nearly everything is freed by counting references as soon as nobody has it. A search finds objects that hold each other
in a circle, and walks over all that it searches for it: 100 to 200 ms for everything that a server keeps, a few
milliseconds for what has been made within a second. So what is recent is searched often, little at a time, and then put
aside; everything, and what was put aside too, only after nobody has called for a while.

```
 made ──> recent ──searched often, between two answers──> put aside ──searched in quiet times──┐
                                                              ↑________________________________│
```
"""

from __future__ import annotations

import gc
from collections.abc import Callable

NEVER = 1_000_000_000
"""Searches of what is young between two of everything: more than there will be."""

RECENT_SECONDS = 0.1
"""Between two searches of what is recent."""

REST_SECONDS = 30.0
"""At least, between two searches of everything."""

SHARE = 0.001
"""Of the time that searches of everything may take, however much is alive."""

QUIET_SECONDS = 2.0
"""Nobody has called for so long: then it is likely that nobody will within a search of everything."""

PATIENCE = 10.0
"""So many times its rest a search waits for its moment; then it begins all the same."""


class GarbageCollection:
    """Chooses the moments.

    Args:
        busy: whether somebody waits for an answer.
        calls: how many calls have come so far.
        clock: seconds.
    """

    def __init__(
        self, busy: Callable[[], bool], calls: Callable[[], int], clock: Callable[[], float]
    ) -> None:
        self._busy = busy
        self._calls = calls
        self._clock = clock
        self._called = calls()
        self._quiet_since = self._recent_ended = self._all_ended = clock()
        self._rest = REST_SECONDS

    def take_over(self) -> None:
        """From now on Python itself searches only what is young; what start-up has made is put aside."""
        _search()
        young, middle, _ = gc.get_threshold()
        gc.set_threshold(young, middle, NEVER)
        self._quiet_since = self._recent_ended = self._all_ended = self._clock()

    def tick(self) -> None:
        """Search now what is due. To be called several times a second."""
        now = self._clock()
        busy, called = self._busy(), self._calls()
        if busy or called != self._called:
            self._called, self._quiet_since = called, now
        quiet = now - self._quiet_since >= QUIET_SECONDS
        if _due(now - self._all_ended, self._rest, quiet):
            gc.unfreeze()
            _search()
            self._recent_ended = self._all_ended = self._clock()
            self._rest = max(REST_SECONDS, (self._all_ended - now) / SHARE)
        elif _due(now - self._recent_ended, RECENT_SECONDS, not busy):
            _search()
            self._recent_ended = self._clock()


def _search() -> None:
    """Search what has not been put aside, and put it aside."""
    gc.collect()
    gc.freeze()


def _due(passed: float, rest: float, good_moment: bool) -> bool:
    return passed >= (rest if good_moment else PATIENCE * rest)
