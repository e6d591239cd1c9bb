"""Warming: how often a request is expected again, which to compute ahead, and when the server is idle.

```
 season   0 ▁▁▁▁▁▁▂▇█▇▅▅▆▅▅▄▃▂▂▁▁▁▁▁ 23    for each hour of the day, requests per day, older days counting less
 recent   ──────────────────────┐          requests per hour, older hours counting less
                                now
```
Both are exponentially weighted. A request costs a few numbers however often it has arrived, and one that no longer
arrives fades. The weight of the season grows with the number of observed days. Values are immutable: an observation
makes a new one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

HOUR = 3600.0
HOURS = 24
DAY = HOURS * HOUR

SEASON_WEIGHT = 0.3
"""Weight of one day in the mean of days: the last week makes up nine tenths of it."""

RECENT_SECONDS = 2 * HOUR
"""Time constant of the recent rate."""


class Demand(NamedTuple):
    """The arrivals of one request; times are Unix times.

    ``season`` has for each hour of the day (UTC) the weighted requests per day, as of the day number in ``days``.
    ``recent`` is the weighted rate per second as of ``last``.
    """

    first: float
    last: float
    times: int = 0
    recent: float = 0.0
    season: tuple[float, ...] = (0.0,) * HOURS
    days: tuple[int, ...] = (0,) * HOURS

    def asked(self, now: float) -> Demand:
        """The demand with one more request."""
        hour, day = _hour(now), _day(now)
        level = self.season[hour] * _decay(day - self.days[hour]) + SEASON_WEIGHT
        return Demand(
            self.first,
            max(now, self.last),
            self.times + 1,
            self._recent(now) + 1.0 / RECENT_SECONDS,
            (*self.season[:hour], level, *self.season[hour + 1 :]),
            (*self.days[:hour], day, *self.days[hour + 1 :]),
        )

    def expected(self, now: float, seconds: float) -> float:
        """The number of requests expected within ``seconds`` from ``now``."""
        season_share = 1.0 - _decay(max(0, _day(now) - _day(self.first)))
        seasonal = sum(share * self._daily(at) for at, share in _hours(now, seconds))
        # The recent rate fades during the window, as it would without arrivals.
        recent = self._recent(now) * RECENT_SECONDS * -math.expm1(-seconds / RECENT_SECONDS)
        return season_share * seasonal + (1.0 - season_share) * recent

    def _daily(self, at: float) -> float:
        """Requests per day in the hour of ``at``; today is incomplete, so it does not count as a day without
        requests.
        """
        hour, day = _hour(at), _day(at)
        return self.season[hour] * _decay(max(0, day - 1 - self.days[hour]))

    def _recent(self, now: float) -> float:
        return self.recent * math.exp(-max(0.0, now - self.last) / RECENT_SECONDS)


def new_demand(now: float) -> Demand:
    """The demand of a request that has not arrived yet."""
    return Demand(now, now)


class Candidate(NamedTuple):
    """A request that could be computed ahead.

    ``seconds`` is the client's wait without it, ``cost_seconds`` the device time to compute it.
    """

    key: bytes
    demand: Demand
    seconds: float
    cost_seconds: float


class Choice(NamedTuple):
    """A chosen candidate, and the expected waiting time that it saves."""

    key: bytes
    saved_seconds: float
    cost_seconds: float


MIN_EXPECTED = 0.05
"""A request expected less often than this within the window is not computed ahead, however long it takes."""


def choose(
    candidates: Iterable[Candidate], now: float, window_seconds: float, budget_seconds: float
) -> Sequence[Choice]:
    """The candidates to compute ahead for the next ``window_seconds``: most seconds saved first, within the budget.

    A candidate that does not fit into the remaining budget is passed over for smaller ones.
    """
    savings = []
    for candidate in candidates:
        expected = candidate.demand.expected(now, window_seconds)
        if expected >= MIN_EXPECTED:
            savings.append(Choice(candidate.key, expected * candidate.seconds, candidate.cost_seconds))
    savings.sort(key=lambda choice: (-choice.saved_seconds, choice.key))
    chosen = []
    for choice in savings:
        if choice.cost_seconds <= budget_seconds:
            budget_seconds -= choice.cost_seconds
            chosen.append(choice)
    return chosen


def _hour(at: float) -> int:
    return int(at // HOUR) % HOURS


def _day(at: float) -> int:
    return int(at // DAY)


def _decay(days: int) -> float:
    return float((1.0 - SEASON_WEIGHT) ** max(0, days))


def _hours(start: float, seconds: float) -> Iterable[tuple[float, float]]:
    """Each hour that ``[start, start + seconds)`` overlaps, with the share of that hour it covers."""
    at, end = start, start + seconds
    while at < end:
        until = min(end, (at // HOUR + 1) * HOUR)
        yield at, (until - at) / HOUR
        at = until


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
