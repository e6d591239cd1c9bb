"""The metrics of a time window, folded from the events in it.

All events in the window count (first tokens, gaps between tokens, ends), also of requests that arrived before. Counting
only requests that arrive and end in the window would exclude slow ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from headrace.core.events import Arrived, Emitted, Event, Finished, Preempted
from headrace.core.request import FinishReason
from headrace.observe.sketch import Sketch


class Metric(NamedTuple):
    """A metric of an experiment; ``better`` is +1 if more is better, -1 if less is."""

    better: int
    help: str


METRICS: Mapping[str, Metric] = {
    "output_tokens_per_second": Metric(+1, "Generated tokens per second."),
    "requests_per_second": Metric(+1, "Requests completed per second."),
    "ttft_mean_seconds": Metric(-1, "Mean time to first token."),
    "ttft_p50_seconds": Metric(-1, "Median time to first token."),
    "ttft_p99_seconds": Metric(-1, "99th percentile of the time to first token."),
    "itl_mean_seconds": Metric(-1, "Mean inter-token latency."),
    "itl_p99_seconds": Metric(-1, "99th percentile of the inter-token latency."),
    "e2e_mean_seconds": Metric(-1, "Mean time from arrival to the end."),
    "normalized_latency_seconds": Metric(
        -1, "Time from arrival to the end per generated token, over the requests that ended."
    ),
    "open_seconds_per_token": Metric(
        -1,
        "Time that all requests were open (waiting, prefill, decoding), per generated token. It follows a setting at "
        "once, however long requests last.",
    ),
    "failed_share": Metric(-1, "Share of ended requests that failed, timed out or were rejected."),
    "preemptions_per_request": Metric(-1, "Preemptions per ended request."),
}
"""The metrics that an experiment can compare or guard."""

COMPLETED = frozenset({FinishReason.STOP, FinishReason.LENGTH})
BAD = frozenset({FinishReason.FAILED, FinishReason.TIMEOUT, FinishReason.REJECTED, FinishReason.UNREACHABLE})


class Window:
    """The measurements of one window that began at ``began``."""

    def __init__(self, began: float) -> None:
        self.began = began
        self.ttft, self.itl, self.e2e = Sketch(), Sketch(), Sketch()
        self.tokens = self.completed = self.bad = self.ended = self.preemptions = 0
        self.arrived_tokens = self.arrivals = self.ended_tokens = 0
        self.open_seconds = 0.0

    def values(self, now: float) -> dict[str, float]:
        """The metrics that have a value in a window that ends at ``now``."""
        seconds = max(now - self.began, 1e-9)
        found = {
            "output_tokens_per_second": self.tokens / seconds,
            "requests_per_second": self.completed / seconds,
            "ttft_mean_seconds": self.ttft.mean,
            "ttft_p50_seconds": self.ttft.percentile(50.0),
            "ttft_p99_seconds": self.ttft.percentile(99.0),
            "itl_mean_seconds": self.itl.mean,
            "itl_p99_seconds": self.itl.percentile(99.0),
            "e2e_mean_seconds": self.e2e.mean,
            "normalized_latency_seconds": self.e2e.total / self.ended_tokens
            if self.ended_tokens
            else math.nan,
            "open_seconds_per_token": self.open_seconds / self.tokens if self.tokens else math.nan,
            "failed_share": self.bad / self.ended if self.ended else math.nan,
            "preemptions_per_request": self.preemptions / self.ended if self.ended else math.nan,
        }
        return {name: value for name, value in found.items() if not math.isnan(value)}

    def load(self, now: float) -> float:
        """Offered load: arrived prompt tokens and requests per second."""
        return (self.arrived_tokens + self.arrivals) / max(now - self.began, 1e-9)


class _Live:
    __slots__ = ("arrived", "last")

    def __init__(self, arrived: float | None) -> None:
        self.arrived = arrived  # None: before this meter
        self.last: float | None = None


class WindowMeter:
    """A fold that fills the current window, if one is open; it also tracks requests between windows."""

    def __init__(self) -> None:
        self.window: Window | None = None
        self._live: dict[str, _Live] = {}
        self._counted = 0.0  # until when the time of open requests is counted
        self._folds: dict[type, Callable[[Any, float], None]] = {
            Emitted: self._emitted,
            Arrived: self._arrived,
            Preempted: self._preempted,
            Finished: self._finished,
        }

    def fold(self, event: Event, now: float) -> None:
        """Count one event."""
        fold = self._folds.get(type(event))
        if fold is not None:
            fold(event, now)

    def open(self, now: float) -> None:
        """Begin a window; a previous open window is dropped."""
        self.window = Window(now)
        self._counted = now

    def close(self, now: float) -> tuple[dict[str, float], float]:
        """End the window; its metrics, and the offered load."""
        self._count_open(now)
        window, self.window = self.window, None
        return ({}, 0.0) if window is None else (window.values(now), window.load(now))

    def _count_open(self, now: float) -> None:
        """Add the time of open requests since the last call; called before their number changes."""
        if self.window is not None:
            self.window.open_seconds += len(self._live) * (now - self._counted)
            self._counted = now

    def _arrived(self, event: Arrived, now: float) -> None:
        self._count_open(now)
        self._live[event.request_id] = _Live(now if event.at is None else event.at)
        if self.window is not None:
            self.window.arrivals += 1
            self.window.arrived_tokens += event.prompt_tokens

    def _emitted(self, event: Emitted, now: float) -> None:
        live = self._live.get(event.request_id)
        if live is None:
            self._count_open(now)
            live = self._live[event.request_id] = _Live(None)
        window, count = self.window, len(event.tokens)
        if window is not None:
            window.tokens += count
            if live.last is not None:
                window.itl.add(now - live.last)
            elif live.arrived is not None:
                window.ttft.add(now - live.arrived)
        live.last = now

    def _preempted(self, event: Preempted, now: float) -> None:
        if self.window is not None:
            self.window.preemptions += 1

    def _finished(self, event: Finished, now: float) -> None:
        self._count_open(now)
        live = self._live.pop(event.request_id, None)
        if self.window is None:
            return
        self.window.ended += 1
        self.window.bad += event.reason in BAD
        if event.reason in COMPLETED:
            self.window.completed += 1
            if live is not None and live.arrived is not None:
                self.window.e2e.add(now - live.arrived)
                self.window.ended_tokens += event.output_tokens
