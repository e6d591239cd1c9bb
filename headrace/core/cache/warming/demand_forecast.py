"""How often something will be asked for, from when it was asked for: a season of a day and what is going on now.

```
 season   0 ▁▁▁▁▁▁▂▇█▇▅▅▆▅▅▄▃▂▂▁▁▁▁▁ 23    for each hour of the day, requests per day, older days counting less
 recent   ──────────────────────┐          requests per hour, older hours counting less
                                now
```
Both are exponentially weighted, so a question costs a few numbers however often it has come, and one that has stopped
coming fades. The season counts as much as there are days to know it from. Values: an observation makes a new one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

HOUR = 3600.0
HOURS = 24
DAY = HOURS * HOUR

SEASON_WEIGHT = 0.3
"""What one day counts in the mean of days: the last week makes up nine tenths of it."""

RECENT_SECONDS = 2 * HOUR
"""How far back the present reaches."""


class Demand(NamedTuple):
    """What is known of when something was asked for; times are Unix times.

    ``season`` has for each hour of the day (UTC) the weighted requests per day as of the day ``days`` says beside it;
    ``recent`` is the weighted rate per second as of ``last``.
    """

    first: float
    last: float
    times: int = 0
    recent: float = 0.0
    season: tuple[float, ...] = (0.0,) * HOURS
    days: tuple[int, ...] = (0,) * HOURS

    def asked(self, now: float) -> Demand:
        """The same with one more request."""
        hour, day = _hour(now), _day(now)
        level = self.season[hour] * _faded(day - self.days[hour]) + SEASON_WEIGHT
        return Demand(
            self.first,
            max(now, self.last),
            self.times + 1,
            self._recent(now) + 1.0 / RECENT_SECONDS,
            (*self.season[:hour], level, *self.season[hour + 1 :]),
            (*self.days[:hour], day, *self.days[hour + 1 :]),
        )

    def expected(self, now: float, seconds: float) -> float:
        """Requests to expect from ``now`` on within ``seconds``."""
        trust = 1.0 - _faded(max(0, _day(now) - _day(self.first)))
        seasonal = sum(share * self._daily(at) for at, share in _hours(now, seconds))
        # The present fades while the window passes, as it would if nothing came.
        recent = self._recent(now) * RECENT_SECONDS * -math.expm1(-seconds / RECENT_SECONDS)
        return trust * seasonal + (1.0 - trust) * recent

    def _daily(self, at: float) -> float:
        """Requests per day in the hour of ``at``; today is not over, so it does not count as a day without them."""
        hour, day = _hour(at), _day(at)
        return self.season[hour] * _faded(max(0, day - 1 - self.days[hour]))

    def _recent(self, now: float) -> float:
        return self.recent * math.exp(-max(0.0, now - self.last) / RECENT_SECONDS)


def new_demand(now: float) -> Demand:
    """Something that nobody has asked for yet."""
    return Demand(now, now)


class Candidate(NamedTuple):
    """Something that could be computed before it is asked for.

    ``seconds`` are what a caller waits if it has not been, ``cost_seconds`` the device's time to compute it.
    """

    key: bytes
    demand: Demand
    seconds: float
    cost_seconds: float


class Choice(NamedTuple):
    """A candidate that is worth it, and the seconds of waiting that it will probably spare."""

    key: bytes
    saved_seconds: float
    cost_seconds: float


LEAST_EXPECTED = 0.05
"""Something expected more rarely than this within the window is not worth computing, however long it would take."""


def choose(
    candidates: Iterable[Candidate], now: float, window_seconds: float, budget_seconds: float
) -> Sequence[Choice]:
    """What to compute ahead for the next ``window_seconds``: the most seconds saved first, within the budget.

    One that does not fit into what is left of the budget is passed over for smaller ones.
    """
    worth = []
    for candidate in candidates:
        expected = candidate.demand.expected(now, window_seconds)
        if expected >= LEAST_EXPECTED:
            worth.append(Choice(candidate.key, expected * candidate.seconds, candidate.cost_seconds))
    worth.sort(key=lambda choice: (-choice.saved_seconds, choice.key))
    chosen = []
    for choice in worth:
        if choice.cost_seconds <= budget_seconds:
            budget_seconds -= choice.cost_seconds
            chosen.append(choice)
    return chosen


def _hour(at: float) -> int:
    return int(at // HOUR) % HOURS


def _day(at: float) -> int:
    return int(at // DAY)


def _faded(days: int) -> float:
    return float((1.0 - SEASON_WEIGHT) ** max(0, days))


def _hours(start: float, seconds: float) -> Iterable[tuple[float, float]]:
    """Each hour that ``[start, start + seconds)`` touches, with the share of that hour it covers."""
    at, end = start, start + seconds
    while at < end:
        until = min(end, (at // HOUR + 1) * HOUR)
        yield at, (until - at) / HOUR
        at = until
