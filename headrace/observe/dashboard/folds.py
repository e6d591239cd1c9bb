"""All folds over a server's events: metrics, goodput, explanations, usage, savings, cost, timelines, and their page."""

from __future__ import annotations

from typing import Any, NamedTuple

from headrace.core.ports import Watcher
from headrace.observe.cost.report import CostReport, saved_fields
from headrace.observe.cost.tenant_savings import TenantSavings
from headrace.observe.goodput import Goodput
from headrace.observe.metrics import Metrics
from headrace.observe.metrics_page import MetricsPage
from headrace.observe.requests import RequestBook
from headrace.observe.resources.work import WorkMeter
from headrace.observe.steps.timelines import Timelines
from headrace.observe.usage import UsageBook


class Folds(NamedTuple):
    """The metrics page, and the folds over the engine's events."""

    page: MetricsPage
    metrics: Metrics
    goodput: Goodput
    book: RequestBook
    usage: UsageBook
    savings: TenantSavings
    cost: CostReport
    work: WorkMeter
    lives: Timelines

    @property
    def watchers(self) -> tuple[Watcher, ...]:
        """The folds in order; the cost ledger is first, because others read it."""
        return (
            *(self.cost.ledger, self.work, self.metrics, self.goodput),
            *(self.book, self.usage, self.savings, self.lives),
        )

    def usage_of(self, tenant: str) -> dict[str, Any]:
        """A tenant's usage, cost and savings."""
        saved = saved_fields(self.savings.savings(tenant))
        return {**self.usage.account(tenant), **self.cost.tenant(tenant), **saved}

    def explain(self, request_id: str, now: float) -> dict[str, Any] | None:
        """The explanation of a request, with its cost."""
        shown = self.book.explain(request_id, now)
        if shown is not None:
            shown["cost"] |= self.cost.request(request_id)
        return shown
