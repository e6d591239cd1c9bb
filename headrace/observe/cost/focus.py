"""The cost ledger as CSV in the columns of FOCUS, the FinOps Open Cost and Usage Specification (https://focus.finops.org).

A row is the usage of a tenant in a class on a day: one row of device time, or one row for each kind of tokens if these
have prices. Unused time has separate rows without a sub account. Columns that begin with ``x_`` are extensions. The
model is the resource, and the tenant is the sub account.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import NamedTuple, Protocol

from headrace.observe.cost.account import Account, Billed, Key, UnusedDay
from headrace.observe.cost.ledger import DAY_SECONDS
from headrace.observe.cost.prices import Pricing

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
