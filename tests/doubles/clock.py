"""A clock that tests set."""

from __future__ import annotations


class Clock:
    """Time in seconds that stands still until it is set."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
