"""Fairness between tenants: Jain's index of received service over fair share, in a sliding window.

Time is divided into slices. In each slice, the demand of a tenant is the service it received plus its waiting work; its
fair share is the weighted max-min share of all service. The index is computed from the sums over a window of slices.
Service is measured in tokens: computed prompt tokens (cached ones do not count) and generated tokens.
`observe.goodput` and `lab.bench.stats` use it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from headrace.core.tenancy.fair_share import fair_shares, jain

SLICE_SECONDS = 1.0
WINDOW_SLICES = 60
LEAST_TOKENS = 1e-6
"""Smaller amounts are treated as rounding errors."""


class FairnessWindow:
    """Service of tenants in the last ``slices`` slices (None: all slices).

    ``weight`` returns the weight of a tenant. Calls must be ordered by ``now``.
    """

    def __init__(
        self,
        weight: Callable[[str], float] = lambda tenant: 1.0,
        slices: int | None = WINDOW_SLICES,
        slice_seconds: float = SLICE_SECONDS,
    ) -> None:
        self._weight = weight
        self._seconds = slice_seconds
        self._ends = float("-inf")
        self._waiting: dict[str, float] = {}
        self._served: dict[str, float] = {}
        self._sums: dict[str, tuple[float, float]] = {}  # tenant: served, fair
        self._keep = slices
        self._closed: deque[tuple[dict[str, float], dict[str, float]]] = deque()

    def wait(self, tenant: str, tokens: float, now: float) -> None:
        """``tokens`` of work began to wait; negative if they are served or cancelled."""
        self._advance(now)
        waiting = self._waiting.get(tenant, 0.0) + tokens
        if waiting > LEAST_TOKENS:
            self._waiting[tenant] = waiting
        else:
            self._waiting.pop(tenant, None)

    def serve(self, tenant: str, tokens: float, now: float) -> None:
        """``tokens`` were computed or generated."""
        self._advance(now)
        self._served[tenant] = self._served.get(tenant, 0.0) + tokens

    def index(self) -> float:
        """Jain's index over the closed slices; 1 if no tenant had work."""
        return jain(served / fair for served, fair in self._sums.values() if fair > 0.0)

    def sums(self) -> Mapping[str, tuple[float, float]]:
        """Service and fair share of each tenant over the closed slices, in tokens."""
        return self._sums

    def close(self) -> None:
        """Close the open slice, at the end of a run."""
        if sum(self._served.values()) <= 0.0:
            return
        names = self._served.keys() | self._waiting.keys()
        demands = {name: self._served.get(name, 0.0) + self._waiting.get(name, 0.0) for name in sorted(names)}
        fair = fair_shares(
            demands, {name: self._weight(name) for name in demands}, sum(self._served.values())
        )
        self._add(self._served, fair, 1.0)
        if self._keep is not None:
            self._closed.append((self._served, fair))
            if len(self._closed) > self._keep:
                self._add(*self._closed.popleft(), -1.0)
        self._served = {}

    def _advance(self, now: float) -> None:
        if now >= self._ends:
            self.close()
            self._ends = now - now % self._seconds + self._seconds

    def _add(self, served: dict[str, float], fair: dict[str, float], sign: float) -> None:
        for name, share in fair.items():
            had_served, had_fair = self._sums.get(name, (0.0, 0.0))
            sums = had_served + sign * served.get(name, 0.0), had_fair + sign * share
            if sums[1] > 1e-9:
                self._sums[name] = sums
            else:
                self._sums.pop(name, None)
