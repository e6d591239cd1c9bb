"""Runs Python's garbage collection, which stops all threads, while no request waits.

Reference counting frees most objects at once. The collector finds reference cycles and walks over all objects that it
covers: 100 to 200 ms for everything in a server, a few milliseconds for the objects of the last second. Therefore
recent objects are collected often and then frozen. Everything, including frozen objects, is collected only in idle
time.

```
 created ──> recent ──collected often, between two responses──> frozen ──collected in idle time──┐
                                                                  ↑______________________________│
```
"""

from __future__ import annotations

import gc
from collections.abc import Callable

NEVER = 1_000_000_000
"""Collections of young objects between two full ones: more than will occur."""

RECENT_SECONDS = 0.1
"""Interval between two collections of recent objects."""

REST_SECONDS = 30.0
"""Minimum interval between two full collections."""

SHARE = 0.001
"""Maximum share of time that full collections may take."""

QUIET_SECONDS = 2.0  # see docs/decisions/background-work.md#garbage-collection
"""Idle time after which a full collection may start: it is then unlikely to delay a request."""

MANY = 8
"""Collections of the middle generation, of some 7,000 new objects each, after which recent objects are collected
without waiting for idle time: large calls create so many that a later collection would stop all threads for longer."""

PATIENCE = 10.0
"""A collection waits at most this many intervals for idle time; then it runs anyway."""


class GarbageCollection:
    """Decides when to collect.

    Args:
        busy: whether a request waits for its response.
        calls: the number of requests so far.
        clock: seconds.
        created: the collections of the middle generation since the last one of recent objects.
    """

    def __init__(
        self,
        busy: Callable[[], bool],
        calls: Callable[[], int],
        clock: Callable[[], float],
        created: Callable[[], int] = lambda: gc.get_count()[2],
    ) -> None:
        self._busy = busy
        self._calls = calls
        self._clock = clock
        self._created = created
        self._called = calls()
        self._quiet_since = self._recent_ended = self._all_ended = clock()
        self._rest = REST_SECONDS

    def take_over(self) -> None:
        """Let Python itself collect young objects only, and freeze the objects of the start-up."""
        _search()
        young, middle, _ = gc.get_threshold()
        gc.set_threshold(young, middle, NEVER)
        self._quiet_since = self._recent_ended = self._all_ended = self._clock()

    def tick(self) -> None:
        """Run the collection that is due. Call it several times a second."""
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
        elif self._created() >= MANY or _due(now - self._recent_ended, RECENT_SECONDS, not busy):
            _search()
            self._recent_ended = self._clock()


def _search() -> None:
    """Collect all objects that are not frozen, and freeze them."""
    gc.collect()
    gc.freeze()


def _due(passed: float, rest: float, good_moment: bool) -> bool:
    return passed >= (rest if good_moment else PATIENCE * rest)
