"""The rate of admissions, exponentially averaged; `Retry-After` is computed from it."""

from __future__ import annotations

import math

RATE_SECONDS = 10.0
"""Time constant of the average."""


class AdmissionRate:
    """Admissions per second."""

    def __init__(self) -> None:
        self._value = 0.0
        self._at = 0.0

    def count(self, now: float) -> None:
        """Count one admission."""
        self._value = self.value(now) + 1.0 / RATE_SECONDS
        self._at = now

    def value(self, now: float) -> float:
        """The rate at this time."""
        return self._value * math.exp((self._at - now) / RATE_SECONDS)
