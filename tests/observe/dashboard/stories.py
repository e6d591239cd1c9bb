"""A server's folds over events written by hand, and the dashboard over them."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.core.events import (
    AdmitReason,
    Admitted,
    Arrived,
    Chunked,
    ChunkReason,
    Emitted,
    Event,
    Finished,
    Stepped,
    StepRows,
)
from headrace.core.plan import Row
from headrace.core.request import FinishReason
from headrace.observe.cost.ledger import CostLedger
from headrace.observe.cost.prices import Pricing
from headrace.observe.cost.report import CostReport
from headrace.observe.cost.usage import TenantSavings
from headrace.observe.dashboard import Dashboard, TenantTable
from headrace.observe.goodput import Goodput
from headrace.observe.metrics import Metrics
from headrace.observe.metrics_page import MetricsPage
from headrace.observe.readings import Folds
from headrace.observe.requests import RequestBook
from headrace.observe.steps.timelines import Timelines
from headrace.observe.usage import UsageBook
from headrace.observe.work import ModelWork, WorkMeter


class Story:
    """All folds of a server at once; time is what the test says."""

    def __init__(self, pricing: Pricing = Pricing(), slots: int = 4) -> None:  # noqa: B008 (immutable)
        page, self.now, self.loop = MetricsPage(), 0.0, 0.0
        cost = CostReport(CostLedger(pricing), "fox")
        work = WorkMeter(page, cost.ledger, ModelWork(100, 10, 8, 1000, 4), lambda: self.now, slots=slots)
        self.folds = Folds(
            page,
            Metrics(page),
            Goodput(page),
            RequestBook(),
            UsageBook(),
            TenantSavings(),
            cost,
            work,
            Timelines(),
        )
        usage, goodput = self.folds.usage, self.folds.goodput
        limits = {"acme": {"tokens_per_day": {"limit": 10.0, "remaining": 4.0, "reset_seconds": 9.0}}}
        table = TenantTable(
            usage, goodput, cost, lambda tenant: 2.0 if tenant == "acme" else 1.0, lambda t: limits.get(t, {})
        )
        self.dashboard = Dashboard(
            self.folds,
            table,
            slots=lambda: slots,
            blocks=100,
            parameters={"num_parameters": 110, "active_parameters": 110},
            loop_seconds=lambda: self.loop,
            offset=1000.0,
        )

    def tell(self, now: float, *events: Event) -> None:
        """These events happen."""
        self.now = now
        for fold in self.folds.watchers:
            for event in events:
                fold.fold(event, now)

    def snapshot(self, now: float, part: str = "", tenant: str | None = None) -> dict:
        """The snapshot at a time, after a reading."""
        self.now = now
        self.dashboard.measure(now)
        return self.dashboard.snapshot(part, tenant, now)

    def answer(self, name: str, began: float, tenant: str = "acme", tokens: int = 3, cached: int = 0) -> None:
        """A request with a prompt of 8 tokens: a prefill step of a second, then a decode step a second."""
        self.tell(began, Arrived(name, 8, tenant, 0, began))
        for step in range(tokens):
            now = began + 1 + step
            rows = Row(0, cached, 8 - cached, (), True) if step == 0 else Row(0, 7 + step, 1, (), True)
            first = [Admitted(name, AdmitReason.NEW, cached, 8, began)] if step == 0 else []
            chunk = [Chunked(name, cached, 8 - cached, ChunkReason.WHOLE)] if step == 0 else []
            end = [Finished(name, FinishReason.LENGTH, 8, tokens, cached)] if step == tokens - 1 else []
            self.tell(now, *first, *chunk, Emitted(name, (1,)), *end, self.step(now - 1, name, rows))

    def step(self, began: float, name: str, row: Row) -> Stepped:
        """A committed step of one row that began at a time."""
        decode = int(row.length == 1)
        work = StepRows(began, (name,), (row,))
        return Stepped(0, decode, 1 - decode, row.length, 1, 0, 5, 100, 80, 60, work)


def by_name(rows: Iterable[dict]) -> dict[str, dict]:
    """Rows by their names."""
    return {row["name"]: row for row in rows}
