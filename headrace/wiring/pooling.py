"""Embeddings, reranking and scores in the server, beside a model that generates or without one."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from headrace import __version__
from headrace.api.embedding.calls import PoolingCalls
from headrace.api.embedding.routes import EmbeddingApi, NoGeneration, PoolingCard
from headrace.api.fronts.pooling import OwnedPooling
from headrace.api.operations.status import Status
from headrace.api.serving import CallNotes
from headrace.config import PARTS, Options
from headrace.core.events import Event
from headrace.core.request import FinishReason, Request
from headrace.core.tenancy.gate import Limits
from headrace.core.tenancy.tenants import Tenants
from headrace.observe.cost.ledger import CostLedger
from headrace.observe.cost.report import CostReport
from headrace.observe.metrics import Metrics
from headrace.observe.metrics_page import MetricsPage, aliases, labels
from headrace.observe.usage import UsageBook
from headrace.response_cache.lookup import CacheLookup
from headrace.service.embedding_models import PoolingModels
from headrace.service.embedding_worker import Begin, EmbeddingWorker
from headrace.service.quota_meter import QuotaMeter
from headrace.service.service import Service
from headrace.wiring.embedding import tokenizer_text
from headrace.wiring.engine import make_pricing
from headrace.wiring.feature import Feature, Hall

UNUSED_PARTS = ("cache", "scheduler", "response_cache", "semantic", "warm")
"""Parts of the options that apply only to a model that generates, except the scheduler's ``tenants``."""


class Pooling(NamedTuple):
    """The worker and its endpoints as a feature; ``calls`` for lines of batches, ``cards`` for the list of models,
    ``owned`` for front ends.
    """

    feature: Feature
    calls: PoolingCalls
    cards: list[PoolingCard]
    owned: OwnedPooling


def make_pooling(options: Options, models: PoolingModels, hall: Hall, begin: Begin | None = None) -> Pooling:
    """The endpoints over ``models``; without models, their errors name the option that loads one.

    Batches ``begin`` in another process, or here.
    """
    server = options.server
    worker = EmbeddingWorker(
        hall.service,
        Limits(server.max_num_queued_reqs, server.max_num_queued_tokens),
        server.mixed_embedding_ratio,
        begin,
    )

    def measure() -> None:
        hall.metrics.embeddings.measure(worker.open_calls, worker.waiting_tokens, worker.busy_seconds)

    hall.page.before_render(measure)
    cost = hall.cost_of if hall.cost.ledger.pricing.given else None
    calls = PoolingCalls(worker, models, hall.service.now, cost)
    api = EmbeddingApi(
        calls,
        max_body_bytes=server.max_body_bytes,
        request_timeout=server.request_timeout,
        headers=hall.quota_headers,
    )
    cards = [PoolingCard(model, models.also_named.get(model.name, ())) for model in models.all()]
    feature = Feature([api], background=[worker], lines=_describe(models))
    return Pooling(feature, calls, cards, OwnedPooling(worker, models, cost, tokenizer_text))


def _describe(models: PoolingModels) -> list[str]:
    lines = []
    if (one := models.embedding) is not None:
        lines.append(
            f"embeddings   {one.name}: {one.dimensions} dimensions, inputs of up to {one.max_tokens:,} tokens"
        )
    if (other := models.rerank) is not None:
        lines.append(f"rerank       {other.name}: pairs of up to {other.max_tokens:,} tokens")
    return lines


class NoSteps:
    """An engine without a model: it has no steps, and fails every request. The engine thread is the same."""

    def __init__(self) -> None:
        self._events: list[Event] = []

    def submit(self, request: Request, now: float) -> None:
        """Refuse the request; no route submits one."""
        raise RuntimeError("this server has no model that generates")

    def cancel(self, request_id: str, why: FinishReason, now: float) -> None:
        """Do nothing: no request is open."""

    def step(self, now: float) -> list[Event]:
        """Return no events."""
        return self._events

    def wake_at(self, now: float) -> float | None:
        """Return None: no step is ever due."""
        return None


def open_pooling_hall(options: Options, name: str, tenants: Tenants) -> Hall:
    """The service and the folds of a server without a model that generates: no decoder, no KV cache, no caches."""
    server = options.server
    prefix = server.metrics_prefix
    page = MetricsPage(prefix, labels(prefix, name), aliases(prefix))
    page.add_process()
    began, unix = time.monotonic(), time.time()
    metrics, usage = Metrics(page, clock_offset=unix - began), UsageBook()
    ledger = CostLedger(make_pricing(options.cost), began=began, clock_offset=unix - began)
    cost = CostReport(ledger, name)
    service = Service(
        NoSteps(),
        Limits(server.max_num_queued_reqs, server.max_num_queued_tokens),
        watchers=(ledger, metrics, usage),
        meter=QuotaMeter(tenants, name),
        request_timeout=server.request_timeout,
    )

    def usage_of(tenant: str) -> dict[str, Any]:
        return {**usage.account(tenant), **cost.tenant(tenant)}

    return Hall(name, service, CacheLookup(service), CallNotes(), page, metrics, usage, cost, usage_of)


def pooling_only(options: Options, models: PoolingModels, hall: Hall, cards: list[PoolingCard]) -> Feature:
    """The endpoints of a server without a model that generates: its status, and refusals of text generation."""
    status = Status(
        hall.service,
        cards[0],
        hall.notes,
        explain=lambda request_id, now: None,
        metrics=hall.page.render,
        info=lambda: _info(models),
        reset=lambda: None,
        version=__version__,
        others=cards[1:],
    )
    unused = {each.name for part in UNUSED_PARTS for each in fields(PARTS[part])} - {"tenants"}
    chosen = [f"--{name.replace('_', '-')}" for name in sorted(options.chosen & unused)]
    note = f"note         without effect for a model that does not generate: {', '.join(chosen)}"
    return Feature([NoGeneration(hall.name), status], lines=[note] if chosen else [])


def _info(models: PoolingModels) -> Mapping[str, Any]:
    """The fields for ``GET /server_info``."""
    return {
        "embedding_model": models.embedding.name if models.embedding else None,
        "rerank_model": models.rerank.name if models.rerank else None,
    }
