"""The idle detector: background work may run after arrivals have been few for a while.

```
 arrivals/s  ▂▅█▇▄▂▁▁▁▁▁▁▂▁▁▁▁▃▆        opens when the rate has been under the set point for a while,
 window      closed......|open....|closed   closes when it is over twice that: no flapping in between
```
"""

from __future__ import annotations

import math

HYSTERESIS = 2.0
"""The window closes at this multiple of the rate below which it opens."""

RATE_SECONDS = 10.0
"""Time constant of the arrival rate."""


class IdleDetector:
    """Says whether traffic is low; every arrival must be reported to it.

    Args:
        below_rate: arrivals per second below which traffic is low.
        settle_seconds: how long the rate must have been that low before the window opens.
    """

    def __init__(self, below_rate: float, settle_seconds: float, now: float) -> None:
        self._below_rate = below_rate
        self._settle_seconds = settle_seconds
        self._rate = 0.0
        self._rate_at = now
        self._low_since: float | None = now
        self._open = False

    def arrived(self, now: float) -> None:
        """Count one arrival."""
        self._rate = self.rate(now) + 1.0 / RATE_SECONDS
        self._rate_at = now
        if self._rate > self._below_rate:
            self._low_since = None
        if self._rate > HYSTERESIS * self._below_rate:
            self._open = False

    def rate(self, now: float) -> float:
        """Recent arrivals per second."""
        return self._rate * math.exp((self._rate_at - now) / RATE_SECONDS)

    def open(self, now: float) -> bool:
        """Whether background work may run now."""
        if self._low_since is None and self.rate(now) <= self._below_rate:
            # Only arrivals raise the rate, so the time at which it crossed the set point can be computed.
            crossed = self._rate_at + RATE_SECONDS * math.log(self._rate / self._below_rate)
            self._low_since = crossed
        if self._low_since is not None and now - self._low_since >= self._settle_seconds:
            self._open = True
        return self._open
