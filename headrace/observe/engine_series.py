"""The metrics of the engine: names, labels, help texts and buckets. `observe.metrics` writes their values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from headrace.core.events import DraftDeclined, DraftedStep, DraftingFailed, EvictReason, LostPart, Verified
from headrace.core.sleep import SleepState
from headrace.observe.metrics_page import Histogram, MetricsPage

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


class EngineGauges:
    """The engine's current state; ``cache_config`` becomes the labels of ``cache_config_info``."""

    def __init__(self, page: MetricsPage, cache_config: Mapping[str, str] | None) -> None:
        self.running = page.gauge("num_requests_running", "Requests that are running.").of()
        self.waiting = page.gauge("num_requests_waiting", "Requests waiting to be admitted.").of()
        self.usage = page.gauge(
            "kv_cache_usage_perc", "Share of KV cache blocks held by requests, 0 to 1."
        ).of()
        self.waste = page.gauge(
            "kv_cache_waste_perc", "Share of the KV slots in held blocks that contain no token, 0 to 1."
        ).of()
        self.progress = page.gauge(
            "scheduler_last_progress_timestamp_seconds", "Unix time of the last finished step."
        ).of()
        sleeps = page.gauge(
            "engine_sleep_state",
            "Whether the model is awake, sleeps at level 1 (weights_offloaded) or at level 2 (discard_all): 1 for the"
            " state that it is in, otherwise 0.",
            ["sleep_state"],
        )
        self._sleeps = {state: sleeps.of(state.value) for state in SleepState}
        self.sleep(SleepState.AWAKE)
        if cache_config is not None:
            info = page.gauge(
                "cache_config_info",
                "Block size and number of blocks of the KV cache; always 1.",
                list(cache_config),
            )
            info.of(*cache_config.values()).value = 1.0

    def sleep(self, state: SleepState) -> None:
        """The model is in this state now."""
        self.sleep_state = state
        for each, cell in self._sleeps.items():
            cell.value = float(each is state)


class EngineCounters:
    """Counters of the engine; tenants beyond the first ``tenants`` are counted as ``other``."""

    def __init__(self, page: MetricsPage, tenants: int) -> None:
        self.queries = page.counter(
            "prefix_cache_queries", "Tokens that were looked up in the prefix cache."
        ).of()
        self.hits = page.counter("prefix_cache_hits", "Tokens that were found in the prefix cache.").of()
        self.evicted = page.counter(
            "kv_cache_evicted_blocks",
            "Cached KV blocks of the device that lost their content, by reason.",
            ["reason"],
        )
        for reason in EvictReason:
            self.evicted.of(reason.value)
        self.preemptions = page.counter(
            "num_preemptions", "Preemptions: requests that returned to the queue."
        ).of()
        self.losses = page.counter(
            "engine_losses", "Times that the memory of the engine was lost, by the part that ended.", ["part"]
        )
        for part in LostPart:
            self.losses.of(part.value)
        self.recovered = page.counter(
            "recovered_requests", "Running requests that were computed again after such a loss."
        ).of()
        self.recomputed = page.counter(
            "recomputed_tokens",
            "Tokens that were computed again after a preemption or a loss of the engine's memory.",
        ).of()
        self.prompt = page.counter(
            "prompt_tokens", "Prompt tokens of requests that have a first token, computed or cached."
        ).of()
        self.generated = page.counter("generation_tokens", "Generated tokens.").of()
        self.ended = page.counter(
            "request_success",
            "Requests that ended, by reason; stop and length are complete answers.",
            ["finished_reason"],
        )
        self.waits = page.counter(
            "scheduler_wait_reason", "Times that a request began to wait for a new reason.", ["reason"]
        )
        self.service = page.counter(
            "tenant_service_tokens",
            "Tokens of a tenant: computed and cached prompt tokens, generated tokens, and tokens of embeddings.",
            ["tenant", "kind"],
            limit=tenants,
        )


class EmbeddingSeries:
    """Calls of embedding and reranking models; ``task`` is ``embed``, ``rerank`` or ``score``."""

    def __init__(self, page: MetricsPage) -> None:
        self.ended = page.counter(
            "embedding_requests",
            "Embedding, rerank and score requests that ended, by reason; stop is complete.",
            ["task", "finished_reason"],
        )
        self.inputs = page.counter(
            "embedding_inputs", "Texts, or pairs of texts, of these requests.", ["task"]
        )
        self.tokens = page.counter("embedding_tokens", "Tokens computed for embeddings and scores.", ["task"])
        self.seconds = page.histogram(
            "embedding_request_seconds",
            "Time from arrival to end of such a request.",
            REQUEST_SECONDS,
            ["task"],
        )
        self._open = page.gauge("embedding_requests_open", "Embedding requests that have not ended.").of()
        self._waiting = page.gauge("embedding_waiting_tokens", "Tokens of inputs that wait.").of()
        self._busy = page.counter(
            "embedding_busy_seconds", "Time that the engine thread has computed embeddings."
        ).of()

    def measure(self, open_requests: int, waiting_tokens: int, busy_seconds: float) -> None:
        """Write the state of the queue."""
        self._open.value = open_requests
        self._waiting.value = waiting_tokens
        self._busy.value = busy_seconds


class StepHistograms:
    """Sizes and times of steps."""

    def __init__(self, page: MetricsPage) -> None:
        self.tokens = page.histogram(
            "iteration_tokens_total", "Tokens computed per step.", ITERATION_TOKENS
        ).of()
        self.sequences = page.histogram("batch_size", "Sequences per step.", BATCH_ROWS).of()
        self.phases = page.histogram(
            "scheduler_step_seconds", "Time of each phase of a step.", STEP_SECONDS, ["phase"]
        )


class ClassLatencies(NamedTuple):
    """The latencies of one service class."""

    ttft: Histogram
    itl: Histogram
    e2e: Histogram


class RequestHistograms:
    """Times and sizes of requests. The series of ``classes`` exist from the start."""

    def __init__(self, page: MetricsPage, classes: Sequence[str]) -> None:
        def histogram(name: str, help: str, bounds: Sequence[float] = REQUEST_SECONDS) -> Histogram:
            return page.histogram(name, help, tuple(bounds)).of()

        self._ttft = page.histogram(
            "time_to_first_token_seconds", "Time from arrival to first token.", TTFT_SECONDS, ["class"]
        )
        self._itl = page.histogram(
            "inter_token_latency_seconds",
            "Time between two consecutive outputs of a request.",
            TOKEN_SECONDS,
            ["class"],
        )
        self.tpot = histogram(
            "request_time_per_output_token_seconds",
            "Mean time per output token of a request, without the first token.",
            TOKEN_SECONDS,
        )
        self._e2e = page.histogram(
            "e2e_request_latency_seconds",
            "Time from arrival to end of a request.",
            REQUEST_SECONDS,
            ["class"],
        )
        self.queue = histogram("request_queue_time_seconds", "Time from arrival to first admission.")
        self.prefill = histogram("request_prefill_time_seconds", "Time from first admission to first token.")
        self.decode = histogram("request_decode_time_seconds", "Time from first token to last token.")
        self.prompt_tokens = histogram("request_prompt_tokens", "Prompt tokens per request.", REQUEST_TOKENS)
        self.output_tokens = histogram(
            "request_generation_tokens", "Generated tokens per request.", REQUEST_TOKENS
        )
        self.longest = histogram(
            "request_max_num_generation_tokens",
            "Generated tokens per sequence; a call with n > 1 has n sequences.",
            REQUEST_TOKENS,
        )
        self._classes: dict[str, ClassLatencies] = {}
        for name in classes:
            self.of_class(name)

    def of_class(self, name: str) -> ClassLatencies:
        """The latencies of a service class."""
        found = self._classes.get(name)
        if found is None:
            found = ClassLatencies(self._ttft.of(name), self._itl.of(name), self._e2e.of(name))
            self._classes[name] = found
        return found


class ExpertLoad(NamedTuple):
    """The ``tokens`` that experts have computed, and how uneven layers are: a layer's busiest expert over its mean."""

    tokens: int
    mean: float
    largest: float


NO_EXPERTS = ExpertLoad(0, 0.0, 0.0)


def expert_load(loads: Sequence[Sequence[int]]) -> ExpertLoad:
    """The load of experts by the tokens that each of each layer has computed."""
    uneven = [max(layer) * len(layer) / total for layer in loads if (total := sum(layer))]
    return ExpertLoad(sum(map(sum, loads)), sum(uneven) / len(uneven), max(uneven)) if uneven else NO_EXPERTS


class DraftLedger:
    """Counts the events of drafts, which `observe.metrics` passes on."""

    def __init__(self, page: MetricsPage) -> None:
        source = ["source"]
        self._drafts = page.counter(
            "spec_decode_num_drafts", "Drafts verified; one per request and step.", source
        )
        self._drafted = page.counter("spec_decode_num_draft_tokens", "Drafted tokens verified.", source)
        self._accepted = page.counter("spec_decode_num_accepted_tokens", "Drafted tokens accepted.", source)
        self._expected = page.counter(
            "spec_decode_num_expected_tokens",
            "Drafted tokens whose acceptance was expected, by the estimates that drafts are cut by.",
            source,
        )
        self._by_position = page.counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Drafted tokens accepted, by position in the draft.",
            ["position", "source"],
        )
        self._cuts = page.counter("spec_decode_cuts", "Drafts, by what bounded their length.", ["reason"])
        self._declined = page.counter(
            "spec_decode_declined",
            "Times that drafting stopped for a request although tokens were proposed, by reason.",
            ["reason"],
        )
        self._seconds = page.counter(
            "spec_decode_predicted_seconds",
            "Predicted time of steps with drafts (drafted), of the same tokens without drafts (without_drafts), and of "
            "the tokens expected beforehand (expected_without_drafts).",
            ["tokens"],
        )
        self._failures = page.counter(
            "spec_decode_failures", "Failures of the drafter; the first one switches drafting off."
        ).of()

    def verified(self, event: Verified, now: float) -> None:
        """Drafts of a row were verified."""
        self._drafts.of(event.source).value += 1
        self._drafted.of(event.source).value += event.drafted
        self._accepted.of(event.source).value += event.accepted
        self._expected.of(event.source).value += event.expected
        for position in range(event.accepted):
            self._by_position.of(str(position), event.source).value += 1
        if event.cut:
            self._cuts.of(str(event.cut)).value += 1

    def declined(self, event: DraftDeclined, now: float) -> None:
        """Drafting stopped for a request."""
        self._declined.of(str(event.cut)).value += 1

    def stepped(self, event: DraftedStep, now: float) -> None:
        """A step with drafts was committed."""
        self._seconds.of("drafted").value += event.seconds
        self._seconds.of("without_drafts").value += event.without
        self._seconds.of("expected_without_drafts").value += event.expected

    def failed(self, event: DraftingFailed, now: float) -> None:
        """The drafter failed."""
        self._failures.value += 1


class RunnerSeries:
    """What the runner counts itself, measured when the page is rendered."""

    def __init__(self, page: MetricsPage) -> None:
        self._padding = page.counter(
            "padding_tokens", "Tokens that steps computed as padding, to fill the size of a CUDA graph."
        ).of()
        self._collectives = page.counter(
            "collective_bytes",
            "Bytes that rank 0 sent, received or added with other ranks, by kind of operation.",
            ["operation"],
        )
        self._expert_tokens = page.counter(
            "expert_tokens",
            "Tokens computed by experts, once for each expert that a token has (C++ kernels; not the shared expert).",
        ).of()
        self._imbalance = page.gauge(
            "expert_load_imbalance",
            "Tokens of a layer's busiest expert over those of a mean expert since the server started: 1 is even. The"
            " mean of all layers, and the layer with the largest (0: no experts, or not counted).",
            ["layers"],
        )
        for layers in ("mean", "largest"):
            self._imbalance.of(layers)

    def measure(
        self, padding_tokens: int, collective_bytes: Mapping[str, int], experts: ExpertLoad = NO_EXPERTS
    ) -> None:
        """Write the runner's counts."""
        self._padding.value = padding_tokens
        self._expert_tokens.value = experts.tokens
        self._imbalance.of("mean").value = experts.mean
        self._imbalance.of("largest").value = experts.largest
        for operation, count in collective_bytes.items():
            self._collectives.of(operation).value = count
