"""The cost ledger as JSON: the cost of one request, of one tenant by day and class, and of the whole device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from headrace.observe.cost.account import Account, Cost, Key
from headrace.observe.cost.ledger import DAY_SECONDS, CostLedger


def cost_fields(cost: Cost, currency: str) -> dict[str, Any]:
    """A cost as the fields of ``cost_details``."""
    return {
        "currency": currency,
        "device_seconds": cost.device_seconds,
        "device_cost": cost.device,
        "token_cost": cost.tokens,
    }


class CostReport:
    """What the server shows of a ledger.

    ``model`` is the name of the only model. ``energy`` returns what `observe.resources` has measured.
    """

    def __init__(
        self, ledger: CostLedger, model: str, energy: Callable[[], Mapping[str, Any] | str] = str
    ) -> None:
        self.ledger = ledger
        self.model = model
        self.energy = energy

    def usage_cost(self, request_ids: Iterable[str]) -> dict[str, Any]:
        """``cost`` and ``cost_details`` of a call, for its ``usage``."""
        cost = Cost(*map(sum, zip(*(self.ledger.cost(each) for each in request_ids), strict=True)))
        return {"cost": cost.total, "cost_details": cost_fields(cost, self.ledger.pricing.currency)}

    def request(self, request_id: str) -> dict[str, Any]:
        """The cost of a request, for its explanation; only its device time if there are no prices."""
        cost, pricing = self.ledger.cost(request_id), self.ledger.pricing
        if not pricing.given:
            return {"device_seconds": cost.device_seconds}
        return {"total": cost.total, **cost_fields(cost, pricing.currency)}

    def tenants(self) -> set[str]:
        """All tenants with an account."""
        return {key.tenant for key in self.ledger.accounts}

    def sum_of(self, tenant: str) -> Cost:
        """What all requests of a tenant have cost, on days that have accounts of their own."""
        total = Account()
        for _, account in self.rows(tenant):
            total.add(account)
        return total.cost(self.ledger.pricing)

    def tenant(self, tenant: str) -> dict[str, Any]:
        """One tenant's cost: the sum, and ``costs`` for each day and class."""
        total = Account()
        entries = []
        for key, account in self.rows(tenant):
            total.add(account)
            entries.append(
                {
                    "day": day_text(key.day),
                    "service_class": key.service_class,
                    "model": self.model,
                    **self._fields(account),
                }
            )
        cost = total.cost(self.ledger.pricing)
        details = cost_fields(cost, self.ledger.pricing.currency)
        return {"cost": cost.total, "cost_details": details, "costs": entries}

    def rows(self, tenant: str | None = None) -> Iterator[tuple[Key, Account]]:
        """The accounts of a tenant (None: of all tenants) in order of day, tenant and class."""
        for key, account in sorted(self.ledger.accounts.items()):
            if tenant is None or key.tenant == tenant:
                yield key, account

    def device(self, now: float) -> dict[str, Any]:
        """What the whole device has done with its time, and the check that the parts add up to the wall clock."""
        balance = self.ledger.balance(now)
        price = self.ledger.pricing.device_second
        parts = {"attributed": balance.attributed, "idle": balance.idle, "overhead": balance.overhead}
        return {
            "currency": self.ledger.pricing.currency,
            "price_per_hour": 3600 * price,
            "wall_seconds": balance.wall,
            "wall_cost": balance.wall * price,
            **{f"{name}_seconds": seconds for name, seconds in parts.items()},
            **{f"{name}_cost": seconds * price for name, seconds in parts.items()},
            "conservation_error": balance.error,
            "energy": self.energy(),
        }

    def _fields(self, account: Account) -> dict[str, Any]:
        pricing = self.ledger.pricing
        cost = account.cost(pricing)
        return {
            "requests": account.requests,
            "prompt_tokens": account.prompt_tokens + account.cached_tokens,
            "cached_tokens": account.cached_tokens,
            "output_tokens": account.output_tokens,
            "cost": cost.total,
            "cost_details": cost_fields(cost, pricing.currency),
        }


def day_text(day: int) -> str:
    """A day as ``2026-01-31``."""
    return datetime.fromtimestamp(day * DAY_SECONDS, UTC).date().isoformat()
