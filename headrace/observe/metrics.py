"""Prometheus metrics of the engine, made from events, with the names that dashboards and autoscalers know from vLLM.

It depends only on events and `now`. The tenant is a label of one counter, with a limited number of values. Service
classes and fairness between tenants are in `observe.goodput`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from headrace.core.embedding import Embedded
from headrace.core.events import (
    AdmitReason,
    Admitted,
    Arrived,
    Audited,
    CheckpointDropped,
    Checkpointed,
    Chunked,
    DraftDeclined,
    DraftedStep,
    DraftingFailed,
    DropReason,
    Emitted,
    EngineLost,
    Event,
    Evicted,
    Finished,
    LookedUp,
    Moved,
    MoveReason,
    Preempted,
    PreemptReason,
    Recomputed,
    RecomputeReason,
    RestoreDeclined,
    Skipped,
    Spared,
    StateRestored,
    Stepped,
    StoreFaulted,
    TransferFailed,
    Verified,
)
from headrace.core.peers import PeersAnswered, Pulled
from headrace.core.sleep import SleepChanged, SleepState
from headrace.observe.cache_metrics import CacheMetrics, Sizes
from headrace.observe.cost.prices import TokenPrices, free
from headrace.observe.engine_series import (
    ClassLatencies,
    DraftLedger,
    EmbeddingSeries,
    EngineCounters,
    EngineGauges,
    RequestHistograms,
    RunnerSeries,
    StepHistograms,
)
from headrace.observe.metrics_page import Cell, MetricsPage


class TierMetrics:
    """Counts KV offloading and transfer, by events of `core.memory.tiers` that `observe.metrics` passes on."""

    def __init__(self, page: MetricsPage) -> None:
        self._bytes = page.counter(
            "kv_offload_bytes",
            "Bytes of KV blocks copied between tiers, by reason.",
            ["source", "target", "reason"],
        )
        self._hits = page.counter(
            "kv_offload_hits", "KV blocks restored from a lower tier for a request."
        ).of()
        self._declined = page.counter(
            "kv_offload_declined_tokens",
            "Tokens in a lower tier that were computed instead, because that was faster.",
        ).of()
        self._failures = page.counter(
            "kv_offload_failures",
            "Copies of KV blocks to or from the disk that failed.",
            ["source", "target"],
        )
        self._asked = page.counter(
            "external_prefix_cache_queries",
            "Prompt tokens that peers were asked for, because they were missing here.",
        ).of()
        self._held = page.counter(
            "external_prefix_cache_hits", "Prompt tokens that a peer held when it was asked."
        ).of()
        self._pulled = page.counter("kv_transfer_blocks", "KV blocks pulled from peers.").of()
        self._pulled_bytes = page.counter("kv_transfer_bytes", "Bytes of KV blocks pulled from peers.").of()
        self._seconds = page.counter(
            "kv_transfer_seconds", "Time that pulling KV blocks from peers took."
        ).of()
        self._lost = page.counter(
            "kv_transfer_failed_blocks", "KV blocks that a peer no longer held or did not deliver in time."
        ).of()

    def moved(self, event: Moved, now: float) -> None:
        """Blocks were copied."""
        self._bytes.of(event.source.value, event.target.value, event.reason.value).value += event.bytes
        if event.reason is MoveReason.RESTORED:
            self._hits.value += event.blocks

    def declined(self, event: RestoreDeclined, now: float) -> None:
        """Tokens are computed although a lower tier has them."""
        self._declined.value += event.tokens

    def answered(self, event: PeersAnswered, now: float) -> None:
        """Peers were asked for a prompt's blocks."""
        self._asked.value += event.asked_tokens
        self._held.value += event.held_tokens

    def pulled(self, event: Pulled, now: float) -> None:
        """Copies from peers have ended."""
        self._pulled.value += event.blocks
        self._pulled_bytes.value += event.bytes
        self._seconds.value += event.seconds
        self._lost.value += event.failed

    def failed(self, event: TransferFailed, now: float) -> None:
        """A copy failed."""
        self._failures.of(event.source.value, event.target.value).value += 1


class CheckpointMetrics:
    """Counts events of `core.memory.checkpoints`, which `observe.metrics` passes on.

    ``checkpoint_bytes`` is the size of one checkpoint. All counts stay 0 for a model without recurrent states.
    """

    def __init__(self, page: MetricsPage, checkpoint_bytes: int) -> None:
        self._checkpoint_bytes = checkpoint_bytes
        self._count = page.gauge(
            "state_checkpoints", "Checkpoints of recurrent states from which a request can start."
        ).of()
        self._bytes = page.gauge("state_checkpoint_bytes", "Memory that these checkpoints take.").of()
        self._saves = page.counter(
            "state_checkpoint_saves", "Checkpoints of recurrent states that were made."
        ).of()
        self._restores = page.counter(
            "state_checkpoint_restores", "Requests that started from a checkpoint, also after a preemption."
        ).of()
        self._restored_tokens = page.counter(
            "state_checkpoint_restored_tokens", "Tokens that these requests did not have to compute."
        ).of()
        self._drops = page.counter(
            "state_checkpoint_drops",
            "Checkpoints that were dropped: evicted for another one, superseded by a later one of the same request, or"
            " dropped with the KV block that ends there.",
            ["reason"],
        )
        self._recomputed = page.counter(
            "state_recomputed_tokens",
            "Tokens that were computed although their keys and values were cached, because no recurrent state was saved"
            " there, by reason.",
            ["reason"],
        )
        for dropped in DropReason:
            self._drops.of(dropped.value)
        for reason in RecomputeReason:
            self._recomputed.of(reason.value)

    def saved(self, event: Checkpointed, now: float) -> None:
        """A checkpoint was made."""
        self._saves.value += 1
        self._add(1)

    def restored(self, event: StateRestored, now: float) -> None:
        """A request starts from a checkpoint."""
        self._restores.value += 1
        self._restored_tokens.value += event.tokens

    def dropped(self, event: CheckpointDropped, now: float) -> None:
        """A checkpoint was dropped."""
        self._drops.of(event.reason.value).value += 1
        self._add(-1)

    def recomputed(self, event: Recomputed, now: float) -> None:
        """Cached tokens are computed again."""
        self._recomputed.of(event.reason.value).value += event.tokens

    def _add(self, count: int) -> None:
        self._count.value += count
        self._bytes.value = self._count.value * self._checkpoint_bytes


class _Live:
    """State of a request until it ends; times are on the engine's clock."""

    __slots__ = (
        "admitted",
        "arrived",
        "first",
        "generated",
        "last",
        "latencies",
        "lost",
        "prompt_tokens",
        "running",
        "tenant",
    )

    def __init__(
        self, arrived: float, prompt_tokens: int, tenant: str, generated: Cell, latencies: ClassLatencies
    ) -> None:
        self.arrived = arrived
        self.prompt_tokens = prompt_tokens
        self.tenant = tenant
        self.generated = generated
        self.latencies = latencies
        self.running = False
        self.admitted: float | None = None
        self.first: float | None = None
        self.last = arrived
        self.lost = 0


class EngineTotals(NamedTuple):
    """Counters since the start, and the engine's current state.

    ``batch_counts`` are the steps by their number of rows, in the buckets of ``batch_bounds``. ``waits`` counts the
    requests that began to wait for a reason.
    """

    ended: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    preemptions: int
    waits: Mapping[str, int]
    batch_bounds: tuple[float, ...]
    batch_counts: tuple[int, ...]
    running: int
    waiting: int
    kv_usage: float
    kv_waste: float
    sleep: SleepState

    @property
    def steps(self) -> int:
        """Steps that had rows."""
        return sum(self.batch_counts)


class Metrics:
    """A `core.ports.Watcher` that writes to ``page``.

    ``clock_offset`` is Unix time minus the engine's clock, in seconds. ``cache_config`` becomes the labels of
    ``cache_config_info``. Tenants beyond the first ``tenants`` are counted as ``other``. ``classes`` are the service
    classes that have series before their first request. ``phase_seconds`` returns the
    seconds spent in each phase of a step (``forward``, ``sample`` ...) since the start; it is called once per step.
    ``prices`` and ``cache_sizes`` are passed to the `CacheMetrics` in ``caches``. ``checkpoint_bytes`` is the size of a
    checkpoint of recurrent states.
    """

    def __init__(
        self,
        page: MetricsPage,
        *,
        clock_offset: float = 0.0,
        cache_config: Mapping[str, str] | None = None,
        tenants: int = 100,
        classes: Sequence[str] = (),
        phase_seconds: Callable[[], Mapping[str, float]] = dict,
        prices: Callable[[], TokenPrices] = free,
        cache_sizes: Callable[[], Sizes] = dict,
        checkpoint_bytes: int = 0,
    ) -> None:
        self._clock_offset = clock_offset
        self._live: dict[str, _Live] = {}
        self._phase_seconds = phase_seconds
        self._phase_totals: dict[str, float] = dict(phase_seconds())

        self._gauges, self._counters = EngineGauges(page, cache_config), EngineCounters(page, tenants)
        self._steps = StepHistograms(page)
        self._requests = RequestHistograms(page, classes)
        self.embeddings = EmbeddingSeries(page)
        self.runner = RunnerSeries(page)

        self.caches = CacheMetrics(page, prices, cache_sizes)
        page.before_render(self.caches.measure)
        tiers, drafts = TierMetrics(page), DraftLedger(page)
        states = CheckpointMetrics(page, checkpoint_bytes)

        self._folds: dict[type, Callable[[Any, float], None]] = {
            Emitted: lambda event, now: self.fold_tokens((event,), now),
            Stepped: self._stepped,
            Chunked: self._chunked,
            Arrived: self._arrived,
            Admitted: self._admitted,
            Skipped: self._skipped,
            Preempted: self._preempted,
            EngineLost: self._lost,
            Finished: self._finished,
            LookedUp: self.caches.looked_up,
            Evicted: self._evicted,
            Spared: self.caches.spared,
            Audited: self.caches.audited,
            Embedded: self._embedded,
            StoreFaulted: self.caches.faulted,
            SleepChanged: self._slept,
            Moved: tiers.moved,
            RestoreDeclined: tiers.declined,
            TransferFailed: tiers.failed,
            PeersAnswered: tiers.answered,
            Pulled: tiers.pulled,
            Verified: drafts.verified,
            DraftDeclined: drafts.declined,
            DraftedStep: drafts.stepped,
            DraftingFailed: drafts.failed,
            Checkpointed: states.saved,
            StateRestored: states.restored,
            CheckpointDropped: states.dropped,
            Recomputed: states.recomputed,
        }

    def fold(self, event: Event, now: float) -> None:
        fold = self._folds.get(type(event))
        if fold is not None:
            fold(event, now)

    def totals(self) -> EngineTotals:
        """The counts so far, for the dashboard."""
        counters, gauges, sequences = self._counters, self._gauges, self._steps.sequences
        return EngineTotals(
            int(sum(cell.value for cell in counters.ended.series.values())),
            int(counters.prompt.value),
            int(counters.hits.value),
            int(counters.generated.value),
            int(counters.preemptions.value),
            {reason: int(cell.value) for (reason,), cell in counters.waits.series.items()},
            sequences.bounds,
            tuple(sequences.counts),
            int(gauges.running.value),
            int(gauges.waiting.value),
            gauges.usage.value,
            gauges.waste.value,
            gauges.sleep_state,
        )

    def _arrived(self, event: Arrived, now: float) -> None:
        generated = self._counters.service.of(event.tenant, "generated")
        arrived = now if event.at is None else event.at
        latencies = self._requests.of_class(event.service_class)
        self._live[event.request_id] = _Live(arrived, event.prompt_tokens, event.tenant, generated, latencies)
        self._gauges.waiting.value += 1

    def _admitted(self, event: Admitted, now: float) -> None:
        live = self._live[event.request_id]
        live.running = True
        self._gauges.waiting.value -= 1
        self._gauges.running.value += 1
        if event.reason is AdmitReason.NEW:
            live.admitted = now if event.at is None else event.at
            self._counters.queries.value += event.known_tokens
            self._counters.hits.value += event.cached_tokens
            self._requests.queue.observe(max(0.0, live.admitted - live.arrived))
            self._counters.service.of(live.tenant, "cached").value += event.cached_tokens
            self.caches.shared(min(event.cached_tokens, live.prompt_tokens))
        else:
            self._counters.recomputed.value += max(0, live.lost - event.cached_tokens)

    def _slept(self, event: SleepChanged, now: float) -> None:
        self._gauges.sleep(event.state)

    def _skipped(self, event: Skipped, now: float) -> None:
        self._counters.waits.of(event.reason.value).value += 1

    def _chunked(self, event: Chunked, now: float) -> None:
        self._counters.service.of(self._live[event.request_id].tenant, "computed").value += event.length

    def fold_tokens(self, emitted: Sequence[Emitted], now: float) -> None:
        """Tokens of a step. Those of one class that had a token in the same step before are observed once."""
        made = times = 0
        latencies, last = None, 0.0
        for request_id, tokens, _ in emitted:
            live = self._live[request_id]
            count = len(tokens)
            made += count
            live.generated.value += count
            if live.first is None:
                self._begun(live, now)
            elif live.latencies is latencies and live.last == last:
                times += 1
            else:
                if latencies is not None:
                    latencies.itl.observe(now - last, times)
                latencies, last, times = live.latencies, live.last, 1
            live.last = now
        if latencies is not None:
            latencies.itl.observe(now - last, times)
        self._counters.generated.value += made

    def _begun(self, live: _Live, now: float) -> None:
        live.first = now
        self._counters.prompt.value += live.prompt_tokens
        live.latencies.ttft.observe(now - live.arrived)
        if live.admitted is not None:
            self._requests.prefill.observe(now - live.admitted)

    def _preempted(self, event: Preempted, now: float) -> None:
        live = self._live[event.request_id]
        live.running = False
        live.lost = event.lost_tokens
        self._gauges.running.value -= 1
        self._gauges.waiting.value += 1
        if event.reason is PreemptReason.LOST:
            self._counters.recovered.value += 1
        else:
            self._counters.preemptions.value += 1

    def _lost(self, event: EngineLost, now: float) -> None:
        self._counters.losses.of(event.part.value).value += 1

    def _evicted(self, event: Evicted, now: float) -> None:
        self._counters.evicted.of(event.reason.value).value += len(event.blocks)
        self.caches.evicted(event, now)

    def _finished(self, event: Finished, now: float) -> None:
        self._counters.ended.of(event.reason.value).value += 1
        live = self._live.pop(event.request_id, None)
        if live is None:  # rejected before it reached the engine
            return
        (self._gauges.running if live.running else self._gauges.waiting).value -= 1
        if self._gauges.running.value == 0:
            # Only running requests hold blocks, and no step may follow the cancellation of the last one.
            self._gauges.usage.value = self._gauges.waste.value = 0.0
        live.latencies.e2e.observe(now - live.arrived)
        self._requests.prompt_tokens.observe(event.prompt_tokens)
        self._requests.output_tokens.observe(event.output_tokens)
        self._requests.longest.observe(event.output_tokens)
        if live.first is not None:
            self._requests.decode.observe(live.last - live.first)
            if event.output_tokens > 1:
                self._requests.tpot.observe((live.last - live.first) / (event.output_tokens - 1))

    def _embedded(self, event: Embedded, now: float) -> None:
        self.embeddings.ended.of(event.task, event.reason.value).value += 1
        if event.rejected is not None:
            return
        self.embeddings.inputs.of(event.task).value += event.inputs
        self.embeddings.tokens.of(event.task).value += event.computed_tokens
        self.embeddings.seconds.of(event.task).observe(event.seconds)
        self._counters.service.of(event.tenant, "embedded").value += event.computed_tokens

    def _stepped(self, event: Stepped, now: float) -> None:
        self._steps.tokens.observe(event.computed_tokens)
        self._steps.sequences.observe(event.decode_rows + event.prefill_rows)
        self._gauges.usage.value = event.blocks_held / event.blocks_total if event.blocks_total else 0.0
        empty = event.slots_allocated - event.slots_filled
        self._gauges.waste.value = empty / event.slots_allocated if event.slots_allocated else 0.0
        self._gauges.progress.value = now + self._clock_offset
        for phase, total in dict(self._phase_seconds()).items():
            self._steps.phases.of(phase).observe(total - self._phase_totals.get(phase, 0.0))
            self._phase_totals[phase] = total


# The LoRA adapters of open requests, in the metric by which gateways choose a server that has an adapter.


class AdapterRequests:
    """A `core.ports.Watcher`: ``lora_requests_info``, whose labels list adapters and whose value is a time, as in vLLM.

    ``max_loras`` is the number of places, ``name_of`` the name of an adapter by its digest, ``now`` the Unix time.
    """

    fold_tokens = None

    def __init__(
        self, page: MetricsPage, max_loras: int, name_of: Callable[[str], str], now: Callable[[], float]
    ) -> None:
        self._max_loras, self._name_of, self._now = str(max_loras), name_of, now
        self._waiting: dict[str, str] = {}
        self._running: dict[str, str] = {}
        self._info = page.gauge(
            "lora_requests_info",
            "LoRA adapters of running and of waiting requests, in the labels; the value is the Unix time.",
            ("max_lora", "waiting_lora_adapters", "running_lora_adapters"),
        )
        page.before_render(self._measure)

    def fold(self, event: Event, now: float) -> None:
        match event:
            case Arrived() if event.adapter:
                self._waiting[event.request_id] = event.adapter
            case Admitted() if event.request_id in self._waiting:
                self._running[event.request_id] = self._waiting.pop(event.request_id)
            case Preempted() if event.request_id in self._running:
                self._waiting[event.request_id] = self._running.pop(event.request_id)
            case Finished():
                self._waiting.pop(event.request_id, None)
                self._running.pop(event.request_id, None)

    def _measure(self) -> None:
        self._info.series.clear()
        waiting, running = (
            ",".join(sorted({self._name_of(each) for each in of.values()}))
            for of in (self._waiting, self._running)
        )
        self._info.of(self._max_loras, waiting, running).value = self._now()


CLIENT_CLOSED = 499
METHODS = frozenset({"GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"})


class HttpRequests:
    """Writes the counter ``http_requests`` to ``page``."""

    def __init__(self, page: MetricsPage) -> None:
        self._responses = page.counter(
            "http_requests",
            "HTTP responses. The route is the path pattern, or unmatched; the status is 2xx, 4xx or 5xx.",
            ["route", "method", "status"],
        )

    def count(self, route: str, method: str, status: int) -> None:
        """One response has ended; a ``status`` of 0 means that the client disconnected before it began."""
        label = method if method in METHODS else "other"
        self._responses.of(route, label, f"{(status or CLIENT_CLOSED) // 100}xx").value += 1


# Bytes of HTTP traffic, and seconds of tokenization and detokenization.


class Traffic:
    """Writes to ``page``. ``text_seconds`` returns the seconds of ``tokenize`` and ``detokenize`` so far."""

    def __init__(self, page: MetricsPage, text_seconds: Callable[[], Mapping[str, float]] = dict) -> None:
        self._received = page.counter("http_received_bytes", "Bytes of the bodies of HTTP requests.").of()
        self._sent = page.counter("http_sent_bytes", "Bytes of the bodies of HTTP responses.").of()
        self._text = page.counter(
            "text_seconds",
            "Time of turning prompts into tokens (tokenize) and tokens into text (detokenize).",
            ["part"],
        )
        self._text_seconds = text_seconds
        page.before_render(self.measure)

    def count(self, received: int, sent: int) -> None:
        """One HTTP exchange has ended."""
        self._received.value += received
        self._sent.value += sent

    def measure(self) -> None:
        """Bring the seconds up to date."""
        for part, seconds in self._text_seconds().items():
            self._text.of(part).value = seconds
