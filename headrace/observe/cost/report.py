"""The cost ledger as JSON: the cost of one request, of one tenant by day and class, and of the whole device."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple, Protocol

from headrace.observe.cost.ledger import (
    DAY_SECONDS,
    Account,
    Billed,
    Cost,
    CostLedger,
    Key,
    Saving,
    UnusedDay,
)
from headrace.observe.cost.prices import Pricing


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

    def __init__(self, ledger: CostLedger, model: str) -> None:
        self.ledger = ledger
        self.model = model
        self.energy: Callable[[], Mapping[str, Any] | str] = str

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


# The cost ledger as CSV in the columns of FOCUS, the FinOps Open Cost and Usage Specification (https://focus.finops.org).

PROVIDER = "Headrace"

COLUMNS = (
    *("BilledCost", "BillingAccountId", "BillingAccountName", "BillingCurrency"),
    *("BillingPeriodEnd", "BillingPeriodStart", "ChargeCategory", "ChargeClass", "ChargeDescription"),
    *("ChargeFrequency", "ChargePeriodEnd", "ChargePeriodStart", "ConsumedQuantity", "ConsumedUnit"),
    *("ContractedCost", "ContractedUnitPrice", "EffectiveCost", "InvoiceIssuerName"),
    *("ListCost", "ListUnitPrice", "PricingCategory", "PricingQuantity", "PricingUnit"),
    *("ProviderName", "PublisherName", "ResourceId", "ResourceName", "ResourceType"),
    *("ServiceCategory", "ServiceName", "ServiceSubcategory", "SkuId", "SkuPriceId"),
    *("SubAccountId", "SubAccountName", "Tags"),
    *(
        "x_ServiceClass",
        "x_Requests",
        "x_PromptTokens",
        "x_CachedTokens",
        "x_OutputTokens",
        "x_DeviceSeconds",
    ),
    "x_DeviceCost",
)

_MILLION = 1e6


class _Charge(NamedTuple):
    """One charge: its SKU, quantity, unit, price of a unit, and cost."""

    sku: str
    text: str
    quantity: float
    unit: str
    unit_price: float

    @property
    def cost(self) -> float:
        return self.quantity * self.unit_price


class Accounts(Protocol):
    """Accounts by day, tenant and class: those of a ledger, or of a file."""

    def rows(self, tenant: str | None = None) -> Iterable[Billed]: ...

    def unused_days(self) -> Iterable[UnusedDay]: ...


def focus_csv(accounts: Accounts, tenant: str | None = None) -> str:
    """The accounts, or those of one tenant, as CSV."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(_rows(accounts, tenant))
    return text.getvalue()


def _rows(accounts: Accounts, tenant: str | None) -> Iterator[dict[str, object]]:
    for key, model, pricing, account in accounts.rows(tenant):
        first = True
        per_hour = 3600 * pricing.device_second
        for charge in _charges(pricing, account):
            use = _use(key, account if first else Account(), per_hour)
            yield _row(model, pricing.currency, key.day, charge) | use
            first = False
    if tenant is not None:
        return
    for day in accounts.unused_days():
        per_hour = 3600 * day.pricing.device_second
        if per_hour <= 0.0:
            continue
        for name, seconds in (("idle", day.idle), ("overhead", day.overhead)):
            charge = _Charge(f"device-{name}", f"Device time: {name}", seconds / 3600, "Hours", per_hour)
            yield _row(day.model, day.pricing.currency, day.day, charge) | {
                "x_DeviceSeconds": seconds,
                "x_DeviceCost": _number(charge.cost),
            }


def _charges(pricing: Pricing, account: Account) -> Iterator[_Charge]:
    if not pricing.by_token:
        hours = account.seconds / 3600
        yield _Charge("device-time", "Device time of requests", hours, "Hours", 3600 * pricing.device_second)
        return
    counts = (account.prompt_tokens, account.cached_tokens, account.output_tokens)
    for name, count, price in zip(("prompt", "cached", "output"), counts, pricing.tokens, strict=True):
        yield _Charge(
            f"{name}-tokens", f"{name.capitalize()} tokens", float(count), "Tokens", price / _MILLION
        )


def _row(model: str, currency: str, day: int, charge: _Charge) -> dict[str, object]:
    began = datetime.fromtimestamp(day * DAY_SECONDS, UTC)
    month = began.replace(day=1)
    following = (month + timedelta(days=32)).replace(day=1)
    cost, price, quantity = _number(charge.cost), _number(charge.unit_price), _number(charge.quantity)
    return {
        "BilledCost": cost,
        "BillingAccountId": "headrace",
        "BillingAccountName": PROVIDER,
        "BillingCurrency": currency,
        "BillingPeriodStart": _time(month),
        "BillingPeriodEnd": _time(following),
        "ChargeCategory": "Usage",
        "ChargeDescription": f"{charge.text}, {model}",
        "ChargeFrequency": "Usage-Based",
        "ChargePeriodStart": _time(began),
        "ChargePeriodEnd": _time(began + timedelta(days=1)),
        "ConsumedQuantity": quantity,
        "ConsumedUnit": charge.unit,
        "ContractedCost": cost,
        "ContractedUnitPrice": price,
        "EffectiveCost": cost,
        "InvoiceIssuerName": PROVIDER,
        "ListCost": cost,
        "ListUnitPrice": price,
        "PricingCategory": "Standard",
        "PricingQuantity": quantity,
        "PricingUnit": charge.unit,
        "ProviderName": PROVIDER,
        "PublisherName": PROVIDER,
        "ResourceId": model,
        "ResourceName": model,
        "ResourceType": "Model",
        "ServiceCategory": "AI and Machine Learning",
        "ServiceName": "LLM inference",
        "ServiceSubcategory": "Generative AI",
        "SkuId": charge.sku,
        "SkuPriceId": charge.sku,
        "Tags": "{}",
    }


def _use(key: Key, account: Account, per_hour: float) -> dict[str, object]:
    """Columns of the tenant, and of its usage in the first row of an account."""
    return {
        "SubAccountId": key.tenant,
        "SubAccountName": key.tenant,
        "Tags": json.dumps({"service_class": key.service_class}),
        "x_ServiceClass": key.service_class,
        "x_Requests": account.requests,
        "x_PromptTokens": account.prompt_tokens,
        "x_CachedTokens": account.cached_tokens,
        "x_OutputTokens": account.output_tokens,
        "x_DeviceSeconds": _number(account.seconds),
        "x_DeviceCost": _number(account.seconds * per_hour / 3600),
    }


def _number(value: float) -> str:
    """A number without an exponent, as many readers of CSV expect."""
    return format(value, ".12f").rstrip("0").rstrip(".") or "0"


def _time(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
