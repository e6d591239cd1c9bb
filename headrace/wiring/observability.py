"""Folds over a server's events, usage and cost, logs, warnings, HTTP metrics, traces, KV events, and systemd
notification.
"""

from __future__ import annotations

import platform
import socket
import sqlite3
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

import torch

from headrace import __version__
from headrace.api.compile.model import ServedModel
from headrace.api.exchange import Exchange, Hook, Hooks
from headrace.api.operations.access_log import PROBES, AccessLog, access_fields
from headrace.api.operations.status import UsageReport
from headrace.api.serving import CallNotes
from headrace.config import ConfigError, ObservabilityOptions, Options, ResourceOptions, read_systemd
from headrace.config.objects import read_kv_events
from headrace.core.events import Layer
from headrace.core.ports import StoreFacts
from headrace.lab.plan.roofline import BY_DRIVER_NAME
from headrace.observe.cache_metrics import LOOKUP_SECONDS
from headrace.observe.cost.ledger import CostMeter
from headrace.observe.cost.report import CostReport, focus_csv
from headrace.observe.cost.usage import TenantSavings, UsageJournal, UsageStore
from headrace.observe.engine_series import RunnerSeries
from headrace.observe.goodput import Goodput
from headrace.observe.log import LogWriter, WarningLog, install
from headrace.observe.metrics import HttpRequests, Metrics, Traffic
from headrace.observe.metrics_page import Histogram, MetricsPage, aliases, labels
from headrace.observe.readings import Folds
from headrace.observe.requests import RequestBook
from headrace.observe.resources import RaplEnergy, ResourceMeter, ThreadTimes, open_nvml
from headrace.observe.steps.timelines import Timelines
from headrace.observe.tracing import RequestSpans, begun, span_attributes, span_name
from headrace.observe.usage import UsageBook
from headrace.observe.work import ModelWork, Peaks, WorkMeter
from headrace.service.health_watch import HealthWatch, SystemdNotifier, Watched
from headrace.service.usage_file import UsageFile
from headrace.wiring.controls import Controls
from headrace.wiring.engine import make_ledger, make_pricing
from headrace.wiring.feature import Feature, Hall
from headrace.wiring.model import Loaded, ReadyModel

if TYPE_CHECKING:
    from headrace.observe.kv_events import Publisher

CacheSizes = Callable[[], Mapping[Layer, Mapping[str, StoreFacts]]]


def make_folds(loaded: ReadyModel, options: Options, model: ServedModel, cache_sizes: CacheSizes) -> Folds:
    """The folds of one engine; ``cache_sizes`` returns the size of each cache layer."""
    ledger, prefix, controls = loaded.ledger, options.server.metrics_prefix, loaded.controls
    pricing = make_pricing(options.cost)
    cost = CostReport(make_ledger(pricing, lambda: controls.counts.coefficients), loaded.name)
    prices = cost.ledger.token_prices
    page = MetricsPage(prefix, labels(prefix, loaded.name), aliases(prefix))
    page.add_process()
    add_build_info(page, loaded)
    metrics = Metrics(
        page,
        clock_offset=time.time() - time.monotonic(),
        classes=[each.name for each in loaded.classes],
        cache_config={"block_size": str(ledger.block_size), "num_gpu_blocks": str(ledger.num_blocks)},
        phase_seconds=lambda: controls.counts.runner.phase_seconds,
        prices=prices,
        cache_sizes=cache_sizes,
        checkpoint_bytes=ledger.state_bytes,
    )
    lookups = Histogram(LOOKUP_SECONDS)
    metrics.caches.time_prefix(lookups)
    page.before_render(partial(_measure_engine, metrics.runner, lookups, controls))
    work = watch_resources(page, loaded, options, cost)
    goodput = Goodput(page, lambda tenant: model.rules.tenants.terms(tenant).weight)
    book = RequestBook(by_priority=loaded.policy in ("fair", "priority"))
    return Folds(page, metrics, goodput, book, UsageBook(), TenantSavings(prices), cost, work, Timelines())


def _measure_engine(series: RunnerSeries, lookups: Histogram, controls: Controls) -> None:
    counts = controls.counts
    series.measure(counts.runner.padding_tokens, counts.runner.collective_bytes, counts.runner.experts)
    lookups.counts, lookups.total = list(counts.lookups[0]), counts.lookups[1]


def accounts(options: Options, hall: Hall, savings: TenantSavings | None) -> Feature:
    """The report of usage and cost, and the file of ``--usage-file``; ``savings`` of the caches, if there are any."""
    file = None if savings is None else _open_usage_file(options, hall.cost, savings)
    focus = partial(focus_csv, hall.cost)
    report = UsageReport(hall.service, hall.usage.tenants, hall.usage_of, hall.cost.device, focus, file)
    return Feature([report], background=[] if file is None else [file])


def _open_usage_file(options: Options, cost: CostReport, savings: TenantSavings) -> UsageFile | None:
    """The file of ``--usage-file``.

    Raises:
        ConfigError: it cannot be opened.
    """
    path = options.observability.usage_file
    if path is None:
        return None
    try:
        store = UsageStore(Path(path), cost.ledger.pricing.currency)
    except (OSError, sqlite3.Error) as error:
        raise ConfigError(f"--usage-file {path} cannot be opened: {error}") from error
    return UsageFile(store, UsageJournal(cost, savings, time.time).take)


TRACES_PATH = "/v1/traces"
"""The path of OTLP over HTTP, for an endpoint that names only a host and a port."""

SERVER_ERROR = 500

BUILD_INFO_HELP = "Versions and settings of this server; always 1."
BUILD_INFO_LABELS = ("version", "torch", "python", "kernels", "dtype", "quantization")


def start_log(options: ObservabilityOptions) -> LogWriter:
    """Log to standard output from now on."""
    return install(sys.stdout, options.log_level, options.log_format, options.log_name)


def begin_span(exchange: Exchange) -> None:
    """A hook: begin the span of an HTTP request; probes have none."""
    if exchange.path not in PROBES:
        exchange.traceparent, exchange.parent_id = begun(exchange.traceparent)


class Traces(NamedTuple):
    """Makes spans of HTTP requests as hooks of an `Exchange`; ``close`` sends those that are queued."""

    spans: RequestSpans
    close: Callable[[], None]

    def follow(self, exchange: Exchange) -> None:
        """Make spans of the engine's requests of a call."""
        if exchange.parent_id is not None:
            self.spans.follow(exchange.traceparent, exchange.request_ids)

    def end(self, exchange: Exchange) -> None:
        """End the span of an HTTP request; a client's error does not mark the span as failed."""
        if exchange.parent_id is None:
            return
        fields = access_fields(exchange)
        error = exchange.error if fields["status"] >= SERVER_ERROR or exchange.call is not None else ""
        name = span_name(exchange.method, exchange.route, exchange.model)
        attributes = span_attributes(exchange.route, fields)
        times = exchange.began, exchange.ended
        self.spans.end(exchange.traceparent, exchange.parent_id, name, *times, attributes, error)


def open_traces(options: ObservabilityOptions) -> Traces | None:
    """The exporter of ``--otlp-traces-endpoint``; None without that option.

    Raises:
        ConfigError: the endpoint is no URL, or the extra ``otel`` is not installed.
    """
    endpoint = options.otlp_traces_endpoint
    if endpoint is None:
        return None
    url = urlsplit(endpoint)
    if url.scheme not in ("http", "https") or not url.netloc:
        raise ConfigError(
            f"--otlp-traces-endpoint {endpoint}: give a URL such as http://localhost:4318{TRACES_PATH}"
        )
    try:
        from headrace.observe.span_exporter import SpanExporter
    except ImportError as error:
        raise ConfigError(
            f"--otlp-traces-endpoint needs OpenTelemetry ({error}); install it with: pip install 'headrace[otel]'"
        ) from error
    address = endpoint if url.path.strip("/") else endpoint.rstrip("/") + TRACES_PATH
    exporter = SpanExporter(
        address, {"service.name": "headrace", "service.version": __version__}, __version__
    )
    return Traces(RequestSpans(exporter.export, time.time() - time.monotonic()), exporter.close)


def watching(traces: Traces | None) -> Feature:
    """Logs warnings, and exports traces if an exporter is open."""
    if traces is None:
        return Feature(watchers=[WarningLog()])
    return Feature(watchers=[WarningLog(), traces.spans], close=traces.close)


def hooks(
    options: ObservabilityOptions,
    page: MetricsPage,
    notes: CallNotes,
    traces: Traces | None,
    text_seconds: Callable[[], Mapping[str, float]] = dict,
) -> Hooks:
    """The hooks for each HTTP request: request id, metrics, access log, trace."""
    requests, traffic = HttpRequests(page), Traffic(page, text_seconds)
    ended: list[Hook] = [
        lambda exchange: requests.count(exchange.route, exchange.method, exchange.status),
        lambda exchange: traffic.count(exchange.received_bytes, exchange.sent_bytes),
    ]
    stopped: list[Callable[[], None]] = []
    if options.access_log:
        log = AccessLog()
        ended.append(log.add)
        stopped.append(log.flush)
    if traces is None:
        return Hooks((), (notes.name,), tuple(ended), tuple(stopped))
    return Hooks((begin_span,), (notes.name, traces.follow), (*ended, traces.end), tuple(stopped))


def model_work(loaded: ReadyModel) -> ModelWork:
    """The sizes that determine the work of a step of this model, on all ranks together."""
    shape, memory = loaded.shape, loaded.ledger
    weights = memory.weight_bytes + sum(each.weight_bytes for each in memory.other_ranks)
    kv = memory.kv_bytes + sum(each.kv_bytes for each in memory.other_ranks)
    table = shape.vocab_size * shape.hidden_size
    linear = shape.token_parameters - table * (1 if shape.tied_embeddings else 2)
    sparse = shape.sparse
    if sparse is not None:  # in bytes
        sparse = sparse._replace(size=round(sparse.size * weights / shape.num_parameters))
    per_token = kv // (memory.num_blocks * memory.block_size) * (1 + memory.windows.groups)
    return ModelWork(linear, table, shape.attention_width, weights, per_token, sparse, memory.state_bytes)


def peak_rates(loaded: ReadyModel, options: ResourceOptions) -> Peaks:
    """The peaks of all ranks together: as configured for one device, else those of a GPU with a known name."""
    spec = BY_DRIVER_NAME.get(loaded.facts.name) if loaded.facts.kind == "cuda" else None
    flops, bandwidth = options.peak_flops, options.peak_bandwidth
    if spec is not None:
        flops, bandwidth = flops or spec.bf16_flops, bandwidth or spec.bandwidth
    ranks = 1 + len(loaded.ledger.other_ranks)
    return Peaks(flops * ranks, bandwidth * ranks)


def watch_resources(page: MetricsPage, loaded: ReadyModel, options: Options, cost: CostReport) -> WorkMeter:
    """Add the metrics of resources. The returned watcher must receive events after the cost ledger."""
    work = WorkMeter(
        page,
        cost.ledger,
        model_work(loaded),
        time.monotonic,
        slots=options.scheduler.max_num_seqs,
        peaks=peak_rates(loaded, options.resources),
    )
    device = open_nvml(loaded.gpu_uuid) if loaded.gpu_uuid else None
    controls = loaded.controls
    threads = ThreadTimes(engine=lambda: controls.other_cpu_seconds)
    cost.energy = ResourceMeter(page, lambda: work.tokens, threads, RaplEnergy(), device).energy
    CostMeter(page, cost.ledger, time.monotonic)
    return work


class SystemdLink(NamedTuple):
    """The notifier of this process, and the watch that uses it; ``watch`` is started with the server."""

    notifier: SystemdNotifier
    watch: HealthWatch


def systemd(service: Watched) -> SystemdLink:
    """The link to systemd as configured by the environment; without systemd, the watch only logs."""
    asked = read_systemd()
    notifier = SystemdNotifier(asked.notify_socket)
    return SystemdLink(notifier, HealthWatch(service, notifier, asked.watchdog_seconds))


def add_build_info(page: MetricsPage, loaded: ReadyModel) -> None:
    """Add the constant metric ``build_info``, whose labels are versions and settings."""
    values = (
        __version__,
        torch.__version__,
        platform.python_version(),
        loaded.kernels,
        loaded.dtype,
        loaded.quantization or "none",
    )
    page.gauge("build_info", BUILD_INFO_HELP, BUILD_INFO_LABELS).of(*values).value = 1.0


KV_EVENTS = "--kv-events-config"


def open_kv_events(loaded: Loaded, options: Options) -> Publisher | None:
    """The publisher of a loaded engine's prefix cache, which runs until it is closed; None without the option.

    Raises:
        ConfigError: there is no prefix cache, an address cannot be used, or the extra ``kv-events`` is not installed.
    """
    if options.observability.kv_events_config is None:
        return None
    config = read_kv_events(KV_EVENTS, options.observability.kv_events_config)
    if not config.enable_kv_cache_events or config.publisher == "null":
        return None
    if not options.cache.enable_prefix_caching:
        raise ConfigError(f"{KV_EVENTS} publishes the prefix cache, but --no-enable-prefix-caching is given")
    try:
        from headrace.observe.kv_events import AddressFailed, Changes, Publisher
    except ImportError as error:
        raise ConfigError(
            f"{KV_EVENTS} needs pyzmq and msgspec ({error}); install them with: pip install 'headrace[kv-events]'"
        ) from error
    changes = Changes(config.max_queue_size)
    pool = loaded.engine.scheduler.pool
    try:
        publisher = Publisher(
            changes,
            block_size=pool.block_size,
            endpoint=config.endpoint,
            replay_endpoint=config.replay_endpoint,
            topic=config.topic,
            waiting=config.hwm,
            kept=config.buffer_steps,
            host=_address(options.server.host),
        )
    except AddressFailed as failed:
        raise ConfigError(f"{KV_EVENTS}: {failed}") from failed
    pool.notifier.listeners.append(changes)
    return publisher


def _address(host: str) -> str:
    """The address of the server, at which ZeroMQ's ``*`` listens: ZeroMQ itself would listen at all addresses."""
    try:
        address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError(f"--host {host}: {(error.strerror or str(error)).lower()}") from error
    return f"[{address}]" if ":" in address else address
