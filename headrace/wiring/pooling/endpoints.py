"""Builds the worker and the routes of embeddings, reranking and scores, with their metrics and model cards."""

from __future__ import annotations

from typing import NamedTuple

from starlette.routing import Route

from headrace.api.embedding.calls import CostOf, PoolingCalls
from headrace.api.embedding.routes import EmbeddingApi, PoolingCard
from headrace.api.rate_limit_headers import rate_headers
from headrace.config import Options
from headrace.core.tenancy.gate import Limits
from headrace.observe.metrics import Metrics
from headrace.observe.metrics_page import MetricsPage
from headrace.service.embedding.models import PoolingModels
from headrace.service.embedding.worker import EmbeddingWorker
from headrace.service.service import Service


class Endpoints(NamedTuple):
    """The worker, the endpoints that use it, and the cards of the models."""

    worker: EmbeddingWorker
    calls: PoolingCalls
    api: EmbeddingApi
    cards: list[PoolingCard]

    def routes(self) -> list[Route]:
        """The routes to mount."""
        return self.api.routes()


def describe_models(models: PoolingModels) -> list[str]:
    """The models, as lines for the terminal."""
    lines = []
    if (one := models.embedding) is not None:
        lines.append(
            f"embeddings   {one.name}: {one.dimensions} dimensions, inputs of up to {one.max_tokens:,} tokens"
        )
    if (other := models.rerank) is not None:
        lines.append(f"rerank       {other.name}: pairs of up to {other.max_tokens:,} tokens")
    return lines


def open_endpoints(
    options: Options,
    models: PoolingModels,
    service: Service,
    page: MetricsPage,
    metrics: Metrics,
    cost: CostOf | None,
) -> Endpoints:
    """The endpoints over ``models``; without models, their errors name the option that loads one.

    ``cost`` returns the cost of calls, if there are prices.
    """
    server = options.server
    worker = EmbeddingWorker(
        service,
        Limits(server.max_num_queued_reqs, server.max_num_queued_tokens),
        server.mixed_embedding_ratio,
    )
    page.before_render(
        lambda: metrics.embeddings.measure(worker.open_calls, worker.waiting_tokens, worker.busy_seconds)
    )
    calls = PoolingCalls(worker, models, service.now, cost)
    api = EmbeddingApi(
        calls,
        max_body_bytes=server.max_body_bytes,
        request_timeout=server.request_timeout,
        headers=lambda tenant: rate_headers(service.meter.rooms(tenant, service.now())),
    )
    cards = [PoolingCard(model, models.also_named.get(model.name, ())) for model in models.all()]
    return Endpoints(worker, calls, api, cards)
