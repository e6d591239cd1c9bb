"""Log, warnings, HTTP metrics, traces and systemd notification of a server, composed from its options."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import torch

from headrace import __version__
from headrace.api.exchange import Exchange, Hook, Hooks
from headrace.api.operations.access_log import PROBES, AccessLog, access_fields
from headrace.api.serving import CallNotes
from headrace.config import ConfigError, ObservabilityOptions, Options, read_systemd
from headrace.core.ports import Watcher
from headrace.observe.cost.meter import CostMeter
from headrace.observe.cost.report import CostReport
from headrace.observe.http_requests import HttpRequests
from headrace.observe.log.warnings import WarningLog
from headrace.observe.log.writer import LogWriter, install
from headrace.observe.metrics_page import MetricsPage
from headrace.observe.resources.energy import RaplEnergy
from headrace.observe.resources.meter import ResourceMeter
from headrace.observe.resources.nvml import open_nvml
from headrace.observe.resources.threads import ThreadTimes
from headrace.observe.resources.traffic import Traffic
from headrace.observe.resources.work import ModelWork, Peaks, WorkMeter
from headrace.observe.tracing.attributes import span_attributes, span_name
from headrace.observe.tracing.spans import RequestSpans
from headrace.service.health_watch import HealthWatch
from headrace.service.service import Service
from headrace.service.systemd import SystemdNotifier
from headrace.wiring.model import Loaded

TRACES_PATH = "/v1/traces"
"""The path of OTLP over HTTP, for an endpoint that names only a host and a port."""

SERVER_ERROR = 500

BUILD_INFO_HELP = "Versions and settings of this server; always 1."
BUILD_INFO_LABELS = ("version", "torch", "python", "kernels", "dtype", "quantization")


def start_log(options: ObservabilityOptions) -> LogWriter:
    """Log to standard output from now on."""
    return install(sys.stdout, options.log_level, options.log_format)


class Traces(NamedTuple):
    """Makes spans of HTTP requests as hooks of an `Exchange`; ``close`` sends those that are queued."""

    spans: RequestSpans
    close: Callable[[], None]

    def begin(self, exchange: Exchange) -> None:
        """Begin the span of an HTTP request; probes have none."""
        if exchange.path not in PROBES:
            exchange.traceparent = self.spans.begin(exchange.traceparent)

    def follow(self, exchange: Exchange) -> None:
        """Make spans of the engine's requests of a call."""
        self.spans.follow(exchange.traceparent, exchange.request_ids)

    def end(self, exchange: Exchange) -> None:
        """End the span of an HTTP request; a client's error does not mark the span as failed."""
        fields = access_fields(exchange)
        error = exchange.error if fields["status"] >= SERVER_ERROR or exchange.call is not None else ""
        name = span_name(exchange.method, exchange.route, exchange.model)
        attributes = span_attributes(exchange.route, fields)
        self.spans.end(exchange.traceparent, name, exchange.began, exchange.ended, attributes, error)


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
        from headrace.observe.tracing.export import SpanExporter
    except ImportError as error:
        raise ConfigError(
            f"--otlp-traces-endpoint needs OpenTelemetry ({error}); install it with: pip install 'headrace[otel]'"
        ) from error
    address = endpoint if url.path.strip("/") else endpoint.rstrip("/") + TRACES_PATH
    exporter = SpanExporter(
        address, {"service.name": "headrace", "service.version": __version__}, __version__
    )
    return Traces(RequestSpans(exporter.export, time.time() - time.monotonic()), exporter.close)


def watchers(traces: Traces | None) -> list[tuple[Watcher, bool]]:
    """The watchers that log and trace, and whether each needs `Emitted` events."""
    return [(WarningLog(), False), *([(traces.spans, True)] if traces else [])]


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
    return Hooks((traces.begin,), (notes.name, traces.follow), (*ended, traces.end), tuple(stopped))


def costs(service: Service, report: CostReport) -> Callable[[Iterable[str]], Mapping[str, Any]]:
    """A function that returns the cost of engine requests; it counts all completed steps first."""

    def cost(request_ids: Iterable[str]) -> Mapping[str, Any]:
        service.count()
        return report.usage_cost(request_ids)

    return cost


def model_work(loaded: Loaded) -> ModelWork:
    """The sizes that determine the work of a step of this model."""
    shape, memory = loaded.shape, loaded.ledger
    table = shape.vocab_size * shape.hidden_size
    linear = shape.token_parameters - table * (1 if shape.tied_embeddings else 2)
    return ModelWork(
        linear, table, shape.attention_width, memory.weight_bytes, memory.block_bytes // memory.block_size
    )


def watch_resources(page: MetricsPage, loaded: Loaded, options: Options, cost: CostReport) -> WorkMeter:
    """Add the metrics of resources. The returned watcher must receive events after the cost ledger."""
    peaks = Peaks(options.resources.peak_flops, options.resources.peak_bandwidth)
    work = WorkMeter(
        page,
        cost.ledger,
        model_work(loaded),
        time.monotonic,
        slots=options.scheduler.max_num_seqs,
        peaks=peaks,
    )
    device = open_nvml(_gpu_uuid()) if loaded.facts.kind == "cuda" else None
    cost.energy = ResourceMeter(page, lambda: work.tokens, ThreadTimes(), RaplEnergy(), device).energy
    CostMeter(page, cost.ledger, time.monotonic)
    return work


def _gpu_uuid() -> str:
    """The UUID of the GPU in use, in NVML's format."""
    return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"


class SystemdLink(NamedTuple):
    """The notifier of this process, and the watch that uses it; ``watch`` is started with the server."""

    notifier: SystemdNotifier
    watch: HealthWatch


def systemd_link(service: Service) -> SystemdLink:
    """The link to systemd as configured by the environment; without systemd, the watch only logs."""
    asked = read_systemd()
    notifier = SystemdNotifier(asked.notify_socket)
    return SystemdLink(notifier, HealthWatch(service, notifier, asked.watchdog_seconds))


def add_build_info(page: MetricsPage, loaded: Loaded) -> None:
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
