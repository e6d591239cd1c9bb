"""Each tenant's share of the service, its usage, quota and cost, as plain values for JSON."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from headrace.observe.cost.report import CostReport
from headrace.observe.dashboard.reading import LONGEST_GAP_SECONDS, WINDOW_SECONDS, latency
from headrace.observe.goodput import Goodput
from headrace.observe.requests import RequestSummary
from headrace.observe.usage import UsageBook

MOST_TENANTS = 200
"""Maximum number of tenants in a snapshot, by share of the last minute; others are only counted."""

Limits = Callable[[str], Mapping[str, Mapping[str, float]]]
"""The quotas of a tenant, by name: limit, remaining, reset_seconds."""


class TenantTable:
    """The table of tenants; ``weight`` and ``limits`` return a tenant's weight and quotas."""

    def __init__(
        self,
        usage: UsageBook,
        goodput: Goodput,
        cost: CostReport,
        weight: Callable[[str], float],
        limits: Limits,
    ) -> None:
        self._usage = usage
        self._goodput = goodput
        self._cost = cost
        self._weight = weight
        self._limits = limits

    def all(self) -> dict[str, Any]:
        """All tenants, and Jain's fairness index."""
        shares = self._goodput.tenant_shares()
        names = sorted(self._usage.tenants(), key=lambda name: (-shares.get(name, (0.0, 0.0))[0], name))
        return self._table(names[:MOST_TENANTS], self._goodput.jain, len(names))

    def one(self, tenant: str) -> dict[str, Any]:
        """One tenant, without the fairness index."""
        return self._table([tenant], None, 1)

    def _table(self, names: list[str], jain: float | None, known: int) -> dict[str, Any]:
        shares = self._goodput.tenant_shares()
        served = sum(each for each, _ in shares.values())
        return {
            "jain": jain,
            "currency": self._cost.ledger.pricing.currency,
            "tenants": [self._row(name, *shares.get(name, (0.0, 0.0)), served) for name in names],
            "more": known - len(names),
        }

    def _row(self, name: str, served: float, fair: float, total: float) -> dict[str, Any]:
        used, cost = self._usage.account(name), self._cost.sum_of(name)
        return {
            "name": name,
            "weight": self._weight(name),
            "open_requests": used["open_requests"],
            "requests": used["requests"],
            "tokens": used["computed_tokens"] + used["generated_tokens"],
            "share": served / total if total > 0.0 else 0.0,
            "fair_share": fair / total if total > 0.0 else 0.0,
            "refused": sum(used["refused"].values()),
            "cost": cost.total,
            "device_seconds": cost.device_seconds,
            "limits": self._limits(name),
        }


# The overview of one tenant: only its own requests, tokens, savings and cost.

MOST_OPEN_TENANTS = 1000
"""Maximum number of tenants with readings; when it is exceeded, all readings are dropped."""


class _Used(NamedTuple):
    """Counts of a tenant at one time."""

    at: float
    ended: int
    prompt: int
    cached: int
    generated: int


class TenantReadings:
    """The recent readings of each tenant with an open page."""

    def __init__(self, usage: UsageBook) -> None:
        self._usage = usage
        self._kept: dict[str, deque[_Used]] = {}

    def overview(
        self,
        tenant: str,
        requests: Sequence[RequestSummary],
        savings: Mapping[str, Any],
        cost: CostReport,
        now: float,
    ) -> dict[str, Any]:
        """The overview of a tenant, from its ``requests`` and ``savings``. Server-wide values are None."""
        pricing = cost.ledger.pricing
        states = [each.state for each in requests]
        return {
            "tenant": tenant,
            "running": states.count("running"),
            "waiting": states.count("waiting"),
            "slots": None,
            "rates": self._rates(tenant, now),
            "latency": latency(requests, now),
            "batch": None,
            "kv": None,
            "shares": None,
            "caches": {
                name: {"hits": layer["hits"], "hit_rate": None} for name, layer in savings["layers"].items()
            },
            "classes": None,
            "cost": None
            if not pricing.given
            else {
                "currency": pricing.currency,
                "per_million_tokens": None,
                "per_hour": None,
                "total": cost.sum_of(tenant).total,
            },
            "bottleneck": None,
        }

    def _rates(self, tenant: str, now: float) -> dict[str, float | None] | None:
        account = self._usage.account(tenant)
        used = _Used(
            now,
            sum(account["finished"].values()),
            account["computed_tokens"] + account["cached_tokens"],
            account["cached_tokens"],
            account["generated_tokens"],
        )
        if len(self._kept) >= MOST_OPEN_TENANTS and tenant not in self._kept:
            self._kept.clear()
        kept = self._kept.setdefault(tenant, deque())
        if kept and now - kept[-1].at > LONGEST_GAP_SECONDS:
            kept.clear()
        kept.append(used)
        while len(kept) > 2 and kept[1].at <= now - WINDOW_SECONDS:
            kept.popleft()
        first = kept[0]
        seconds = now - first.at
        if seconds <= 0.0:
            return None
        return {
            "requests": (used.ended - first.ended) / seconds,
            "prompt_tokens": (used.prompt - first.prompt) / seconds,
            "cached_tokens": (used.cached - first.cached) / seconds,
            "output_tokens": (used.generated - first.generated) / seconds,
            "steps": None,
        }


# The list of requests as rows: open requests, then ended ones, each newest first.

COLUMNS = (
    "id",
    "state",
    "why",
    "tenant",
    "service_class",
    "prompt_tokens",
    "cached_tokens",
    "output_tokens",
    "age_seconds",
    "ttft_seconds",
    "preemptions",
)

MOST_ROWS = 2000
"""Maximum number of rows of a snapshot; further requests are only counted."""


def request_rows(requests: Sequence[RequestSummary], now: float) -> dict[str, Any]:
    """The rows with their columns, and how many requests are not shown (``more``)."""
    return {
        "columns": COLUMNS,
        "rows": [_row(each, now) for each in requests[:MOST_ROWS]],
        "more": max(0, len(requests) - MOST_ROWS),
    }


def _row(each: RequestSummary, now: float) -> list[Any]:
    """The values in the order of `COLUMNS`."""
    until = now if each.ended is None else each.ended
    return [
        each.id,
        each.state,
        each.why,
        each.tenant,
        each.service_class,
        each.prompt_tokens,
        each.cached_tokens,
        each.output_tokens,
        round(max(0.0, until - each.arrived), 4),
        None if each.first is None else round(each.first - each.arrived, 5),
        each.preemptions,
    ]
