"""The cost ledger as JSON: the cost of one request, of one tenant by day and class, and of the whole device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from headrace.observe.cost.account import Account, Billed, Cost, Saving, UnusedDay
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
    """Reports of a ledger as JSON.

    ``model`` is the name of the only model. ``energy`` returns the measurements of `observe.resources`.
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
        drafted = self.ledger.draft_seconds_of(request_id)
        drafts = {"draft_seconds": drafted} if drafted else {}
        if not pricing.given:
            return {"device_seconds": cost.device_seconds, **drafts}
        return {"total": cost.total, **cost_fields(cost, pricing.currency), **drafts}

    def tenants(self) -> set[str]:
        """All tenants with an account."""
        return {key.tenant for key in self.ledger.accounts}

    def sum_of(self, tenant: str) -> Cost:
        """Cost of all requests of a tenant, on days with separate accounts."""
        total = Account()
        for billed in self.rows(tenant):
            total.add(billed.account)
        return total.cost(self.ledger.pricing)

    def tenant(self, tenant: str) -> dict[str, Any]:
        """One tenant's cost: the sum, and ``costs`` for each day and class."""
        return tenant_costs(self.rows(tenant), self.ledger.pricing.currency)

    def rows(self, tenant: str | None = None) -> Iterator[Billed]:
        """The accounts of a tenant (None: of all tenants) in order of day, tenant and class."""
        for key, account in sorted(self.ledger.accounts.items(), key=lambda each: each[0]):
            if tenant is None or key.tenant == tenant:
                yield Billed(key, self.model, self.ledger.pricing, account)

    def unused_days(self) -> Iterator[UnusedDay]:
        """The unused time of each day."""
        for day, unused in sorted(self.ledger.unused.items()):
            yield UnusedDay(day, self.model, self.ledger.pricing, unused.idle, unused.overhead)

    def device(self, now: float) -> dict[str, Any]:
        """The use of the device's time, and the check that the parts add up to the wall clock."""
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
            "draft_seconds": self.ledger.draft_seconds,
            "conservation_error": balance.error,
            "energy": self.energy(),
        }


def tenant_costs(rows: Iterable[Billed], currency: str) -> dict[str, Any]:
    """The cost of accounts: the sum, and ``costs`` for each of them."""
    costs, entries = [Cost(0.0, 0.0, 0.0, 0.0)], []
    for key, model, pricing, account in rows:
        cost = account.cost(pricing)
        costs.append(cost)
        entries.append(
            {
                "day": day_text(key.day),
                "service_class": key.service_class,
                "model": model,
                "requests": account.requests,
                "prompt_tokens": account.prompt_tokens + account.cached_tokens,
                "cached_tokens": account.cached_tokens,
                "output_tokens": account.output_tokens,
                "cost": cost.total,
                "cost_details": cost_fields(cost, pricing.currency),
            }
        )
    total = Cost(*map(sum, zip(*costs, strict=True)))
    return {"cost": total.total, "cost_details": cost_fields(total, currency), "costs": entries}


def saved_fields(savings: Iterable[Saving]) -> dict[str, Any]:
    """The savings of each cache layer."""
    return {
        "saved": {
            each.layer: {
                "hits": each.hits,
                "saved_prompt_tokens": each.prompt_tokens,
                "saved_output_tokens": each.output_tokens,
                "saved_cost": each.cost,
            }
            for each in savings
        }
    }


def day_text(day: int) -> str:
    """A day as ``2026-01-31``."""
    return datetime.fromtimestamp(day * DAY_SECONDS, UTC).date().isoformat()
