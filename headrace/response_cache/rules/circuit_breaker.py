"""The circuit breaker of a response store: when to stop using a failing store, and when to try again."""

from __future__ import annotations

FAILURES = 5
OPEN_SECONDS = 1.0
MAX_OPEN_SECONDS = 60.0


class CircuitBreaker:
    """Closed while the store works; after `FAILURES` failures in a row it opens, each time for twice as long.

    When that time is over, one request is let through as a trial. All others skip the store until the trial has
    succeeded.
    """

    def __init__(self) -> None:
        self._failures = 0
        self._open_seconds = OPEN_SECONDS
        self._until: float | None = None

    @property
    def is_open(self) -> bool:
        """Whether it rests after failures, until a call has succeeded again."""
        return self._until is not None

    @property
    def is_failing(self) -> bool:
        """Whether the last call failed."""
        return self._failures > 0

    def permits(self, now: float) -> bool:
        """Whether to use the store now."""
        if self._until is None:
            return True
        if now < self._until:
            return False
        self._until = now + self._open_seconds  # this request is the trial; all others wait for its result
        return True

    def succeeded(self) -> None:
        """The store answered, with an entry or without one."""
        self._failures = 0
        self._open_seconds = OPEN_SECONDS
        self._until = None

    def failed(self, now: float) -> None:
        """The store failed."""
        self._failures += 1
        if self._failures >= FAILURES:
            if self._until is not None:
                self._open_seconds = min(MAX_OPEN_SECONDS, 2 * self._open_seconds)
            self._until = now + self._open_seconds
