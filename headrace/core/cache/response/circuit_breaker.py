"""When to stop asking a store that does not answer, and when to try again: a pure state and three deeds."""

from __future__ import annotations

FAILURES = 5
REST_SECONDS = 1.0
LONGEST_REST_SECONDS = 60.0


class CircuitBreaker:
    """Closed while all is well; after `FAILURES` faults in a row it rests, each time twice as long.

    When a rest is over one caller is let through to try; the others go on without until it has succeeded.
    """

    def __init__(self) -> None:
        self._failures = 0
        self._rest = REST_SECONDS
        self._until: float | None = None

    @property
    def is_open(self) -> bool:
        """Whether it rests after failures, until a call has succeeded again."""
        return self._until is not None

    def permits(self, now: float) -> bool:
        """Whether to ask now."""
        if self._until is None:
            return True
        if now < self._until:
            return False
        self._until = now + self._rest  # this one tries; until it is back, nobody else does
        return True

    def succeeded(self) -> None:
        """It answered, be it that it has nothing."""
        self._failures = 0
        self._rest = REST_SECONDS
        self._until = None

    def failed(self, now: float) -> None:
        """It did not."""
        self._failures += 1
        if self._failures >= FAILURES:
            if self._until is not None:
                self._rest = min(LONGEST_REST_SECONDS, 2 * self._rest)
            self._until = now + self._rest
