"""Latency targets met and missed by service class, queue sizes by class, and fairness between tenants.

Goodput is the share of requests with latency targets that meet all of them (DistServe, OSDI '24). A request without
targets is not counted, so without targets goodput is unset. A request that is rejected, fails or times out misses its
targets. For a request that its client cancelled, only the targets that were due until then count.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from headrace.core.events import (
    AdmitReason,
    Admitted,
    Arrived,
    Chunked,
    Emitted,
    Event,
    Finished,
    Preempted,
    Stepped,
    TurnedAway,
)
from headrace.core.request import NO_SLO, FinishReason
from headrace.core.tenancy.fair_share import fair_shares, jain
from headrace.observe.engine_series import REQUEST_SECONDS
from headrace.observe.metrics_page import Cell, Family, Histogram, MetricsPage

# Fairness between tenants: Jain's index of received service over fair share, in a sliding window.
#
# Time is divided into slices. In each slice, the demand of a tenant is the service it received plus its
# waiting work; its fair share is the weighted max-min share of all service. The index is computed from the
# sums over a window of slices. Service is measured in tokens: computed prompt tokens (cached ones do not
# count) and generated tokens. `observe.goodput` and `lab.bench.stats` use it.

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
    ) -> None:
        self._weight = weight
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
            self._ends = now - now % SLICE_SECONDS + SLICE_SECONDS

    def _add(self, served: dict[str, float], fair: dict[str, float], sign: float) -> None:
        for name, share in fair.items():
            had_served, had_fair = self._sums.get(name, (0.0, 0.0))
            sums = had_served + sign * served.get(name, 0.0), had_fair + sign * share
            if sums[1] > 1e-9:
                self._sums[name] = sums
            else:
                self._sums.pop(name, None)


SHARE_SECONDS = 60.0
"""Time constant of the goodput share: a request of this age has 37 % of the weight of a new one."""

PRIOR_TOKENS = 128.0
"""Output length assumed before the first request has ended; afterwards the mean of the last ones."""

MEMORY = 200
"""Number of requests that the mean output length averages over."""


class ClassState(NamedTuple):
    """A service class now: its requests, and how many met or missed their latency targets since the start.

    ``goodput`` is the share of recent requests with targets that met all of them; None before the first.
    """

    name: str
    waiting: int
    running: int
    goodput: float | None
    met: int
    missed: int


class _Share:
    """An exponentially averaged share of events."""

    __slots__ = ("at", "good", "total")

    def __init__(self) -> None:
        self.good = self.total = 0.0
        self.at = 0.0

    def count(self, good: bool, now: float) -> float:
        faded = math.exp(min(0.0, self.at - now) / SHARE_SECONDS)
        self.good = self.good * faded + good
        self.total = self.total * faded + 1.0
        self.at = now
        return self.good / self.total


class _Class:
    """The series of one service class."""

    __slots__ = ("queue", "running", "share", "share_cell", "waiting")

    def __init__(self, waiting: Cell, running: Cell, queue: Histogram) -> None:
        self.waiting = waiting
        self.running = running
        self.queue = queue
        self.share = _Share()
        self.share_cell: Cell | None = None  # a series begins with the first request that has targets


class _Live:
    """State of a request until it ends; ``due`` is its expected work in tokens."""

    __slots__ = ("arrived", "due", "first", "group", "last", "name", "running", "slo", "tenant")

    def __init__(self, event: Arrived, arrived: float, group: _Class, due: float) -> None:
        self.name = event.service_class
        self.slo = event.slo
        self.tenant = event.tenant
        self.arrived = arrived
        self.group = group
        self.due = due
        self.first: float | None = None
        self.last = arrived
        self.running = False


class Goodput:
    """A `core.ports.Watcher` that writes to ``page``; ``weight`` returns the weight of a tenant."""

    def __init__(self, page: MetricsPage, weight: Callable[[str], float] = lambda tenant: 1.0) -> None:
        self._attained = page.counter(
            "slo_attained",
            "Requests that met a latency target; slo is ttft, tpot, or all. Requests without targets are not counted.",
            ["class", "slo"],
        )
        self._missed = page.counter(
            "slo_missed",
            "Requests that missed a latency target; slo all: at least one of them. Requests without targets are not "
            "counted.",
            ["class", "slo"],
        )
        self._shares = page.gauge(
            "goodput_share",
            "Share of recent requests with latency targets that met all of them, 0 to 1. Without targets there is no "
            "series: goodput is unset.",
            ["class"],
        )
        self._waiting = page.gauge(
            "class_requests_waiting", "Waiting requests of a service class.", ["class"]
        )
        self._running = page.gauge(
            "class_requests_running", "Running requests of a service class.", ["class"]
        )
        self._queue = page.histogram(
            "class_queue_time_seconds",
            "Time from arrival to first admission, by service class.",
            REQUEST_SECONDS,
            ["class"],
        )
        self._rejections = page.counter(
            "requests_turned_away", "Requests rejected at admission, by reason.", ["class", "reason"]
        )
        self._jain = page.gauge(
            "tenant_fairness_jain",
            "Jain's fairness index of service over fair share of tenants, in the last minute; 1 is fair.",
        ).of()
        self._jain.value = 1.0
        self._window = FairnessWindow(weight)
        self._updated_at = -math.inf
        self._answer_tokens = PRIOR_TOKENS
        self._classes: dict[str, _Class] = {}
        self._live: dict[str, _Live] = {}
        self._folds: dict[type, Callable[[Any, float], None]] = {
            Emitted: lambda event, now: self.fold_tokens((event,), now),
            Chunked: self._chunked,
            Stepped: self._stepped,
            Arrived: self._arrived,
            Admitted: self._admitted,
            Preempted: self._preempted,
            Finished: self._finished,
            TurnedAway: self._rejected,
        }

    def fold(self, event: Event, now: float) -> None:
        fold = self._folds.get(type(event))
        if fold is not None:
            fold(event, now)

    def classes(self) -> list[ClassState]:
        """All service classes that have had requests, by name."""
        return [
            ClassState(
                name,
                int(group.waiting.value),
                int(group.running.value),
                None if group.share_cell is None else group.share_cell.value,
                _count(self._attained, name),
                _count(self._missed, name),
            )
            for name, group in sorted(self._classes.items())
        ]

    def tenant_shares(self) -> Mapping[str, tuple[float, float]]:
        """Tokens of service, and tokens of the fair share, of each tenant in the last minute."""
        return self._window.sums()

    @property
    def jain(self) -> float:
        """Jain's fairness index of the last minute."""
        return self._jain.value

    def _class(self, name: str) -> _Class:
        if name not in self._classes:
            self._classes[name] = _Class(self._waiting.of(name), self._running.of(name), self._queue.of(name))
        return self._classes[name]

    def _arrived(self, event: Arrived, now: float) -> None:
        arrived = now if event.at is None else event.at
        group = self._class(event.service_class)
        due = event.prompt_tokens + self._answer_tokens
        self._live[event.request_id] = live = _Live(event, arrived, group, due)
        group.waiting.value += 1
        self._window.wait(live.tenant, due, now)

    def _admitted(self, event: Admitted, now: float) -> None:
        live = self._live[event.request_id]
        live.running = True
        live.group.waiting.value -= 1
        live.group.running.value += 1
        self._window.wait(live.tenant, -live.due, now)
        if event.reason is AdmitReason.NEW:
            at = now if event.at is None else event.at
            live.group.queue.observe(max(0.0, at - live.arrived))

    def _chunked(self, event: Chunked, now: float) -> None:
        self._window.serve(self._live[event.request_id].tenant, event.length, now)

    def fold_tokens(self, emitted: Sequence[Emitted], now: float) -> None:
        """Tokens of a step."""
        served: dict[str, int] = {}
        for request_id, tokens, _ in emitted:
            live = self._live[request_id]
            served[live.tenant] = served.get(live.tenant, 0) + len(tokens)
            live.last = now
            if live.first is None:
                live.first = now
        for tenant, count in served.items():
            self._window.serve(tenant, count, now)

    def _preempted(self, event: Preempted, now: float) -> None:
        live = self._live[event.request_id]
        live.running = False
        live.group.running.value -= 1
        live.group.waiting.value += 1
        self._window.wait(live.tenant, live.due, now)

    def _stepped(self, event: Stepped, now: float) -> None:
        if now >= self._updated_at + 1.0:
            self._updated_at = now
            self._jain.value = self._window.index()

    def _rejected(self, event: TurnedAway, now: float) -> None:
        self._rejections.of(event.service_class, event.reason).value += 1
        if event.slo != NO_SLO:
            self._judge(event.service_class, "all", False, now)

    def _finished(self, event: Finished, now: float) -> None:
        live = self._live.pop(event.request_id, None)
        if live is None:
            return
        if live.running:
            live.group.running.value -= 1
        else:
            live.group.waiting.value -= 1
            self._window.wait(live.tenant, -live.due, now)
        if event.reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._answer_tokens += (event.output_tokens - self._answer_tokens) / MEMORY
        for slo, good in _verdicts(event, live, now).items():
            self._judge(live.name, slo, good, now)

    def _judge(self, service_class: str, slo: str, good: bool, now: float) -> None:
        (self._attained if good else self._missed).of(service_class, slo).value += 1
        if slo == "all":
            group = self._class(service_class)
            if group.share_cell is None:
                group.share_cell = self._shares.of(service_class)
            group.share_cell.value = group.share.count(good, now)


def _count(family: Family[Cell], name: str) -> int:
    """Requests of a class that met or missed all targets; reading creates no series."""
    cell = family.series.get((name, "all"))
    return int(cell.value) if cell else 0


def _verdicts(event: Finished, live: _Live, now: float) -> dict[str, bool]:
    """Which latency targets a request met, and whether ``all``; targets that cannot be decided are omitted.

    A request without targets has no verdict.
    """
    if live.slo == NO_SLO:
        return {}
    whole = event.reason in (FinishReason.STOP, FinishReason.LENGTH)
    cancelled = event.reason is FinishReason.CANCELLED
    first = now if live.first is None else live.first
    verdicts = {}
    if (bound := live.slo.ttft_seconds) is not None:
        began = whole or live.first is not None
        inside = first - live.arrived <= bound
        if began or not cancelled or not inside:
            verdicts["ttft"] = began and inside
    if (bound := live.slo.tpot_seconds) is not None and not cancelled:
        pace = (live.last - first) / max(1, event.output_tokens - 1)
        verdicts["tpot"] = whole and pace <= bound
    kept = all(verdicts.values())
    if not cancelled:
        verdicts["all"] = whole and kept
    elif not kept:
        verdicts["all"] = False
    return verdicts
