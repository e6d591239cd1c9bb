"""How many tokens of a stream share one event, so that writing events leaves the processor to the rest of the server.

An event costs the same time whatever it holds. With hundreds of streams, writing an event for each token takes a core.
On one interpreter the engine then waits for the event loop at each step. So streams gather more tokens while writing
takes more than a share of the time, and fewer when it takes less again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

BESIDE_ENGINE = 0.2  # see docs/decisions/api.md#tokens-that-share-an-event-under-load
"""Share of the time that writing streams may take while the engine runs in the same process."""

ALONE = 0.7
"""The same while the engine has its own process: the loop needs the rest for new requests."""

MOST_TOKENS = 16
"""Most tokens that are gathered because of the load."""

WINDOW_SECONDS = 0.25
"""How often the number of tokens is decided."""


class StreamPace:
    """Decides the ``tokens`` that a stream gathers at least before an event is written.

    The event loop calls `begin` before it wakes the readers of a step, and `end` when they have written. ``share`` is
    the part of the time that this may take, ``clock`` the time, ``used`` the CPU time of the event loop's thread.
    """

    def __init__(
        self,
        share: float,
        clock: Callable[[], float] = time.monotonic,
        used: Callable[[], float] = time.thread_time,
    ) -> None:
        self.tokens = 1
        self._share = share
        self._clock = clock
        self._used = used
        self._window = clock()
        self._written = 0.0  # CPU seconds in this window
        self._steps = 0  # that have begun
        self._began = 0.0

    def begin(self) -> None:
        """The readers of a step are about to be woken. The next step may begin before this one's `end`."""
        if not self._steps:
            self._began = self._used()
        self._steps += 1

    def end(self) -> None:
        """The events of a step are written."""
        used = self._used()
        self._written += used - self._began
        self._began = used
        self._steps -= 1
        seconds = self._clock() - self._window
        if seconds < WINDOW_SECONDS:
            return
        # One event for each token would take so many times as long.
        wanted = math.ceil(self.tokens * self._written / seconds / self._share)
        self.tokens = min(MOST_TOKENS, max(1, wanted, self.tokens // 2))
        self._window += seconds
        self._written = 0.0
