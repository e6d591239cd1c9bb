"""The event stream as Prometheus metrics, under the names that boards and autoscalers know from vLLM.

It knows events and `now`, never the engine or a socket. A tenant is a label of one counter only, and capped.
Classes and fairness between tenants are in `observe.goodput`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from headrace.core.events import (
    AdmitReason,
    Admitted,
    Arrived,
    Audited,
    Chunked,
    Emitted,
    Event,
    Evicted,
    Finished,
    LookedUp,
    Moved,
    Preempted,
    RestoreDeclined,
    Skipped,
    Spared,
    Stepped,
    StoreFaulted,
    TransferFailed,
)
from headrace.observe.cache_ledger import FREE, CacheLedger, Prices, Sizes
from headrace.observe.metrics_page import MetricsPage
from headrace.observe.series import Cell, Histogram
from headrace.observe.tier_ledger import TierLedger

TTFT_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
TOKEN_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_SECONDS = (
    *(0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0),
    *(50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0),
)
STEP_SECONDS = (0.00001, 0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
REQUEST_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
BATCH_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


class _Live:
    """What the metrics remember of a request until it ends; times are the engine's clock."""

    __slots__ = (
        "admitted",
        "arrived",
        "first",
        "generated",
        "last",
        "lost",
        "prompt_tokens",
        "running",
        "tenant",
    )

    def __init__(self, arrived: float, prompt_tokens: int, tenant: str, generated: Cell) -> None:
        self.arrived = arrived
        self.prompt_tokens = prompt_tokens
        self.tenant = tenant
        self.generated = generated
        self.running = False
        self.admitted: float | None = None
        self.first: float | None = None
        self.last = arrived
        self.lost = 0


class Metrics:
    """A `core.ports.Watcher` that writes to ``sheet``.

    ``clock_offset`` is Unix time minus the engine's clock, in seconds. ``cache_config``
    becomes the labels of ``cache_config_info`` (``block_size``, ``num_gpu_blocks`` ...). Tenants beyond the
    first ``tenants`` are counted as ``other``. ``phase_seconds`` tells the seconds spent in each part of a step
    (``forward``, ``sample`` ...) since the start; it is asked once per step. ``prices`` and ``cache_sizes`` are the
    `CacheLedger`'s, which counts in ``caches``.
    """

    def __init__(
        self,
        sheet: MetricsPage,
        *,
        clock_offset: float = 0.0,
        cache_config: Mapping[str, str] | None = None,
        tenants: int = 100,
        phase_seconds: Callable[[], Mapping[str, float]] = dict,
        prices: Prices = FREE,
        cache_sizes: Callable[[], Sizes] = dict,
    ) -> None:
        self._sheet = sheet
        self._clock_offset = clock_offset
        self._live: dict[str, _Live] = {}
        self._phase_seconds = phase_seconds
        self._phase_totals: dict[str, float] = dict(phase_seconds())

        self._running = sheet.gauge("num_requests_running", "Requests in the running batch.").of()
        self._waiting = sheet.gauge("num_requests_waiting", "Requests waiting to be admitted.").of()
        self._usage = sheet.gauge("kv_cache_usage_perc", "Share of KV blocks held by requests, 0 to 1.").of()
        self._waste = sheet.gauge("kv_cache_waste_perc", "Share of held KV slots that are empty.").of()
        self._progress = sheet.gauge(
            "scheduler_last_progress_timestamp_seconds", "Unix time of the last committed step."
        ).of()
        if cache_config is not None:
            info = sheet.gauge("cache_config_info", "How the KV cache is cut.", list(cache_config))
            info.of(*cache_config.values()).value = 1.0

        self._queries = sheet.counter("prefix_cache_queries", "Tokens looked up in the prefix cache.").of()
        self._hits = sheet.counter("prefix_cache_hits", "Tokens found in the prefix cache.").of()
        self._preemptions = sheet.counter("num_preemptions", "Requests put back into the queue.").of()
        self._recomputed = sheet.counter("recomputed_tokens", "Tokens recomputed after a preemption.").of()
        self._prompt = sheet.counter("prompt_tokens", "Prompt tokens prefilled or found in the cache.").of()
        self._generated = sheet.counter("generation_tokens", "Tokens generated.").of()
        self._ended = sheet.counter("request_success", "Requests that ended, by reason.", ["finished_reason"])
        self._skips = sheet.counter("scheduler_wait_reason", "Why requests waited.", ["reason"])
        self._service = sheet.counter(
            "tenant_service_tokens", "Tokens worked on for a tenant.", ["tenant", "kind"], limit=tenants
        )

        self._iteration = sheet.histogram("iteration_tokens_total", "Tokens per step.", ITERATION_TOKENS).of()
        self._rows = sheet.histogram("batch_size", "Rows per step.", BATCH_ROWS).of()
        self._phases = sheet.histogram("scheduler_step_seconds", "Parts of a step.", STEP_SECONDS, ["phase"])
        self._ttft = sheet.histogram("time_to_first_token_seconds", "Time to first token.", TTFT_SECONDS).of()
        self._itl = sheet.histogram(
            "inter_token_latency_seconds", "Time between two emissions of an answer.", TOKEN_SECONDS
        ).of()
        self._tpot = sheet.histogram(
            "request_time_per_output_token_seconds", "Mean time per token after the first.", TOKEN_SECONDS
        ).of()
        self._e2e = self._requests("e2e_request_latency_seconds", "Arrival to end.")
        self._queue = self._requests("request_queue_time_seconds", "Arrival to first admission.")
        self._prefill = self._requests("request_prefill_time_seconds", "First admission to first token.")
        self._decode = self._requests("request_decode_time_seconds", "First token to last token.")
        self._prompt_size = sheet.histogram("request_prompt_tokens", "Prompt length.", REQUEST_TOKENS).of()
        self._output_size = sheet.histogram(
            "request_generation_tokens", "Output length.", REQUEST_TOKENS
        ).of()

        self.caches = CacheLedger(sheet, prices, cache_sizes)
        sheet.before_render(self.caches.measure)

        tiers = TierLedger(sheet)

        self._folds: dict[type, Callable[[Any, float], None]] = {
            Emitted: self._emitted,
            Stepped: self._stepped,
            Chunked: self._chunked,
            Arrived: self._arrived,
            Admitted: self._admitted,
            Skipped: self._skipped,
            Preempted: self._preempted,
            Finished: self._finished,
            LookedUp: self.caches.looked_up,
            Evicted: self.caches.evicted,
            Spared: self.caches.spared,
            Audited: self.caches.audited,
            StoreFaulted: self.caches.faulted,
            Moved: tiers.moved,
            RestoreDeclined: tiers.declined,
            TransferFailed: tiers.failed,
        }

    def fold(self, event: Event, now: float) -> None:
        fold = self._folds.get(type(event))
        if fold is not None:
            fold(event, now)

    def _requests(self, name: str, help: str) -> Histogram:
        return self._sheet.histogram(name, help, REQUEST_SECONDS).of()

    def _arrived(self, event: Arrived, now: float) -> None:
        generated = self._service.of(event.tenant, "generated")
        arrived = now if event.at is None else event.at
        self._live[event.request_id] = _Live(arrived, event.prompt_tokens, event.tenant, generated)
        self._waiting.value += 1

    def _admitted(self, event: Admitted, now: float) -> None:
        live = self._live[event.request_id]
        live.running = True
        self._waiting.value -= 1
        self._running.value += 1
        if event.reason is AdmitReason.NEW:
            live.admitted = now if event.at is None else event.at
            self._queries.value += event.known_tokens
            self._hits.value += event.cached_tokens
            self._queue.observe(max(0.0, live.admitted - live.arrived))
            self._service.of(live.tenant, "cached").value += event.cached_tokens
            self.caches.shared(min(event.cached_tokens, live.prompt_tokens))
        else:
            self._recomputed.value += max(0, live.lost - event.cached_tokens)

    def _skipped(self, event: Skipped, now: float) -> None:
        self._skips.of(event.reason.value).value += 1

    def _chunked(self, event: Chunked, now: float) -> None:
        self._service.of(self._live[event.request_id].tenant, "computed").value += event.length

    def _emitted(self, event: Emitted, now: float) -> None:
        live = self._live[event.request_id]
        count = len(event.tokens)
        self._generated.value += count
        live.generated.value += count
        if live.first is None:
            live.first = now
            self._prompt.value += live.prompt_tokens
            self._ttft.observe(now - live.arrived)
            if live.admitted is not None:
                self._prefill.observe(now - live.admitted)
        else:
            self._itl.observe(now - live.last)
        live.last = now

    def _preempted(self, event: Preempted, now: float) -> None:
        live = self._live[event.request_id]
        live.running = False
        live.lost = event.lost_tokens
        self._running.value -= 1
        self._waiting.value += 1
        self._preemptions.value += 1

    def _finished(self, event: Finished, now: float) -> None:
        self._ended.of(event.reason.value).value += 1
        live = self._live.pop(event.request_id, None)
        if live is None:  # refused before it arrived in the engine
            return
        (self._running if live.running else self._waiting).value -= 1
        if self._running.value == 0:
            # Only running requests hold blocks; a cancel of the last one may be followed by no step.
            self._usage.value = self._waste.value = 0.0
        self._e2e.observe(now - live.arrived)
        self._prompt_size.observe(event.prompt_tokens)
        self._output_size.observe(event.output_tokens)
        if live.first is not None:
            self._decode.observe(live.last - live.first)
            if event.output_tokens > 1:
                self._tpot.observe((live.last - live.first) / (event.output_tokens - 1))

    def _stepped(self, event: Stepped, now: float) -> None:
        self._iteration.observe(event.computed_tokens)
        self._rows.observe(event.decode_rows + event.prefill_rows)
        self._usage.value = event.blocks_held / event.blocks_total if event.blocks_total else 0.0
        empty = event.slots_allocated - event.slots_filled
        self._waste.value = empty / event.slots_allocated if event.slots_allocated else 0.0
        self._progress.value = now + self._clock_offset
        for phase, total in dict(self._phase_seconds()).items():
            self._phases.of(phase).observe(total - self._phase_totals.get(phase, 0.0))
            self._phase_totals[phase] = total
