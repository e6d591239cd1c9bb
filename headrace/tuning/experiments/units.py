"""The metrics of single requests and tenants, folded from events, for experiments by request or tenant.

A request counts when it ends; its covariates are prompt length and load at its arrival. A tenant counts when its period
is over and its requests have ended, with the means over them. Requests of background classes do not count.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from headrace.core.events import Arrived, Emitted, Event, Finished, Layer, LookedUp, Lookup, Spared
from headrace.core.request import FinishReason
from headrace.core.tenancy.tenants import is_awaited
from headrace.tuning.experiments.arms import Assignment, By
from headrace.tuning.experiments.measures import BAD, COMPLETED, METRICS, Metric

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
