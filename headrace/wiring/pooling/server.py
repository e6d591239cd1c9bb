"""The HTTP server that has only models for embeddings or scores: no decoder, no KV cache, no response caches.

The engine thread is the same, but its engine, `NoSteps`, has no steps.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import fields
from functools import partial
from typing import Any, NamedTuple

from starlette.routing import Route
from starlette.types import ASGIApp

from headrace import __version__
from headrace.api.app import BackgroundWork, create_app, create_metrics_app, lifespan_of
from headrace.api.auth.api_keys import KeyFile
from headrace.api.auth.origin import Hosts
from headrace.api.batch.line_runner import PooledLines
from headrace.api.batch.routes import open_batches
from headrace.api.embedding.routes import NoGeneration
from headrace.api.openapi import Docs
from headrace.api.operations.status import Pause, Status, UsageReport
from headrace.api.runtime.listening import hosts
from headrace.api.runtime.run import Apps, run_server
from headrace.api.serving import CallNotes
from headrace.config import PARTS, ConfigError, Options, ServerOptions
from headrace.core.events import Event
from headrace.core.request import FinishReason, Request
from headrace.core.tenancy.gate import Limits
from headrace.observe.cost.focus import focus_csv
from headrace.observe.cost.ledger import CostLedger
from headrace.observe.cost.report import CostReport
from headrace.observe.log.writer import set_level
from headrace.observe.metrics import Metrics
from headrace.observe.metrics_page import MetricsPage
from headrace.observe.usage import UsageBook
from headrace.observe.vllm_names import aliases, labels
from headrace.response_cache.lookup import CacheLookup
from headrace.service.embedding.models import PoolingModels
from headrace.service.quota_meter import QuotaMeter
from headrace.service.service import Service
from headrace.wiring.engine import make_pricing
from headrace.wiring.operations.observability import SystemdLink, Traces, costs, hooks, systemd_link, watchers
from headrace.wiring.operations.reload import read_settings
from headrace.wiring.pooling.endpoints import describe_models, open_endpoints
from headrace.wiring.pooling.models import load_pooling
from headrace.wiring.tenants import describe_tenants, open_keys, read_tenants

startup = logging.getLogger("headrace.startup")
shutdown = logging.getLogger("headrace.shutdown")

UNUSED_PARTS = ("cache", "scheduler", "response_cache", "semantic", "warm")
"""Parts of the options that apply only to a model that generates, except the scheduler's ``tenants``."""


class NoSteps:
    """An engine without a model: it has no steps, and fails every request."""

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


class _Built(NamedTuple):
    """The application, and the parts that its start and its end need."""

    app: ASGIApp
    routes: list[Route]
    service: Service
    systemd: SystemdLink


def build_pooling_app(
    options: Options, traces: Traces | None
) -> tuple[ASGIApp, AbstractAsyncContextManager[None]]:
    """The application for use without a socket, and the context in which its engine thread runs.

    Raises:
        ConfigError: the model cannot be loaded, or an option cannot be used.
    """
    named = Hosts(options.server.allowed_hosts)
    built = _make_app(options, load_pooling(options), open_keys(options.server), traces, named)

    @asynccontextmanager
    async def running() -> AsyncIterator[None]:
        try:
            async with lifespan_of(built.app):
                yield
        finally:
            built.service.stop()
            if traces:
                traces.close()

    return built.app, running()


def serve_pooling(
    options: Options, keys: KeyFile, traces: Traces | None, began: float, when_loaded: Callable[[], None]
) -> None:
    """Load the models and serve until a signal ends it.

    Raises:
        ConfigError: a model cannot be loaded, or an option cannot be used.
    """
    models = load_pooling(options)
    when_loaded()
    built = _make_app(options, models, keys, traces, hosts(options.server))
    server = options.server
    metrics = make_metrics_app(built.routes, server)
    for line in _describe(options, models):
        startup.info("%s", line)

    def ready(url: str) -> None:
        seconds = time.perf_counter() - began
        startup.info("ready        %s after %.2f s", url, seconds, extra={"fields": {"url": url}})
        built.systemd.notifier.send("READY=1")

    async def reload() -> None:
        settings = await asyncio.to_thread(read_settings, options)
        set_level(settings.log_level)
        await asyncio.to_thread(keys.reload)
        try:
            tenants, _ = await asyncio.to_thread(read_tenants, settings.tenants)
        except ConfigError as error:
            startup.warning("tenants not reloaded, the previous limits stay: %s", error)
            return
        built.service.meter.replace(tenants)

    try:
        run_server(Apps(built.app, metrics), built.service, server, ready, reload)
    finally:
        built.service.stop()
        if traces:
            traces.close()
        shutdown.info("server stopped")


def _describe(options: Options, models: PoolingModels) -> list[str]:
    lines = describe_models(models)
    unused = {each.name for part in UNUSED_PARTS for each in fields(PARTS[part])} - {"tenants"}
    chosen = [f"--{name.replace('_', '-')}" for name in sorted(options.chosen & unused)]
    if chosen:
        lines.append(f"note         without effect for a model that does not generate: {', '.join(chosen)}")
    tenants, classes = read_tenants(options.scheduler.tenants)
    return [*lines, *describe_tenants(tenants, classes)]


def make_metrics_app(routes: Sequence[Route], options: ServerOptions) -> ASGIApp | None:
    """The application of ``--metrics-port``, if there is one."""
    if options.metrics_port is None:
        return None
    return create_metrics_app(routes, options.allowed_origins, hosts(options, metrics=True))


def _make_app(
    options: Options, models: PoolingModels, keys: KeyFile, traces: Traces | None, named: Hosts
) -> _Built:
    server = options.server
    if not models.all():
        raise ConfigError("--runner pooling: there is neither an embedding model nor a cross-encoder")
    tenants, _ = read_tenants(options.scheduler.tenants)
    name = models.all()[0].name
    page = MetricsPage(
        server.metrics_prefix, labels(server.metrics_prefix, name), aliases(server.metrics_prefix)
    )
    page.add_process()
    began, unix = time.monotonic(), time.time()
    metrics, usage = Metrics(page, clock_offset=unix - began), UsageBook()
    pricing = make_pricing(options.cost)
    cost = CostReport(CostLedger(pricing, began=began, clock_offset=unix - began), name)
    service = Service(
        NoSteps(),
        Limits(server.max_num_queued_reqs, server.max_num_queued_tokens),
        watchers=(cost.ledger, metrics, usage),
        meter=QuotaMeter(tenants, name),
        request_timeout=server.request_timeout,
    )
    for watcher, tokens in watchers(traces):
        service.watch(watcher, tokens=tokens)
    notes = CallNotes()
    endpoints = open_endpoints(
        options, models, service, page, metrics, costs(service, cost) if pricing.given else None
    )
    lines = PooledLines(endpoints.calls, request_timeout=server.request_timeout)
    batch = open_batches(options.batch, server, service, (lines,), name)
    status = Status(
        service,
        endpoints.cards[0],
        notes,
        explain=lambda request_id, now: None,
        metrics=page.render,
        info=lambda: _info(models),
        reset=lambda: None,
        version=__version__,
        others=endpoints.cards[1:],
    )
    accounts = _accounts(service, usage, cost)
    parts = (endpoints, batch, NoGeneration(name), status, Pause(service), accounts, Docs(__version__))
    routes = [route for part in parts for route in part.routes()]
    systemd = systemd_link(service)
    background: list[BackgroundWork] = [keys.watch, systemd.watch, *batch.background, endpoints.worker]
    exchanges = hooks(options.observability, page, notes, traces)
    app = create_app(
        CacheLookup(service), routes, keys.keys, background, server.allowed_origins, exchanges, named
    )
    return _Built(app, routes, service, systemd)


def _accounts(service: Service, usage: UsageBook, cost: CostReport) -> UsageReport:
    return UsageReport(
        service,
        usage.tenants,
        lambda tenant: {**usage.account(tenant), **cost.tenant(tenant)},
        cost.device,
        partial(focus_csv, cost),
    )


def _info(models: PoolingModels) -> Mapping[str, Any]:
    """The fields for ``GET /server_info``."""
    return {
        "embedding_model": models.embedding.name if models.embedding else None,
        "rerank_model": models.rerank.name if models.rerank else None,
    }
