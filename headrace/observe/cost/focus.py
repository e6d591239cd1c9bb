"""The cost ledger as CSV in the columns of FOCUS, the FinOps Open Cost and Usage Specification (https://focus.finops.org).

A row is the use of a tenant in a class on a day: one row of device time, or one row for each kind of tokens if these
have prices. Time that no request used has rows of its own, without a sub account. Columns that begin with ``x_`` are
extensions. The model is the resource, and the tenant is the sub account.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from headrace.observe.cost.account import Account, Key
from headrace.observe.cost.ledger import DAY_SECONDS
from headrace.observe.cost.report import CostReport

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


def focus_csv(report: CostReport, tenant: str | None = None) -> str:
    """The ledger, or the part of one tenant, as CSV."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(_rows(report, tenant))
    return text.getvalue()


def _rows(report: CostReport, tenant: str | None) -> Iterator[dict[str, object]]:
    pricing = report.ledger.pricing
    per_hour = 3600 * pricing.device_second
    for key, account in report.rows(tenant):
        first = True
        for charge in _charges(report, account):
            yield _row(report, key.day, charge) | _use(key, account if first else Account(), per_hour)
            first = False
    if tenant is None and pricing.device_second > 0:
        for day, unused in sorted(report.ledger.unused.items()):
            for name, seconds in (("idle", unused.idle), ("overhead", unused.overhead)):
                charge = _Charge(f"device-{name}", f"Device time: {name}", seconds / 3600, "Hours", per_hour)
                yield _row(report, day, charge) | {
                    "x_DeviceSeconds": seconds,
                    "x_DeviceCost": _number(charge.cost),
                }


def _charges(report: CostReport, account: Account) -> Iterator[_Charge]:
    pricing = report.ledger.pricing
    if not pricing.by_token:
        hours = account.seconds / 3600
        yield _Charge("device-time", "Device time of requests", hours, "Hours", 3600 * pricing.device_second)
        return
    counts = (account.prompt_tokens, account.cached_tokens, account.output_tokens)
    for name, count, price in zip(("prompt", "cached", "output"), counts, pricing.tokens, strict=True):
        yield _Charge(
            f"{name}-tokens", f"{name.capitalize()} tokens", float(count), "Tokens", price / _MILLION
        )


def _row(report: CostReport, day: int, charge: _Charge) -> dict[str, object]:
    began = datetime.fromtimestamp(day * DAY_SECONDS, UTC)
    month = began.replace(day=1)
    following = (month + timedelta(days=32)).replace(day=1)
    cost, price, quantity = _number(charge.cost), _number(charge.unit_price), _number(charge.quantity)
    return {
        "BilledCost": cost,
        "BillingAccountId": "headrace",
        "BillingAccountName": PROVIDER,
        "BillingCurrency": report.ledger.pricing.currency,
        "BillingPeriodStart": _time(month),
        "BillingPeriodEnd": _time(following),
        "ChargeCategory": "Usage",
        "ChargeDescription": f"{charge.text}, {report.model}",
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
        "ResourceId": report.model,
        "ResourceName": report.model,
        "ResourceType": "Model",
        "ServiceCategory": "AI and Machine Learning",
        "ServiceName": "LLM inference",
        "ServiceSubcategory": "Generative AI",
        "SkuId": charge.sku,
        "SkuPriceId": charge.sku,
        "Tags": "{}",
    }


def _use(key: Key, account: Account, per_hour: float) -> dict[str, object]:
    """Who used it, and the use itself, in the first of the rows of an account."""
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
