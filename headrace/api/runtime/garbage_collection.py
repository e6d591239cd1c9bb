"""Runs Python's garbage collection, which stops all threads, while no request waits.

Reference counting frees most objects at once. The collector finds reference cycles and walks over all objects that it
covers: 100 to 400 ms for everything in a server, a few milliseconds for the objects of the last second. Therefore the
objects of the start-up are frozen and never searched again: they live as long as the server. Recent objects are
collected often. Those that survive are old, and are collected only in idle time.

```
 start-up ──> frozen, never searched
 created ──> recent ──collected often, between two responses──> old ──collected in idle time
```

The three are Python's permanent generation, its two young generations, and its oldest one.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

NEVER = 1_000_000_000
"""Collections of younger objects before Python itself collects older ones: more than will occur."""

RECENT_SECONDS = 0.1
"""Interval between two collections of recent objects."""

REST_SECONDS = 30.0
"""Minimum interval between two full collections."""

SHARE = 0.001
"""Maximum share of time that full collections may take."""

QUIET_SECONDS = 2.0  # see docs/decisions/background-work.md#garbage-collection
"""Idle time after which a full collection may start: it is then unlikely to delay a request."""

MANY = 80
"""Collections of the youngest generation, of some 700 new objects each, after which recent objects are collected
without waiting for idle time: large calls create so many that a later collection would stop all threads for longer."""

PATIENCE = 10.0
"""A collection waits at most this many intervals for idle time; then it runs anyway."""

_RECENT, _OLD = 1, 2
"""The oldest of the generations that are recent, and the generation of old objects."""


class GarbageCollection:
    """Decides when to collect.

    Args:
        busy: whether a request waits for its response.
        calls: the number of requests so far.
        clock: seconds.
        created: the collections of the youngest generation since the last one of recent objects.
    """

    def __init__(
        self,
        busy: Callable[[], bool],
        calls: Callable[[], int],
        clock: Callable[[], float],
        created: Callable[[], int] = lambda: gc.get_count()[_RECENT],
    ) -> None:
        self._busy = busy
        self._calls = calls
        self._clock = clock
        self._created = created
        self._called = calls()
        self._quiet_since = self._recent_ended = self._all_ended = clock()
        self._rest = REST_SECONDS

    def take_over(self) -> None:
        """Let Python itself collect the youngest objects only, and freeze the objects of the start-up."""
        gc.collect()
        gc.freeze()
        gc.set_threshold(gc.get_threshold()[0], NEVER, NEVER)
        self._quiet_since = self._recent_ended = self._all_ended = self._clock()

    def tick(self) -> None:
        """Run the collection that is due. Call it several times a second."""
        now = self._clock()
        busy, called = self._busy(), self._calls()
        if busy or called != self._called:
            self._called, self._quiet_since = called, now
        quiet = now - self._quiet_since >= QUIET_SECONDS
        if _due(now - self._all_ended, self._rest, quiet):
            gc.collect(_OLD)
            self._recent_ended = self._all_ended = self._clock()
            self._rest = max(REST_SECONDS, (self._all_ended - now) / SHARE)
        elif self._created() >= MANY or _due(now - self._recent_ended, RECENT_SECONDS, not busy):
            gc.collect(_RECENT)
            self._recent_ended = self._clock()


def _due(passed: float, rest: float, good_moment: bool) -> bool:
    return passed >= (rest if good_moment else PATIENCE * rest)
