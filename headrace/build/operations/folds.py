"""The folds over a server's events: metrics, goodput, explanations, usage, savings and cost, with their page."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from headrace.build.engine import make_ledger, make_pricing
from headrace.build.model import Loaded
from headrace.build.operations.observability import (
    add_build_info,
    watch_resources,
)
from headrace.config import ConfigError, Options
from headrace.core.cache.response.entry import StoreFacts
from headrace.core.events import Layer
from headrace.core.ports import Watcher
from headrace.observe.cost.report import CostReport, saved_fields
from headrace.observe.cost.usage_journal import UsageJournal
from headrace.observe.cost.usage_store import UsageStore
from headrace.observe.goodput import Goodput
from headrace.observe.metrics import Metrics
from headrace.observe.metrics_page import MetricsPage
from headrace.observe.requests import RequestBook
from headrace.observe.resources.work import WorkMeter
from headrace.observe.steps.timelines import Timelines
from headrace.observe.tenant_savings import TenantSavings
from headrace.observe.usage import UsageBook
from headrace.observe.vllm_names import aliases, labels
from headrace.serve.http.model import ServedModel
from headrace.serve.usage_file import UsageFile

CacheSizes = Callable[[], Mapping[Layer, Mapping[str, StoreFacts]]]


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
        """The folds in their order: others read what the cost ledger knows."""
        return (
            *(self.cost.ledger, self.work, self.metrics, self.goodput),
            *(self.book, self.usage, self.savings, self.lives),
        )

    def usage_of(self, tenant: str) -> dict[str, Any]:
        """What a tenant has used, what that cost, and what the caches saved."""
        saved = saved_fields(self.savings.savings(tenant))
        return {**self.usage.tell(tenant), **self.cost.tenant(tenant), **saved}

    def explain(self, request_id: str, now: float) -> dict[str, Any] | None:
        """What is known of a request, with its cost."""
        shown = self.book.explain(request_id, now)
        if shown is not None:
            shown["cost"] |= self.cost.request(request_id)
        return shown


def make_folds(loaded: Loaded, options: Options, model: ServedModel, cache_sizes: CacheSizes) -> Folds:
    """The folds of one engine; ``cache_sizes`` returns the size of each cache layer."""
    ledger, prefix = loaded.ledger, options.server.metrics_prefix
    cost = CostReport(make_ledger(make_pricing(options.cost), loaded.engine), loaded.name)
    prices = cost.ledger.token_prices
    page = MetricsPage(prefix, labels(prefix, loaded.name), aliases(prefix))
    page.add_process()
    add_build_info(page, loaded)
    metrics = Metrics(
        page,
        clock_offset=time.time() - time.monotonic(),
        cache_config={"block_size": str(ledger.block_size), "num_gpu_blocks": str(ledger.num_blocks)},
        phase_seconds=lambda: loaded.runner.seconds,
        prices=prices,
        cache_sizes=cache_sizes,
    )
    work = watch_resources(page, loaded, options, cost)
    goodput = Goodput(page, lambda tenant: model.rules.tenants.terms(tenant).weight)
    book = RequestBook(by_priority=loaded.policy in ("fair", "priority"))
    return Folds(page, metrics, goodput, book, UsageBook(), TenantSavings(prices), cost, work, Timelines())


def open_usage_file(options: Options, folds: Folds) -> UsageFile | None:
    """The file of --usage-file.

    Raises:
        ConfigError: it cannot be opened.
    """
    path = options.observability.usage_file
    if path is None:
        return None
    try:
        store = UsageStore(Path(path), folds.cost.ledger.pricing.currency)
    except sqlite3.Error as error:
        raise ConfigError(f"--usage-file {path} cannot be opened: {error}") from error
    return UsageFile(store, UsageJournal(folds.cost, folds.savings, time.time).take)
