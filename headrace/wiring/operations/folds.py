"""Builds the folds over a server's events, and the file of its usage."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from headrace.api.compile.model import ServedModel
from headrace.config import ConfigError, Options
from headrace.core.events import Layer
from headrace.core.ports import StoreFacts
from headrace.observe.cost.report import CostReport
from headrace.observe.cost.tenant_savings import TenantSavings
from headrace.observe.cost.usage_journal import UsageJournal
from headrace.observe.cost.usage_store import UsageStore
from headrace.observe.dashboard.folds import Folds
from headrace.observe.goodput import Goodput
from headrace.observe.metrics import Metrics
from headrace.observe.metrics_page import MetricsPage
from headrace.observe.requests import RequestBook
from headrace.observe.steps.timelines import Timelines
from headrace.observe.usage import UsageBook
from headrace.observe.vllm_names import aliases, labels
from headrace.service.usage_file import UsageFile
from headrace.wiring.engine import make_ledger, make_pricing
from headrace.wiring.model import Loaded
from headrace.wiring.operations.observability import add_build_info, watch_resources

CacheSizes = Callable[[], Mapping[Layer, Mapping[str, StoreFacts]]]


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
    """The file of ``--usage-file``.

    Raises:
        ConfigError: it cannot be opened.
    """
    path = options.observability.usage_file
    if path is None:
        return None
    try:
        store = UsageStore(Path(path), folds.cost.ledger.pricing.currency)
    except OSError as error:
        raise ConfigError(f"--usage-file: {error}") from error
    return UsageFile(store, UsageJournal(folds.cost, folds.savings, time.time).take)
