"""Each tenant's share of the service, its usage, quota and cost, as plain values for JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from headrace.observe.cost.report import CostReport
from headrace.observe.goodput import Goodput
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
