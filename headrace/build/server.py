"""The HTTP server in front of a loaded model: service, watchers, routes."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict

from starlette.types import ASGIApp

from headrace import __version__
from headrace.build.batches import open_batches
from headrace.build.cache import describe_caches, make_recall, prefix_sizes
from headrace.build.model import Loaded, close, describe, load, timed, warm_up
from headrace.build.recording import open_tape
from headrace.build.tenants import describe_tenants
from headrace.build.warming import Warming, make_recorder, open_history
from headrace.config import ConfigError, Options, ServerOptions, profile_line
from headrace.core.scheduler.start_estimate import told
from headrace.core.tenancy.gate import Limits
from headrace.observe.cache_ledger import Prices
from headrace.observe.goodput import Goodput
from headrace.observe.metrics import Metrics
from headrace.observe.metrics_page import MetricsPage
from headrace.observe.requests import RequestBook
from headrace.observe.usage import UsageBook
from headrace.serve.auth.api_keys import Keys, read_keys
from headrace.serve.cache.lookup import CacheLookup
from headrace.serve.http.app import Beside, create_app
from headrace.serve.http.cache.routes import CacheApi
from headrace.serve.http.generation.call_notes import CallNotes
from headrace.serve.http.generation.scheduling_fields import Rules
from headrace.serve.http.lifespan import lifespan_of
from headrace.serve.http.model import ServedModel
from headrace.serve.http.openai.routes import Api
from headrace.serve.http.openapi import Docs
from headrace.serve.http.operations.abort import Abort
from headrace.serve.http.operations.status import Status
from headrace.serve.http.operations.usage_report import UsageReport
from headrace.serve.http.rate_limit_headers import rate_headers
from headrace.serve.http.run import check_address, check_tls, run_server
from headrace.serve.http.tools.dialect import Dialect
from headrace.serve.parsing.detect import UnknownParser
from headrace.serve.quota_meter import QuotaMeter
from headrace.serve.service import Service


def build_app(options: Options) -> tuple[ASGIApp, AbstractAsyncContextManager[None]]:
    """The server's application for use without a socket, and the context in which its engine runs.

    The model is loaded by this call. Enter the context once, before the first request: an application that it is
    mounted into does not start it. Leaving the context ends the engine and gives its memory back.

    Raises:
        ConfigError: as `load`, or API keys or a recording that cannot be used.
    """
    keys = _keys(options.server)
    tape = open_tape(options.server)
    loaded = load(options, tape.tell if tape else None)
    app, recall = _make_app(loaded, options, keys)

    @asynccontextmanager
    async def running() -> AsyncIterator[None]:
        try:
            async with lifespan_of(app):
                yield
        finally:
            if recall.service.stop():
                close(loaded)
            if tape:
                tape.close()

    return app, running()


def serve(options: Options, say: Callable[[str], None], *, began: float) -> None:
    """Load, warm up, listen, until a signal ends it; ``say`` gets lines for the terminal.

    ``began`` is when the process did, by `time.perf_counter`: what came before this call went into libraries.

    Raises:
        ConfigError: as `load`, or an address, API keys, TLS files or a recording that cannot be used.
    """
    libraries = time.perf_counter() - began
    check_tls(options.server)
    check_address(options.server)
    keys = _keys(options.server)
    tape = open_tape(options.server)
    loaded = load(options, tape.tell if tape else None)
    warm_up(loaded)
    loaded.seconds["libraries"] = libraries
    with timed(loaded.seconds, "routes"):
        app, recall = _make_app(loaded, options, keys)
    profile = f"profile      {profile_line(options)}"
    for line in (
        *describe(loaded),
        profile,
        *describe_tenants(loaded.tenants, loaded.classes),
        *describe_caches(options.response_cache),
    ):
        say(line)

    def ready(url: str) -> None:
        say(f"ready        {url} after {time.perf_counter() - began:.2f} s")

    try:
        run_server(app, recall.service, options.server, ready)
    finally:
        if recall.service.stop() and (left := close(loaded)):
            say(f"note         {left}")
        if tape:
            tape.close()


def _keys(options: ServerOptions) -> Keys:
    try:
        return Keys(read_keys(options.api_key, options.api_key_file))
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _dialect(loaded: Loaded, options: ServerOptions) -> Dialect:
    try:
        return Dialect(loaded.template, options.tool_call_parser, options.reasoning_parser)
    except UnknownParser as error:
        raise ConfigError(str(error)) from error


def _make_app(loaded: Loaded, all_options: Options, keys: Keys) -> tuple[ASGIApp, CacheLookup]:
    ledger, options, caching = loaded.ledger, all_options.server, all_options.response_cache
    tenants = loaded.tenants
    sheet = MetricsPage(options.metrics_prefix, {"model_name": loaded.name})
    metrics = Metrics(
        sheet,
        clock_offset=time.time() - time.monotonic(),
        cache_config={"block_size": str(ledger.block_size), "num_gpu_blocks": str(ledger.num_blocks)},
        phase_seconds=lambda: loaded.runner.seconds,
        prices=Prices(caching.input_price, caching.output_price),
        cache_sizes=lambda: recall.sizes() | prefix_sizes(loaded),  # made below
    )
    goodput = Goodput(sheet, lambda tenant: tenants.terms(tenant).weight)
    usage = UsageBook()
    book = RequestBook(by_priority=loaded.policy in ("fair", "priority"))
    service = Service(
        loaded.engine,
        Limits(options.max_num_queued_reqs, options.max_num_queued_tokens),
        watchers=(metrics, goodput, book, usage),
        meter=QuotaMeter(tenants, loaded.name),
        request_timeout=options.request_timeout,
        bell=loaded.runner.bell,
    )
    history = open_history(all_options.warm)
    recall = make_recall(caching, all_options.semantic, loaded, service, history)
    model = ServedModel(
        loaded.name,
        loaded.tokenizer,
        loaded.template,
        ledger.max_model_len,
        loaded.spec.vocab_size,
        root=str(loaded.folder),
        rules=Rules(loaded.policy, {each.name: each for each in loaded.classes}, tenants),
        stream_interval=options.stream_interval,
        dialect=_dialect(loaded, options),
    )

    notes = CallNotes()
    api = Api(
        recall,
        model,
        notes,
        max_body_bytes=options.max_body_bytes,
        request_timeout=options.request_timeout,
        headers=lambda tenant: rate_headers(service.meter.rooms(tenant, service.now())),
        recorder=make_recorder(all_options.warm, history),
    )
    warming = Warming(all_options.warm, caching, options, recall, model, history)
    service.watch(warming.warmer, tokens=False)
    status = Status(
        service,
        model,
        notes,
        explain=book.explain,
        metrics=sheet.render,
        info=lambda: (
            {"model": loaded.name, "dtype": loaded.dtype, "kernels": loaded.kernels}
            | {"quantization": loaded.quantization or None}
            | {
                "ledger": asdict(ledger),
                "knobs": asdict(loaded.engine.knobs),
                "startup_seconds": loaded.seconds,
            }
        ),
        reset=loaded.engine.reset_prefix_cache,
        version=__version__,
        foresee=lambda request_id, now: told(loaded.engine.estimate_start(request_id)),
        not_yet=warming.not_yet,
    )
    caches = CacheApi(
        recall,
        metrics.caches.stats,
        keys_required=keys.required,
        max_body_bytes=options.max_body_bytes,
    )
    accounts = UsageReport(service, usage.tenants, usage.tell)
    abort = Abort(notes, max_body_bytes=options.max_body_bytes)
    parts = (api, abort, status, caches, accounts, warming.endpoint, Docs(__version__))
    beside: list[Beside] = [warming.warmer] if history is None else [history, warming.warmer]
    routes = [route for part in parts for route in part.routes()]
    batch = open_batches(all_options.batch, options, recall, model, notes)
    if batch is not None:
        beside.append(batch.batches)
        routes += batch.routes
    return create_app(recall, routes, keys, beside, options.allowed_origins), recall
