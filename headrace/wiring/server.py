"""Builds the HTTP server in front of a loaded model: service, watchers, routes."""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

from starlette.routing import Route
from starlette.types import ASGIApp

from headrace import __version__
from headrace.api.anthropic.routes import Messages
from headrace.api.app import BackgroundWork, create_app
from headrace.api.auth.key_file import KeyFile
from headrace.api.auth.origin import Hosts
from headrace.api.batch.line_endpoints import (
    GeneratedLines,
    MessagesLines,
    PooledLines,
    ResponsesLines,
)
from headrace.api.batch.line_runner import LineEndpoints
from headrace.api.batch.opening import open_batches
from headrace.api.cache.question_recorder import QuestionRecorder
from headrace.api.cache.routes import CacheApi
from headrace.api.generation.call_notes import CallNotes
from headrace.api.generation.scheduling_fields import Rules
from headrace.api.generation.serving import Serving
from headrace.api.model import ServedModel
from headrace.api.openai.routes import Api
from headrace.api.openapi import Docs
from headrace.api.operations.abort import Abort
from headrace.api.operations.pause import Pause
from headrace.api.operations.status import ListedModel, Status
from headrace.api.operations.steps import StepRoutes
from headrace.api.operations.timeline import RequestTimeline
from headrace.api.operations.usage_report import UsageReport
from headrace.api.pages.routes import Pages
from headrace.api.prompts.routes import SessionsApi
from headrace.api.rate_limit_headers import rate_headers
from headrace.api.responses.opening import open_responses
from headrace.api.runtime.lifespan import lifespan_of
from headrace.api.runtime.listening import check_address, exposure_warning, hosts
from headrace.api.runtime.run import Apps, run_server
from headrace.api.runtime.tls import check_tls
from headrace.api.tools.dialect import Dialect
from headrace.config import ConfigError, Options, ServerOptions, profile_line
from headrace.core.scheduler.start_estimate import estimate_fields
from headrace.core.tenancy.gate import Limits
from headrace.observe.cost.focus import focus_csv
from headrace.observe.dashboard.folds import Folds
from headrace.observe.log.writer import set_level
from headrace.response_cache.lookup import CacheLookup
from headrace.service.embedding.models import PoolingModels
from headrace.service.quota_meter import QuotaMeter
from headrace.service.service import Service
from headrace.text.parsing.detect import UnknownParser
from headrace.wiring.caching.cache import Prompts, describe_caches, make_prompts, make_recall, prefix_sizes
from headrace.wiring.caching.semantic import make_verdicts
from headrace.wiring.caching.warming import Warming, make_recorder, open_history
from headrace.wiring.loading.ranks import launched_rank
from headrace.wiring.model import Loaded, close, describe, load, served_names, timed, warm_up
from headrace.wiring.operations.dashboard import make_pages
from headrace.wiring.operations.folds import make_folds, open_usage_file
from headrace.wiring.operations.kv_events import open_kv_events
from headrace.wiring.operations.observability import (
    SystemdLink,
    Traces,
    costs,
    hooks,
    open_traces,
    start_log,
    systemd_link,
    watchers,
)
from headrace.wiring.operations.recording import open_tape
from headrace.wiring.operations.reload import Reload, read_settings
from headrace.wiring.operations.stepping import make_stepping
from headrace.wiring.operations.tuning import machine_of, make_tuning
from headrace.wiring.pooling.endpoints import Endpoints, describe_models, open_endpoints
from headrace.wiring.pooling.models import load_pooling, runs_pooling, with_served
from headrace.wiring.pooling.server import build_pooling_app, make_metrics_app, serve_pooling
from headrace.wiring.tenants import describe_tenants, open_keys

startup = logging.getLogger("headrace.startup")
shutdown = logging.getLogger("headrace.shutdown")


def build_app(options: Options) -> tuple[ASGIApp, AbstractAsyncContextManager[None]]:
    """The server's application for use without a socket, and the context in which its engine runs.

    This call loads the model. Enter the context once, before the first request; an application that mounts this one
    does not start it. Leaving the context stops the engine and frees its memory.

    Raises:
        ConfigError: as `load`, or API keys, a trace file or a trace exporter cannot be used.
    """
    if runs_pooling(options.model):
        return build_pooling_app(options, open_traces(options.observability))
    keys = open_keys(options.server)
    traces = open_traces(options.observability)
    tape = open_tape(options.server)
    models = load_pooling(options)
    loaded = load(options, tape.tell if tape else None)
    kv_events = open_kv_events(loaded, options)
    models = with_served(models, options, loaded)
    built = _make_app(loaded, options, keys, traces, models, Hosts(options.server.allowed_hosts))
    recall = built.recall

    @asynccontextmanager
    async def running() -> AsyncIterator[None]:
        try:
            async with lifespan_of(built.app):
                yield
        finally:
            if recall.service.stop():
                close(loaded)
            for each in (tape, traces, kv_events):
                if each:
                    each.close()

    return built.app, running()


def serve(options: Options, *, began: float, when_loaded: Callable[[], None] = lambda: None) -> None:
    """Load the model, warm up, and serve until a signal ends it. It logs to standard output.

    ``when_loaded`` is called when the model is loaded, before the lines of the start-up are logged.
    ``began`` is the start of the process by `time.perf_counter`; the time since then was spent importing libraries.

    Raises:
        ConfigError: as `load`, or an address, API keys, TLS files, a trace file or a trace exporter cannot be used.
    """
    libraries = time.perf_counter() - began
    log = start_log(options.observability)
    try:
        if (rank := launched_rank(options.model)) is not None:
            when_loaded()
            rank()
        else:
            _serve(options, began, libraries, when_loaded)
    finally:
        log.flush()


def _serve(options: Options, began: float, libraries: float, when_loaded: Callable[[], None]) -> None:
    check_tls(options.server)
    check_address(options.server)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # not handled yet; later reloads read changed files
    keys = open_keys(options.server)
    if warning := exposure_warning(options.server, keys.keys.required):
        startup.warning("%s", warning)
    traces = open_traces(options.observability)
    if runs_pooling(options.model):
        serve_pooling(options, keys, traces, began, when_loaded)
        return
    tape = open_tape(options.server)
    models = load_pooling(options)
    loaded = load(options, tape.tell if tape else None)
    kv_events = open_kv_events(loaded, options)
    models = with_served(models, options, loaded)
    warm_up(loaded)
    when_loaded()
    loaded.seconds["libraries"] = libraries
    with timed(loaded.seconds, "routes"):
        built = _make_app(loaded, options, keys, traces, models, hosts(options.server))
        recall = built.recall
        metrics = make_metrics_app(built.routes, options.server)
        reload = Reload(
            partial(read_settings, options),
            keys,
            recall.service,
            loaded.engine,
            built.model,
            classes=loaded.classes,
            recorded=tape is not None,
            set_level=set_level,
        )
    profile = f"profile      {profile_line(options)}"
    for line in (
        *describe(loaded),
        *describe_models(models),
        profile,
        *describe_tenants(loaded.tenants, loaded.classes),
        *describe_caches(options.response_cache),
    ):
        startup.info("%s", line)

    def ready(url: str) -> None:
        seconds = time.perf_counter() - began
        startup.info("ready        %s after %.2f s", url, seconds, extra={"fields": {"url": url}})
        built.systemd.notifier.send("READY=1")

    try:
        run_server(Apps(built.app, metrics), recall.service, options.server, ready, reload)
    finally:
        saved = close(loaded) if recall.service.stop() else ""
        for each in (tape, traces, kv_events):
            if each:
                each.close()
        fields = {"finished_requests": recall.service.finished_requests, "saved": saved or None}
        shutdown.info("server stopped", extra={"fields": fields})


def _dialect(loaded: Loaded, options: ServerOptions) -> Dialect:
    try:
        return Dialect(loaded.template, options.tool_call_parser, options.reasoning_parser)
    except UnknownParser as error:
        raise ConfigError(str(error)) from error


class _Built(NamedTuple):
    """The application, and the parts that its start, its reloads and its end need."""

    app: ASGIApp
    routes: list[Route]
    recall: CacheLookup
    model: ServedModel
    systemd: SystemdLink


def _make_app(
    loaded: Loaded,
    all_options: Options,
    keys: KeyFile,
    traces: Traces | None,
    models: PoolingModels,
    named: Hosts,
) -> _Built:
    options, caching = all_options.server, all_options.response_cache
    model = _make_model(loaded, all_options)
    # The lambdas use variables that are assigned below.
    folds = make_folds(loaded, all_options, model, lambda: recall.sizes() | prefix_sizes(loaded))
    service = _make_service(loaded, options, folds)
    if folds.cost.ledger.pricing.given:
        model.cost = costs(service, folds.cost)
    prompts = make_prompts(loaded, all_options, folds.page, service)
    model.prompts = prompts.policy
    history = open_history(all_options.warm)
    semantic, verdicts = all_options.semantic, make_verdicts(all_options.semantic)
    recall = make_recall(caching, semantic, loaded, service, history, all_options.tuning, verdicts)

    serving = _make_serving(options, recall, model, make_recorder(all_options.warm, history))
    notes, api = serving.notes, Api(serving)
    warming = Warming(all_options.warm, caching, options, recall, model, history, verdicts)
    for each in (warming.warmer, *prompts.watchers):
        service.watch(each, tokens=False)
    for watcher, tokens in watchers(traces):
        service.watch(watcher, tokens=tokens)
    systemd = systemd_link(service)
    embedding = open_endpoints(all_options, models, service, folds.page, folds.metrics, model.cost)
    status = _make_status(loaded, service, model, notes, folds, prompts, warming.not_yet, embedding.cards)
    stats = (folds.metrics.caches.stats, folds.savings.stats)
    caches = CacheApi(recall, *stats, max_body_bytes=options.max_body_bytes)
    usage_file, focus = open_usage_file(all_options, folds), partial(focus_csv, folds.cost)
    accounts = UsageReport(service, folds.usage.tenants, folds.usage_of, folds.cost.device, focus, usage_file)
    abort = Abort(notes, max_body_bytes=options.max_body_bytes)
    responses, messages = open_responses(options, serving), Messages(serving)
    lines = (*_lines(serving, embedding), ResponsesLines(responses), MessagesLines(messages))
    batch = open_batches(all_options.batch, options, service, lines, model.name)
    tuning = make_tuning(all_options, loaded.engine, recall, machine_of(loaded), folds.lives)
    more = (
        status,
        SessionsApi(model),
        Pause(service),
        caches,
        accounts,
        warming.endpoint,
        batch,
        embedding,
        *tuning.endpoints,
        *_make_pages(loaded, all_options, model, service, notes, folds),
        Docs(__version__),
    )
    routes = [route for part in (api, responses, messages, abort, *more) for route in part.routes()]
    files: list[BackgroundWork | None] = [history, usage_file]
    background = [keys.watch, *(file for file in files if file is not None), warming.warmer]
    background += [systemd.watch, responses.background, *batch.background, embedding.worker, *tuning.tasks]
    exchanges = hooks(all_options.observability, folds.page, notes, traces, model.text_seconds)
    app = create_app(recall, routes, keys.keys, background, options.allowed_origins, exchanges, named)
    return _Built(app, routes, recall, model, systemd)


def _make_service(loaded: Loaded, options: ServerOptions, folds: Folds) -> Service:
    return Service(
        loaded.engine,
        Limits(options.max_num_queued_reqs, options.max_num_queued_tokens),
        watchers=folds.watchers,
        meter=QuotaMeter(loaded.tenants, loaded.name),
        request_timeout=options.request_timeout,
        interrupt=loaded.runner.bell,
    )


def _make_serving(
    options: ServerOptions, recall: CacheLookup, model: ServedModel, recorder: QuestionRecorder | None
) -> Serving:
    service = recall.service
    return Serving(
        recall,
        model,
        CallNotes(),
        options.max_body_bytes,
        options.request_timeout,
        lambda tenant: rate_headers(service.meter.rooms(tenant, service.now())),
        recorder,
    )


def _lines(serving: Serving, pooling: Endpoints) -> tuple[LineEndpoints, ...]:
    timeout = serving.request_timeout
    generated = GeneratedLines(serving.recall, serving.model, serving.notes, request_timeout=timeout)
    return generated, PooledLines(pooling.calls, request_timeout=timeout)


def _make_status(
    loaded: Loaded,
    service: Service,
    model: ServedModel,
    notes: CallNotes,
    folds: Folds,
    prompts: Prompts,
    not_yet: Callable[[], str],
    cards: Sequence[ListedModel],
) -> Status:
    return Status(
        service,
        model,
        notes,
        explain=folds.explain,
        metrics=folds.page.render,
        info=partial(_server_info, loaded),
        reset=loaded.engine.reset_prefix_cache,
        version=__version__,
        predict_start=lambda request_id, now: estimate_fields(loaded.engine.estimate_start(request_id)),
        prefix=prompts.explain,
        not_yet=not_yet,
        others=cards,
    )


def _make_model(loaded: Loaded, options: Options) -> ServedModel:
    loaded.grammars.prepare()
    model = ServedModel(
        loaded.name,
        loaded.tokenizer,
        loaded.template,
        loaded.ledger.max_model_len,
        loaded.shape.vocab_size,
        source=str(loaded.folder),
        rules=Rules(loaded.policy, {each.name: each for each in loaded.classes}, loaded.tenants),
        stream_interval=options.server.stream_interval,
        dialect=_dialect(loaded, options.server),
        also_named=served_names(options.model)[1:],
        aliases=(options.model.model,),
        grammars=loaded.grammars,
        trust_request_chat_template=options.server.trust_request_chat_template,
        defaults=loaded.defaults,
    )
    if loaded.transfer is not None:
        model.sharing = loaded.transfer.sharing()
    return model


def _make_pages(
    loaded: Loaded, options: Options, model: ServedModel, service: Service, notes: CallNotes, folds: Folds
) -> tuple[Pages, StepRoutes, RequestTimeline]:
    """The pages, and the steps and timelines that they show."""
    settings = {
        "model": loaded.name,
        "scheduling_policy": loaded.policy,
        "max_num_seqs": options.scheduler.max_num_seqs,
        "max_num_batched_tokens": loaded.engine.knobs.batched_tokens,
        "num_blocks": loaded.ledger.num_blocks,
        "block_size": loaded.ledger.block_size,
    }
    steps = make_stepping(loaded.engine, service, notes, folds.lives, folds.explain, settings)
    return (make_pages(loaded, options, model, service, folds), *steps)


def _server_info(loaded: Loaded) -> dict[str, Any]:
    """The fields for ``GET /server_info``."""
    return {
        "model": loaded.name,
        "dtype": loaded.dtype,
        "kernels": loaded.kernels,
        "isa": loaded.isa or None,
        "quantization": loaded.quantization or None,
        "ledger": asdict(loaded.ledger),
        "knobs": asdict(loaded.engine.knobs),
        "startup_seconds": loaded.seconds,
    }
