"""The overview of one tenant: only its own requests, tokens, savings and cost."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from headrace.observe.cost.report import CostReport
from headrace.observe.dashboard.latency import latency
from headrace.observe.dashboard.reading import LONGEST_GAP_SECONDS, WINDOW_SECONDS
from headrace.observe.requests import RequestSummary
from headrace.observe.usage import UsageBook

MOST_TENANTS = 1000
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
        if len(self._kept) >= MOST_TENANTS and tenant not in self._kept:
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
