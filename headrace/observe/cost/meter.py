"""Metrics of the cost ledger: device time by use and by kind of step, cost of each tenant, and the check of the sum."""

from __future__ import annotations

from collections.abc import Callable

from headrace.observe.cost.account import Account
from headrace.observe.cost.ledger import CostLedger
from headrace.observe.metrics_page import MetricsPage


class CostMeter:
    """Writes to ``page`` before it is rendered.

    ``clock`` is the engine's. Tenants beyond the first ``tenants`` are counted as ``other``.
    """

    def __init__(
        self, page: MetricsPage, ledger: CostLedger, clock: Callable[[], float], tenants: int = 100
    ) -> None:
        self._ledger = ledger
        self._clock = clock
        self._device = page.counter(
            "device_seconds",
            "Wall clock by use: attributed to requests, idle (no request is open), or overhead (requests are open, "
            "but no step computes).",
            ["use"],
        )
        self._kinds = page.counter(
            "step_kind_seconds",
            "Time of steps that contained only prefill rows, only decode rows, or both (mixed).",
            ["kind"],
        )
        self._tenants = page.counter(
            "tenant_cost", "Cost of a tenant's requests, in --currency.", ["tenant"], limit=tenants
        )
        self._seconds = page.counter(
            "tenant_device_seconds", "Device time of a tenant's requests.", ["tenant"], limit=tenants
        )
        self._error = page.gauge(
            "cost_conservation_error",
            "Relative difference between the wall clock and the sum of attributed, idle and overhead time; above 0.001 "
            "it is a bug.",
        ).of()
        page.before_render(self.measure)

    def measure(self) -> None:
        """Bring all metrics up to date."""
        balance = self._ledger.balance(self._clock())
        for use in ("attributed", "idle", "overhead"):
            cell = self._device.of(use)
            cell.value = max(
                cell.value, getattr(balance, use)
            )  # what is idle now may turn out to be overhead
        for kind, seconds in self._ledger.kinds.items():
            self._kinds.of(kind).value = seconds
        self._error.value = balance.error
        totals: dict[str, Account] = {}
        recent = ((key.tenant, account) for key, account in self._ledger.accounts.items())
        for tenant, account in (*self._ledger.older.items(), *recent):
            totals.setdefault(tenant, Account()).add(account)
        costs: dict[int, float] = {}
        for tenant, account in totals.items():
            cost = account.cost(self._ledger.pricing)
            for family, value in ((self._tenants, cost.total), (self._seconds, cost.device_seconds)):
                cell = family.of(tenant)
                costs[id(cell)] = costs.get(id(cell), 0.0) + value
                cell.value = costs[id(cell)]
