"""Parts of a workload in order of time (search, selection, held-out evaluation), and time windows of a part."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from headrace.lab.workload.call import Call

LEAST_REQUESTS = 8
"""Minimum number of requests of a window; windows with fewer are omitted."""

LEAST_WINDOWS = (4, 2, 8)
"""Minimum number of windows of each part."""

SHARES = (0.4, 0.55)
"""Ends of the first two parts as shares of the time: search, then selection; the rest is held out for evaluation."""


LEAST = 200
"""A sufficient number of requests if they arrive evenly."""


class TooFew(ValueError):
    """A workload with too few requests for tuning; the message says how many it needs."""


class Parts(NamedTuple):
    """The windows of each part; arrivals count from the start of the window."""

    search: list[list[Call]]
    select: list[list[Call]]
    judge: list[list[Call]]


def parts(calls: Sequence[Call], window_seconds: float) -> Parts:
    """The windows of the three parts. A window has ``window_seconds``, or less if the part is short.

    Raises:
        TooFew: a part has fewer windows than `LEAST_WINDOWS` with `LEAST_REQUESTS` requests each.
    """
    until = calls[-1].arrival if calls else 0.0
    bounds = (0.0, *(share * until for share in SHARES), until)
    found = []
    for (low, high), wanted in zip(pairwise(bounds), LEAST_WINDOWS, strict=True):
        mine = [each for each in calls if low <= each.arrival < high or each.arrival == high == until]
        seconds = min(window_seconds, (high - low) / wanted)
        windows = _windows(mine, low, high, seconds) if seconds else []
        if len(windows) < wanted:
            raise TooFew(
                f"the workload has {len(calls)} requests in {until:.0f} s: its parts need {LEAST_WINDOWS} windows of "
                f"{LEAST_REQUESTS} requests, so give at least {LEAST} requests, or longer windows"
            )
        found.append(windows)
    return Parts(*found)


def _windows(calls: Sequence[Call], low: float, high: float, seconds: float) -> list[list[Call]]:
    count = max(1, int((high - low) / seconds + 1e-9))
    windows: list[list[Call]] = [[] for _ in range(count)]
    # If the windows fill the time, its end belongs to the last one; otherwise to the rest that is omitted.
    last = count - 1 if count * seconds > (high - low) * (1 - 1e-9) else count
    for call in calls:
        place = min(int((call.arrival - low) / seconds), last)
        if place < count:
            windows[place].append(call._replace(arrival=call.arrival - low - place * seconds))
    return [each for each in windows if len(each) >= LEAST_REQUESTS]


def spread_out(windows: Sequence[list[Call]], most_requests: int) -> list[list[Call]]:
    """Evenly spaced windows of a part with at most ``most_requests`` in total, but at least one window."""
    for step in range(1, len(windows) + 1):
        chosen = list(windows[::step])
        if sum(map(len, chosen)) <= most_requests:
            return chosen
    return [windows[0]]
