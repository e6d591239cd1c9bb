"""The share of hits that are audited, as a bounded controller: more audits while errors come near the bound."""

from __future__ import annotations

SMOOTHING = 200
"""Audits over which errors are smoothed exponentially."""

COOL_DOWN = 50
"""Audits between two changes."""

NEAR, FAR = 0.5, 0.25
"""Shares of the error bound: smoothed errors above the one raise the rate, below the other lower it. Between them
nothing changes (hysteresis)."""

FACTOR = 2.0
LOWEST, HIGHEST = 0.5, 8.0
"""Bounds of the rate, as multiples of the configured one."""


class AuditRate:
    """``share`` of hits (0 to 1) are audited at first; without ``adapts`` that never changes.

    Raising the rate finds an exceeded bound sooner; lowering it saves computing. The test of `audits` stays valid,
    because the rate depends on earlier audits only.
    """

    def __init__(self, share: float, max_error: float, *, adapts: bool) -> None:
        self.share = share
        self._low, self._high = LOWEST * share, min(1.0, HIGHEST * share)
        self._max_error = max_error
        self._adapts = adapts
        self._errors = (NEAR + FAR) / 2 * max_error
        self._since = 0

    def observe(self, wrong: bool) -> str:
        """One hit was audited. Returns why the rate has changed; empty if it has not."""
        if not self._adapts:
            return ""
        self._errors += (wrong - self._errors) / SMOOTHING
        self._since += 1
        if self._since < COOL_DOWN or FAR * self._max_error <= self._errors <= NEAR * self._max_error:
            return ""
        factor = FACTOR if self._errors > NEAR * self._max_error else 1 / FACTOR
        share = min(self._high, max(self._low, self.share * factor))
        if share == self.share:
            return ""
        self.share, self._since = share, 0
        return f"smoothed errors {self._errors:.3g}, error bound {self._max_error:.3g}"
