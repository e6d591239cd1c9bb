"""The rate at which requests are admitted, which ``Retry-After`` is computed from."""

from __future__ import annotations

import math

RATE_SECONDS = 10.0
"""Time constant of the average."""


class AdmissionRate:
    """Events per second, exponentially averaged."""

    def __init__(self) -> None:
        self._value = 0.0
        self._at = 0.0

    def count(self, now: float) -> None:
        """One event."""
        self._value = self.value(now) + 1.0 / RATE_SECONDS
        self._at = now

    def value(self, now: float) -> float:
        """The rate now."""
        return self._value * math.exp((self._at - now) / RATE_SECONDS)
