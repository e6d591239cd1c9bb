"""The ledger as JSON, as FOCUS columns and as metrics."""

from __future__ import annotations

import csv
import io

import pytest

from headrace.observe.cost.ledger import MOST_DAYS, CostLedger, CostMeter
from headrace.observe.cost.prices import Pricing, TokenPrices
from headrace.observe.cost.report import COLUMNS, CostReport, focus_csv
from headrace.observe.metrics_page import MetricsPage
from tests.observe.cost.test_ledger import DAY, one_request

HOUR = 3600.0
DEVICE = Pricing(2.0 / HOUR, currency="EUR")
TOKENS = Pricing(2.0 / HOUR, TokenPrices(10.0, 1.0, 40.0), "EUR")


def ledger(pricing: Pricing) -> CostLedger:
    """Two tenants, one of them on two days; the first day is 2024-10-04."""
    made = CostLedger(pricing, clock_offset=20_000 * DAY)
    one_request(made, "x", 10.0, "a")
    one_request(made, "y", 20.0, "b")
    one_request(made, "z", DAY + 10.0, "a")
    return made


def rows(pricing: Pricing, tenant: str | None = None) -> list[dict[str, str]]:
    text = focus_csv(CostReport(ledger(pricing), "fox"), tenant)
    return list(csv.DictReader(io.StringIO(text)))


def test_a_tenant_by_day() -> None:
    shown = CostReport(ledger(DEVICE), "fox").tenant("a")
    assert shown["cost"] == pytest.approx(4 * 2 / HOUR)
    assert shown["cost_details"]["device_seconds"] == 4.0
    assert [(each["day"], each["requests"], each["model"]) for each in shown["costs"]] == [
        ("2024-10-04", 1, "fox"),
        ("2024-10-05", 1, "fox"),
    ]
    assert CostReport(ledger(DEVICE), "fox").tenant("nobody")["cost"] == 0.0


def test_the_cost_of_several_requests() -> None:
    report = CostReport(ledger(DEVICE), "fox")
    assert report.usage_cost(["x", "y", "unknown"])["cost_details"]["device_seconds"] == 4.0
    assert report.request("x")["total"] == pytest.approx(2 * 2 / HOUR)
    assert CostReport(ledger(Pricing()), "fox").request("x") == {"device_seconds": 2.0}


def test_focus_has_a_row_for_device_time_and_rows_for_unused_time() -> None:
    found = rows(DEVICE)
    assert found[0].keys() == set(COLUMNS)
    used = [row for row in found if row["SubAccountId"]]
    assert [(row["SubAccountId"], row["ChargePeriodStart"]) for row in used] == [
        ("a", "2024-10-04T00:00:00Z"),
        ("b", "2024-10-04T00:00:00Z"),
        ("a", "2024-10-05T00:00:00Z"),
    ]
    for row in used:
        assert float(row["BilledCost"]) == pytest.approx(4 / HOUR, rel=1e-6)
        assert (row["PricingUnit"], row["BillingCurrency"]) == ("Hours", "EUR")
        assert (row["BillingPeriodStart"], row["BillingPeriodEnd"]) == (
            "2024-10-01T00:00:00Z",
            "2024-11-01T00:00:00Z",
        )
    seconds = sum(float(row["x_DeviceSeconds"]) for row in found)
    assert seconds == pytest.approx(DAY + 13.0)
    assert {row["SkuId"] for row in found} == {"device-time", "device-idle", "device-overhead"}


def test_focus_has_a_row_for_each_kind_of_tokens() -> None:
    found = rows(TOKENS, "b")
    assert [(row["SkuId"], row["ConsumedQuantity"]) for row in found] == [
        ("prompt-tokens", "4"),
        ("cached-tokens", "0"),
        ("output-tokens", "1"),
    ]
    assert sum(float(row["BilledCost"]) for row in found) == pytest.approx(80e-6)
    assert [row["x_Requests"] for row in found] == ["1", "0", "0"]
    assert {row["SubAccountId"] for row in found} == {"b"}


def test_idle_time_over_midnight_belongs_to_both_days() -> None:
    unused = ledger(DEVICE).unused
    assert unused[20_000].idle + unused[20_000].overhead == pytest.approx(DAY - 4.0)
    assert unused[20_001].idle == pytest.approx(10.0)


def metric(page: MetricsPage, line: str) -> float:
    (found,) = [each for each in page.render().decode().splitlines() if each.startswith(f"headrace:{line} ")]
    return float(found.split()[-1])


def test_metrics() -> None:
    page, made = MetricsPage(), ledger(DEVICE)
    CostMeter(page, made, lambda: DAY + 113.0)
    assert metric(page, 'device_seconds_total{use="attributed"}') == 6.0
    assert metric(page, 'device_seconds_total{use="idle"}') == pytest.approx(DAY + 104.0)
    assert metric(page, 'device_seconds_total{use="overhead"}') == 3.0
    assert metric(page, 'tenant_cost_total{tenant="a"}') == pytest.approx(8 / HOUR)
    assert metric(page, 'tenant_device_seconds_total{tenant="b"}') == 2.0
    assert metric(page, 'step_kind_seconds_total{kind="prefill"}') == 6.0
    assert metric(page, "cost_conservation_error") < 1e-12


def test_a_tenant_never_gets_cheaper() -> None:
    """Days that are forgotten still count."""
    page, made = MetricsPage(), CostLedger(DEVICE)
    CostMeter(page, made, lambda: 0.0, tenants=2)
    for day in range(MOST_DAYS + 5):
        one_request(made, f"r{day}", day * DAY)
    assert metric(page, 'tenant_device_seconds_total{tenant="a"}') == 2.0 * (MOST_DAYS + 5)
    for number, tenant in enumerate("bcd"):
        one_request(made, tenant, (200 + number) * DAY, tenant)
    assert metric(page, 'tenant_device_seconds_total{tenant="b"}') == 2.0
    assert metric(page, 'tenant_device_seconds_total{tenant="other"}') == 4.0
