"""Usage in a file: several processes add to it, at the prices of their time."""

from __future__ import annotations

import csv
import io
import sqlite3
from pathlib import Path

import pytest

from headrace.core.events import AdmitReason, Admitted, Arrived, Finished, Layer, Spared
from headrace.core.request import FinishReason
from headrace.observe.cost import usage
from headrace.observe.cost.ledger import MOST_DAYS, CostLedger
from headrace.observe.cost.prices import Pricing, TokenPrices
from headrace.observe.cost.report import CostReport
from headrace.observe.cost.usage import KEPT_DAYS, TenantSavings, UsageJournal, UsageStore
from tests.observe.cost.test_ledger import DAY, one_request

CHEAP, DEAR = Pricing(0.5, currency="EUR"), Pricing(2.0, currency="EUR")
FIRST = 20_000


class Process:
    """A server that counts from zero, and a journal of it."""

    def __init__(self, pricing: Pricing = CHEAP, day: int = FIRST, model: str = "fox") -> None:
        self.ledger = CostLedger(pricing, clock_offset=day * DAY)
        self.savings = TenantSavings(lambda: TokenPrices(1e6, 0.0, 1e6))
        self.day = day
        self.journal = UsageJournal(CostReport(self.ledger, model), self.savings, lambda: self.day * DAY)


def test_the_journal_returns_each_use_once() -> None:
    process = Process()
    assert process.journal.take().empty
    one_request(process.ledger, "x", 10.0)
    process.savings.fold(Spared("s", "a", Layer.EXACT, 3, 4, 1.0), 14.0)
    used = process.journal.take()
    assert [(each.key.tenant, each.account.seconds, each.account.requests) for each in used.rows] == [
        ("a", 2.0, 1)
    ]
    assert [(each.layer, each.hits, each.cost) for each in used.savings] == [("exact", 1, 7.0)]
    assert sum(each.idle + each.overhead for each in used.unused) == 11.0
    assert process.journal.take().empty
    one_request(process.ledger, "y", 20.0)
    (again,) = process.journal.take().rows
    assert (again.account.seconds, again.account.output_tokens) == (2.0, 1)


def test_the_journal_forgets_the_days_that_the_ledger_has_merged() -> None:
    process = Process()
    for day in range(2 * MOST_DAYS):
        one_request(process.ledger, f"r{day}", day * DAY + 10.0)
        (row,) = process.journal.take().rows
        assert (row.key.day, row.account.requests) == (FIRST + day, 1)
    assert len(process.journal._accounts) <= MOST_DAYS
    assert len(process.journal._unused) <= MOST_DAYS


def test_several_processes_add_up_by_day_model_and_price(tmp_path: Path) -> None:
    path = tmp_path / "usage.db"
    runs = [Process(), Process(), Process(DEAR), Process(day=FIRST + 1), Process(model="owl")]
    for process in runs:
        one_request(process.ledger, "x", 10.0)
        process.savings.fold(Spared("s", "a", Layer.SEMANTIC, 3, 4, 1.0), 14.0)
        store = UsageStore(path, "EUR")
        store.add(process.journal.take())
        store.close()
    store = UsageStore(path, "EUR")
    shown = store.tenant("a")
    assert [(each["day"], each["model"], each["requests"], each["cost"]) for each in shown["costs"]] == [
        ("2024-10-04", "fox", 2, 2.0),
        ("2024-10-04", "fox", 1, 4.0),
        ("2024-10-04", "owl", 1, 1.0),
        ("2024-10-05", "fox", 1, 1.0),
    ]
    assert (shown["cost"], shown["cost_details"]["device_seconds"]) == (8.0, 10.0)
    assert shown["saved"]["semantic"] == {
        "hits": 5,
        "saved_prompt_tokens": 15,
        "saved_output_tokens": 20,
        "saved_cost": 35.0,
    }
    assert store.tenants() == ["a"]
    assert store.tenant("nobody") == {**store.tenant("nobody"), "cost": 0, "costs": [], "saved": {}}
    rows = list(csv.DictReader(io.StringIO(store.focus(None))))
    assert sum(float(row["BilledCost"]) for row in rows if row["SubAccountId"]) == pytest.approx(8.0)
    wall = sum(each.ledger.balance().wall for each in runs)
    assert sum(float(row["x_DeviceSeconds"]) for row in rows) == pytest.approx(wall)
    assert {row["SubAccountId"] for row in csv.DictReader(io.StringIO(store.focus("a")))} == {"a"}


def test_old_days_are_deleted(tmp_path: Path) -> None:
    store = UsageStore(tmp_path / "usage.db", "EUR")
    for day in (FIRST, FIRST + 1, FIRST + KEPT_DAYS):
        process = Process(day=day)
        one_request(process.ledger, "x", 10.0)
        store.add(process.journal.take())
    assert [each.key.day - FIRST for each in store.rows()] == [1, KEPT_DAYS]


def test_a_failed_write_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, process = UsageStore(tmp_path / "usage.db", "EUR"), Process()
    one_request(process.ledger, "x", 10.0)
    used = process.journal.take()
    broken = used._replace(rows=[*used.rows, used.rows[0]._replace(model=object())])  # type: ignore[arg-type]
    with pytest.raises(sqlite3.Error):
        store.add(broken)
    assert list(store.rows()) == []
    store.add(used)
    assert len(list(store.rows())) == 1


def test_each_tenant_has_its_own_hits_and_savings() -> None:
    savings = TenantSavings(lambda: TokenPrices(prompt=1.0, output=2.0))
    savings.fold(Spared("r1", "acme", Layer.EXACT, 1_000_000, 500_000, 0.0), 0.0)
    savings.fold(Spared("r2", "acme", Layer.EXACT, 0, 0, 0.0), 0.0)
    savings.fold(Spared("r3", "globex", Layer.COALESCED, 10, 20, 0.0), 0.0)
    assert savings.stats("acme") == {
        "tenant": "acme",
        "layers": {
            "exact": {
                "hits": 2,
                "saved_prompt_tokens": 1_000_000,
                "saved_output_tokens": 500_000,
                "saved_cost": 2.0,
            }
        },
    }
    assert savings.stats("globex")["layers"].keys() == {"coalesced"}
    assert savings.stats("unknown") == {"tenant": "unknown", "layers": {}}


def test_tenants_beyond_the_limit_are_counted_together(monkeypatch) -> None:
    monkeypatch.setattr(usage, "MAX_TENANTS", 1)
    savings = TenantSavings()
    for tenant in ("first", "second", "third", "first"):
        savings.fold(Spared("r", tenant, Layer.EXACT, 1, 1, 0.0), 0.0)
    assert savings.stats("first")["layers"]["exact"]["hits"] == 2
    assert savings.stats("other")["layers"]["exact"]["hits"] == 2
    assert savings.stats("second")["layers"] == {}


def test_a_cached_prefix_counts_once_for_the_tenant_of_its_request() -> None:
    savings = TenantSavings()
    savings.fold(Arrived("r", 40, "acme", 0), 0.0)
    savings.fold(Admitted("r", AdmitReason.NEW, 16, 40), 0.0)
    savings.fold(Admitted("r", AdmitReason.RESUMED, 32, 41), 0.0)
    savings.fold(Finished("r", FinishReason.STOP, 40, 1, 16), 0.0)
    savings.fold(Admitted("r", AdmitReason.NEW, 16, 40), 0.0)
    prefix = savings.stats("acme")["layers"]["prefix"]
    assert (prefix["hits"], prefix["saved_prompt_tokens"]) == (1, 16)
