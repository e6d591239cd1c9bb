"""Exponentially smoothed inputs of the tuner: the offered load, and how much of its latency a request spends waiting.

Both forget with a time constant, so a single burst moves them little. `Side` and `Shift` turn them into decisions with
hysteresis: a signal that hovers around a bound changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

from headrace.core.events import Arrived, Emitted, Event, Finished

WAITING_ABOVE, WAITING_BELOW = 0.5, 0.3
"""Share of the latency before the first token: from the one on waiting dominates, below the other steps do."""

SHIFT = 1.6
"""A load that is this many times larger or smaller than when the tuner last looked is another load."""

SETTLED = 3.0
"""Time constants after which a smoothed signal is used first."""


class Side(StrEnum):
    """What a request's latency mostly is: waiting for its first token, or the steps of its output."""

    WAITING = "waiting"
    STEPS = "steps"


class Signals:
    """A fold over events with time constant ``seconds``."""

    def __init__(self, seconds: float) -> None:
        self.side = Side.STEPS
        self._seconds = seconds
        self._began: float | None = None
        self._tokens = 0.0  # a sum that decays
        self._at = 0.0
        self._first = self._whole = (
            0.0  # seconds before the first token, and in all, of ended requests; they decay
        )
        self._live: dict[str, tuple[float, float | None]] = {}  # arrival and first token of each open request
        self._folds: Mapping[type, Callable[[Any, float], None]] = {
            Arrived: self._arrived,
            Emitted: self._emitted,
            Finished: self._finished,
        }

    def fold(self, event: Event, now: float) -> None:
        """Count one event."""
        fold = self._folds.get(type(event))
        if fold is not None:
            fold(event, now)

    def load(self, now: float) -> float:
        """Smoothed prompt tokens and requests that arrive per second; 0 while there are too few observations."""
        if self._began is None or now - self._began < SETTLED * self._seconds:
            return 0.0
        self._decay(now)
        return self._tokens / self._seconds

    @property
    def waiting(self) -> float:
        """Smoothed share of the latency before the first token; NaN before the first request has ended."""
        return self._first / self._whole if self._whole > 0 else math.nan

    def _decay(self, now: float) -> None:
        if self._began is None:
            self._began = self._at = now
        factor = math.exp(-max(0.0, now - self._at) / self._seconds)
        self._tokens *= factor
        self._first *= factor
        self._whole *= factor
        self._at = max(self._at, now)

    def _arrived(self, event: Arrived, now: float) -> None:
        self._decay(now)
        self._live[event.request_id] = (now if event.at is None else event.at, None)
        self._tokens += event.prompt_tokens + 1

    def _emitted(self, event: Emitted, now: float) -> None:
        live = self._live.get(event.request_id)
        if live is not None and live[1] is None:
            self._live[event.request_id] = (live[0], now)

    def _finished(self, event: Finished, now: float) -> None:
        arrived, first = self._live.pop(event.request_id, (now, None))
        if first is None:
            return
        self._decay(now)
        self._first += first - arrived
        self._whole += now - arrived
        if self.waiting > WAITING_ABOVE:
            self.side = Side.WAITING
        elif self.waiting < WAITING_BELOW:
            self.side = Side.STEPS


class Shift:
    """Says when the load has become another one, at most once in ``rest_seconds``."""

    def __init__(self, rest_seconds: float) -> None:
        self._rest = rest_seconds
        self._reference = 0.0
        self._since = -math.inf

    def happened(self, load: float, now: float) -> bool:
        """Whether ``load`` differs from the one at the last shift by more than a factor of `SHIFT`; 0 is unknown."""
        if load <= 0.0 or now - self._since < self._rest:
            return False
        known, ratio = self._reference > 0.0, load / self._reference if self._reference else 1.0
        if known and 1 / SHIFT <= ratio <= SHIFT:
            return False
        self._reference, self._since = load, now
        return known
