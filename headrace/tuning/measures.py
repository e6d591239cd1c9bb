"""The metrics of a time window, folded from the events in it.

All events in the window count (first tokens, gaps between tokens, ends), also of requests that arrived before. Counting
only requests that arrive and end in the window would exclude slow ones.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from headrace.core.events import (
    Arrived,
    Emitted,
    Event,
    Finished,
    Layer,
    LookedUp,
    Lookup,
    Preempted,
    PreemptReason,
    Spared,
)
from headrace.core.request import FinishReason
from headrace.core.tenancy.tenants import is_awaited
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
        if self.window is not None and event.reason is not PreemptReason.LOST:
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


class By(StrEnum):
    """The unit of an experiment: the engine for a time, one request, or one tenant for a time."""

    TIME = "time"
    REQUEST = "request"
    TENANT = "tenant"


class Assignment(NamedTuple):
    """The assignment of an experiment that began at ``began``; a tenant keeps its arm for ``period_seconds``.

    ``share`` is the probability of the treatment.
    """

    by: By
    seed: int
    began: float
    period_seconds: float
    share: float = 0.5

    def unit(self, request_id: str, tenant: str, arrived: float) -> str:
        """The name of a request's unit."""
        return request_id if self.by is By.REQUEST else f"{self.period(arrived)}:{tenant}"

    def period(self, at: float) -> int:
        """The number of the period."""
        return int((at - self.began) // self.period_seconds)

    def treats(self, unit: str) -> bool:
        """Whether a unit has the treatment."""
        drawn = int.from_bytes(hashlib.sha256(f"{self.seed}:{unit}".encode()).digest()[:8], "big")
        return drawn < self.share * 2**64


UNIT_METRICS: Mapping[str, Metric] = {
    **{
        name: METRICS[name]
        for name in (
            *("ttft_mean_seconds", "itl_mean_seconds", "e2e_mean_seconds"),
            *("normalized_latency_seconds", "failed_share"),
        )
    },
    "cached_share": Metric(+1, "Share of requests served from a response cache."),
}
"""The metrics that an experiment by request or tenant can compare or guard."""

MOST_HITS = 10_000
"""Maximum number of lookups that are kept until their response is sent."""

_SERVED = frozenset({Layer.EXACT, Layer.SEMANTIC, Layer.COALESCED})


def describe_metrics() -> dict[str, dict[str, Any]]:
    """All metrics for clients: whether larger or smaller is better, and the possible units."""
    split = [By.REQUEST.value, By.TENANT.value]
    return {
        name: {
            "better": "more" if each.better > 0 else "less",
            "units": [By.TIME.value] * (name in METRICS) + split * (name in UNIT_METRICS),
            "help": each.help,
        }
        for name, each in {**METRICS, **UNIT_METRICS}.items()
    }


def is_share(metric: str) -> bool:
    """Whether a metric is compared by absolute difference; others are compared relatively (by logarithms)."""
    return metric.endswith("_share")


class Unit(NamedTuple):
    """A measured unit: metrics (logarithms, except shares) and covariates."""

    tenant: str
    treated: bool
    values: Mapping[str, float]
    covariates: tuple[float, float]


class _Life:
    """A request that is open."""

    __slots__ = ("arrived", "covariates", "first", "last", "tenant", "tokens", "unit")

    def __init__(self, unit: str, tenant: str, arrived: float, covariates: tuple[float, float]) -> None:
        self.unit = unit
        self.tenant = tenant
        self.arrived = arrived
        self.covariates = covariates
        self.first: float | None = None
        self.last = arrived
        self.tokens = 0


class _Period:
    """A tenant in one period: sums over its requests."""

    __slots__ = ("counts", "covariates", "number", "open", "requests", "sums", "tenant")

    def __init__(self, tenant: str, number: int) -> None:
        self.tenant = tenant
        self.number = number
        self.open = self.requests = 0
        self.sums: dict[str, float] = {}
        self.counts: dict[str, int] = {}
        self.covariates = (0.0, 0.0)


class UnitMeter:
    """A `core.ports.Watcher` that measures the units of one experiment."""

    def __init__(self, assignment: Assignment) -> None:
        self.assignment = assignment
        self._lives: dict[str, _Life] = {}
        self._hits: OrderedDict[str, float] = OrderedDict()
        self._periods: dict[str, _Period] = {}
        self._done: list[Unit] = []
        self._folds: dict[type, Callable[[Any, float], None]] = {
            Emitted: self._emitted,
            Arrived: self._arrived,
            Finished: self._finished,
            LookedUp: self._looked_up,
            Spared: self._spared,
        }

    def fold(self, event: Event, now: float) -> None:
        """Count one event."""
        fold = self._folds.get(type(event))
        if fold is not None:
            fold(event, now)

    def take(self, now: float) -> list[Unit]:
        """The units that have been measured since the last call."""
        if self.assignment.by is By.TENANT:
            present = self.assignment.period(now)
            for name, each in list(self._periods.items()):
                if each.number < present and not each.open:
                    del self._periods[name]
                    self._add(name, each.tenant, _means(each), each.covariates)
        done, self._done = self._done, []
        return done

    def _arrived(self, event: Arrived, now: float) -> None:
        at = now if event.at is None else event.at
        if at < self.assignment.began or not is_awaited(event.service_class):
            return
        unit = self.assignment.unit(event.request_id, event.tenant, at)
        covariates = (math.log1p(event.prompt_tokens), math.log1p(len(self._lives)))
        self._lives[event.request_id] = _Life(unit, event.tenant, at, covariates)
        if self.assignment.by is By.TENANT:
            self._enter(unit, event.tenant, at, covariates).open += 1

    def _enter(self, unit: str, tenant: str, at: float, covariates: tuple[float, float]) -> _Period:
        period = self._periods.get(unit)
        if period is None:
            period = self._periods[unit] = _Period(tenant, self.assignment.period(at))
            period.covariates = (
                covariates  # of its first request: later ones may have been slowed by the treatment
            )
        return period

    def _emitted(self, event: Emitted, now: float) -> None:
        life = self._lives.get(event.request_id)
        if life is not None:
            if life.first is None:
                life.first = now
            life.last = now
            life.tokens += len(event.tokens)

    def _finished(self, event: Finished, now: float) -> None:
        life = self._lives.pop(event.request_id, None)
        if life is None:
            return
        values: dict[str, float] = {}
        if event.reason is not FinishReason.CANCELLED:
            values = {"failed_share": float(event.reason in BAD), "cached_share": 0.0}
        if event.reason in COMPLETED and life.first is not None:
            values["ttft_mean_seconds"] = _log(life.first - life.arrived)
            values["e2e_mean_seconds"] = _log(now - life.arrived)
            values["normalized_latency_seconds"] = _log((now - life.arrived) / life.tokens)
            if life.tokens > 1:
                values["itl_mean_seconds"] = _log((life.last - life.first) / (life.tokens - 1))
        self._measured(life.unit, life.tenant, values, life.covariates)
        period = self._periods.get(life.unit)
        if period is not None:
            period.open -= 1

    def _looked_up(self, event: LookedUp, now: float) -> None:
        if event.outcome is Lookup.HIT:
            self._hits[event.request_id] = event.seconds
            if len(self._hits) > MOST_HITS:
                self._hits.popitem(last=False)

    def _spared(self, event: Spared, now: float) -> None:
        """Measures a request served from cache, which the engine never receives, by its lookup time."""
        if event.layer not in _SERVED or event.request_id in self._lives:
            return
        seconds = self._hits.pop(event.request_id, None)
        arrived = now if seconds is None else now - seconds
        if arrived < self.assignment.began:
            return
        values = {"failed_share": 0.0, "cached_share": 1.0}
        if seconds is not None:
            values |= {"ttft_mean_seconds": _log(seconds), "e2e_mean_seconds": _log(seconds)}
            values["normalized_latency_seconds"] = _log(seconds / max(1, event.output_tokens))
        unit = self.assignment.unit(event.request_id, event.tenant, arrived)
        covariates = (math.log1p(event.prompt_tokens), math.log1p(len(self._lives)))
        if self.assignment.by is By.TENANT:
            self._enter(unit, event.tenant, arrived, covariates)
        self._measured(unit, event.tenant, values, covariates)

    def _measured(
        self, unit: str, tenant: str, values: dict[str, float], covariates: tuple[float, float]
    ) -> None:
        period = self._periods.get(unit)
        if period is None:
            self._add(unit, tenant, values, covariates)
            return
        period.requests += 1
        for name, value in values.items():
            period.sums[name] = period.sums.get(name, 0.0) + value
            period.counts[name] = period.counts.get(name, 0) + 1

    def _add(
        self, unit: str, tenant: str, values: Mapping[str, float], covariates: tuple[float, float]
    ) -> None:
        if values:
            self._done.append(Unit(tenant, self.assignment.treats(unit), values, covariates))


def _means(period: _Period) -> dict[str, float]:
    return {name: total / period.counts[name] for name, total in period.sums.items()}


def _log(seconds: float) -> float:
    return math.log(max(seconds, 1e-6))
