"""The HTTP server: what is loaded, its features in order, its start and its end.

A server has a model that generates, or models for embeddings and scores, or both. Everything else is a `Feature`.
"""

from __future__ import annotations

import logging
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from typing import NamedTuple

from starlette.routing import Route
from starlette.types import ASGIApp

from headrace import __version__
from headrace.api.app import create_app, create_metrics_app, lifespan_of
from headrace.api.auth.access import Hosts
from headrace.api.auth.api_keys import KeyFile
from headrace.api.batch.line_runner import (
    LineEndpoints,
    PooledLines,
)
from headrace.api.batch.routes import open_batches
from headrace.api.fronts.owner import Owner
from headrace.api.openapi import Docs
from headrace.api.operations.status import Pause
from headrace.api.runtime.listening import check_address, check_tls, exposure_warning, hosts
from headrace.api.runtime.run import Apps, run_server
from headrace.config import ConfigError, Options, profile_line
from headrace.core.tenancy.tenants import ServiceClass, Tenants
from headrace.observe.log import set_level
from headrace.service.embedding_models import PoolingModels
from headrace.service.embedding_worker import Begin
from headrace.service.health_watch import SystemdNotifier
from headrace.service.remote_pooling import RemoteBatches
from headrace.service.service import Service
from headrace.wiring.embedding import load_pooling, runs_pooling, with_served
from headrace.wiring.engine_process import start_engine
from headrace.wiring.feature import Feature, Hall
from headrace.wiring.front_ends import (
    FrontEnds,
    check_front_ends,
    opened_address,
    start_front_end,
)
from headrace.wiring.generation import Generation, generation_features, open_generation
from headrace.wiring.loading.ranks import launched_rank
from headrace.wiring.model import ReadyModel, describe, load, timed
from headrace.wiring.observability import (
    Traces,
    accounts,
    hooks,
    open_kv_events,
    open_traces,
    start_log,
    systemd,
    watching,
)
from headrace.wiring.pooling import Pooling, make_pooling, open_pooling_hall, pooling_only
from headrace.wiring.recording import open_recording
from headrace.wiring.reload import Reload, read_settings
from headrace.wiring.tenants import describe_tenants, open_keys, read_tenants

startup = logging.getLogger("headrace.startup")
shutdown = logging.getLogger("headrace.shutdown")


class Models(NamedTuple):
    """What is loaded: ``loaded`` is None on a server that does not generate. ``beside`` watches or feeds its engine.

    Batches of ``pooling`` models ``begin`` in another process, or here (None).
    """

    pooling: PoolingModels
    loaded: ReadyModel | None
    beside: tuple[Feature, ...]
    begin: Begin | None = None


class Server(NamedTuple):
    """The application, and the parts that its start, its reloads and its end need."""

    app: ASGIApp
    routes: list[Route]
    service: Service
    loaded: ReadyModel | None
    features: list[Feature]
    reload: Reload
    notifier: SystemdNotifier

    def close(self) -> str:
        """Stop the engine and free its memory; returns a note on the blocks that are saved for the next process."""
        stopped = self.service.stop()
        saved = "" if self.loaded is None else self.loaded.close(stopped)
        for each in self.features:
            if each.close is not None:
                each.close()
        return saved


def build_app(options: Options) -> tuple[ASGIApp, AbstractAsyncContextManager[None]]:
    """The server's application for use without a socket, and the context in which its engine runs.

    This call loads the model. Enter the context once, before the first request; an application that mounts this one
    does not start it. Leaving the context stops the engine and frees its memory.

    Raises:
        ConfigError: as `load`, or API keys, a trace file or a trace exporter cannot be used.
    """
    keys, traces = open_keys(options.server), open_traces(options.observability)
    server = _make_server(_load(options), options, keys, traces, Hosts(options.server.allowed_hosts))

    @asynccontextmanager
    async def running() -> AsyncIterator[None]:
        try:
            async with lifespan_of(server.app):
                yield
        finally:
            server.close()

    return server.app, running()


def serve(
    options: Options,
    *,
    began: float,
    when_loaded: Callable[[], None] = lambda: None,
    listens: Callable[[Server], object] | None = None,
) -> None:
    """Load the model, warm up, and serve until a signal ends it. It logs to standard output.

    ``when_loaded`` is called when the model is loaded, before the lines of the start-up are logged.
    ``listens`` is called when requests are accepted, instead of a line that says so.
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
            _serve(options, began, libraries, when_loaded, listens)
    finally:
        log.flush()


def _serve(
    options: Options,
    began: float,
    libraries: float,
    when_loaded: Callable[[], None],
    listens: Callable[[Server], object] | None,
) -> None:
    """Check what can be wrong, then serve, behind front ends if there are several."""
    check_tls(options.server)
    check_address(options.server)
    if options.server.api_server_count == 1:
        _serve_here(options, began, libraries, when_loaded, listens, None)
        return
    check_front_ends(options)
    with opened_address(options.server) as address, tempfile.TemporaryDirectory(prefix="headrace-") as folder:
        count, start = options.server.api_server_count, partial(start_front_end, options, address)
        fronts = FrontEnds(count, address.url, folder, start)
        try:
            _serve_here(options, began, libraries, when_loaded, listens, fronts)
        finally:
            fronts.close()
        if fronts.refusal:
            raise ConfigError(fronts.refusal)
        if fronts.failure:
            raise SystemExit(f"headrace: {fronts.failure}")


def _serve_here(
    options: Options,
    began: float,
    libraries: float,
    when_loaded: Callable[[], None],
    listens: Callable[[Server], object] | None,
    fronts: FrontEnds | None,
) -> None:
    # 1. What can be wrong with the options is found before a model is loaded.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # not handled yet; later reloads read changed files
    keys = open_keys(options.server)
    if warning := exposure_warning(options.server, keys.keys.required):
        startup.warning("%s", warning)
    traces = open_traces(options.observability)
    # 2. Load and warm up.
    models = _load(options)
    loaded = models.loaded
    if loaded is not None:
        loaded.warm_up()
    when_loaded()
    # 3. Put the features in order.
    seconds = {} if loaded is None else loaded.seconds
    seconds["libraries"] = libraries
    with timed(seconds, "routes"):
        server = _make_server(models, options, keys, traces, hosts(options.server), fronts)
        metrics = _metrics_app(server.routes, options)
    # 4. Say what was built, and serve.
    first = [] if loaded is None else describe(loaded)
    for line in (*first, *(line for feature in server.features for line in feature.lines)):
        startup.info("%s", line)

    def ready(url: str) -> None:
        seconds = time.perf_counter() - began
        if listens is not None:
            listens(server)
            return
        startup.info("ready        %s after %.2f s", url, seconds, extra={"fields": {"url": url}})
        server.notifier.send("READY=1")

    own, started = options.server, ready
    if fronts is not None:
        own, started = fronts.own_options(own), partial(fronts.begin, ready)
    try:
        run_server(Apps(server.app, metrics), server.service, own, started, server.reload)
    finally:
        saved = server.close()
        fields = {"finished_requests": server.service.finished_requests, "saved": saved or None}
        shutdown.info("server stopped", extra={"fields": fields if loaded is not None else {}})


def _load(options: Options) -> Models:
    if options.server.engine_process:
        remote = start_engine(options)
        return Models(remote.pooling, remote, (), RemoteBatches(remote.process).begin)
    if runs_pooling(options.model):
        models = load_pooling(options)
        if not models.all():
            raise ConfigError("--runner pooling: there is neither an embedding model nor a cross-encoder")
        return Models(models, None, ())
    recording = open_recording(options.server)
    models = load_pooling(options)
    loaded = load(options, recording.tell if recording else None)
    kv_events = open_kv_events(loaded, options)
    beside = tuple(Feature(close=each.close) for each in (recording, kv_events) if each is not None)
    return Models(with_served(models, options, loaded), loaded, beside)


def _make_server(
    models: Models,
    options: Options,
    keys: KeyFile,
    traces: Traces | None,
    named: Hosts,
    fronts: FrontEnds | None = None,
) -> Server:
    loaded = models.loaded
    text = None if loaded is None else open_generation(loaded, options, models.pooling.names())
    if loaded is not None:
        tenants, classes = loaded.tenants, loaded.classes
    else:
        tenants, classes = read_tenants(options.scheduler.tenants)
    hall = text.hall if text else open_pooling_hall(options, models.pooling.all()[0].name, tenants)
    link = systemd(hall.service)
    pooling = make_pooling(options, models.pooling, hall, models.begin)
    features = _features(models, pooling, text, hall, options, traces)
    features.insert(1, _access(keys, tenants, classes, [] if text is None else [profile_line(options)]))
    features.append(Feature(background=[link.watch]))
    ends = [] if fronts is None else [fronts]  # the last: they end first
    features.append(Feature(background=ends, lines=[_front_ends_line(options)]))
    for feature in features:
        for watcher in feature.watchers:
            hall.service.watch(watcher)
    routes = [route for feature in features for part in feature.endpoints for route in part.routes()]
    background = [work for feature in features for work in feature.background]
    text_seconds = text.model.text_seconds if text else dict
    exchanges = hooks(options.observability, hall.page, hall.notes, traces, text_seconds)
    origins = options.server.allowed_origins
    app = create_app(hall.lookup, routes, keys.keys, background, origins, exchanges, named)
    reloads: dict[str, Callable[[], None]] = {}
    if fronts is not None:
        similar = options.semantic.semantic_cache != "off"
        model, history = (None, None) if text is None else (text.model, text.history)
        shared = hall.lookup, model, hall.notes, hall.quota_headers, exchanges, similar, history
        fronts.owner = Owner(*shared, pooling.owned if models.pooling.all() else None)
        reloads = {"fronts": fronts.reload, "send_rules": fronts.owner.send_rules}
    reload = Reload(
        partial(read_settings, options),
        keys,
        hall.service,
        loaded.controls if loaded else None,
        text.model if text else None,
        tenants=tenants,
        classes=classes,
        kv_tokens=loaded.ledger.kv_tokens if loaded else 0,
        policy=options.scheduler.scheduling_policy,
        recorded=options.server.record_trace is not None and text is not None,
        set_level=set_level,
        **reloads,
    )
    return Server(app, routes, hall.service, loaded, features, reload, link.notifier)


def _features(
    models: Models,
    pooling: Pooling,
    text: Generation | None,
    hall: Hall,
    options: Options,
    traces: Traces | None,
) -> list[Feature]:
    """All features, in the order in which they start; they stop in reverse order."""
    pooled = PooledLines(pooling.calls, request_timeout=options.server.request_timeout)
    lines: tuple[LineEndpoints, ...] = (pooled,)
    if text is None:
        own = [pooling_only(options, models.pooling, hall, pooling.cards)]
    else:
        own = generation_features(text, options, pooling.cards)
        generated, *others = text.lines()
        lines = (generated, pooled, *others)
    batches = open_batches(options.batch, options.server, hall.service, lines, hall.name)
    return [
        pooling.feature,
        *own,
        Feature([Pause(hall.service)]),
        accounts(options, hall, text.folds.savings if text else None),
        Feature([batches], background=batches.background),
        watching(traces),
        *models.beside,
        Feature([Docs(__version__)]),
    ]


def _front_ends_line(options: Options) -> str:
    count = options.server.api_server_count
    where = "the server's process answers HTTP" if count == 1 else f"{count} processes answer HTTP"
    return f"front ends   {where}"


def _access(
    keys: KeyFile, tenants: Tenants, classes: tuple[ServiceClass, ...], profiles: list[str]
) -> Feature:
    lines = [*(f"profile      {each}" for each in profiles), *describe_tenants(tenants, classes)]
    return Feature(background=[keys.watch], lines=lines)


def _metrics_app(routes: list[Route], options: Options) -> ASGIApp | None:
    """The application of ``--metrics-port``, if there is one."""
    server = options.server
    if server.metrics_port is None:
        return None
    return create_metrics_app(routes, server.allowed_origins, hosts(server, metrics=True))
