"""Work of steps, counted from the model's shape: operations, bytes moved, utilization of the peaks, and saturation.

```
 operations  2 * linear weights * tokens + 2 * LM head * sampling rows + 4 * layers * heads * head size * contexts
 bytes       weights once a step + keys and values: read for each row's context, written for each token
```
Of a model with experts, weights are those of the experts that the tokens of a step are expected to have.
Contexts are the sum of the positions that all tokens attend to; sliding windows are not taken into account. Both count
what the model needs, not what the hardware did, as MFU and MBU are defined.

Each row belongs to a phase, prefill or decode. A mixed step reads the weights once for both, so their bytes are divided
by tokens, and its seconds as the cost ledger divides them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from headrace.core.capacity import SparseLayers
from headrace.core.events import Event, Stepped
from headrace.core.plan import Row
from headrace.observe.cost.ledger import CostLedger
from headrace.observe.metrics_page import MetricsPage

WINDOW_SECONDS = 60.0
"""Time constant of utilization and saturation."""

PREFILL, DECODE, ALL = "prefill", "decode", "all"
"""Values of the label ``phase``; only utilization has ``all``."""


class ModelWork(NamedTuple):
    """Sizes of a model that determine the work of a step: numbers of weights, total attention width, and bytes.

    ``state_bytes`` are the recurrent states of a sequence, which a row reads and writes.
    """

    linear_parameters: int
    table_parameters: int
    attention_width: int
    weight_bytes: int
    kv_bytes_per_token: int
    sparse: SparseLayers | None = None
    state_bytes: int = 0


class Peaks(NamedTuple):
    """The device's peak operations and bytes per second; 0: not known."""

    flops: float = 0.0
    bytes_per_second: float = 0.0


class StepWork(NamedTuple):
    """Operations and bytes."""

    flops: float
    bytes: float


NO_WORK = StepWork(0.0, 0.0)


class PhaseWork(NamedTuple):
    """Operations and bytes of a step, by phase."""

    prefill: StepWork
    decode: StepWork


def work_of(event: Stepped, model: ModelWork) -> PhaseWork:
    """The work of a committed step. A row of one token, or with drafts, is a decode row."""
    rows, tokens = event.work.rows, event.computed_tokens
    if not rows:
        return PhaseWork(NO_WORK, NO_WORK)
    if not event.prefill_rows:
        return PhaseWork(NO_WORK, _work(rows, tokens, tokens, model))
    prompts = [row for row in rows if row[2] > 1 and not row[5]]
    decodes = [row for row in rows if row[2] == 1 or row[5]]
    prompt = sum([row[2] for row in prompts])
    return PhaseWork(_work(prompts, prompt, tokens, model), _work(decodes, tokens - prompt, tokens, model))


def _work(rows: Sequence[Row], tokens: int, of: int, model: ModelWork) -> StepWork:
    """The work of some rows of a step, with ``tokens`` of its tokens (``of``)."""
    if not rows:
        return NO_WORK
    contexts = read = tokens + sum([row[1] for row in rows])
    if tokens > len(rows):
        contexts = sum([row[2] * row[1] + row[2] * (row[2] + 1) // 2 for row in rows])
        read = sum([row[1] + row[2] for row in rows])
    samples = sum([row[4] for row in rows])
    flops = 2.0 * (model.linear_parameters * tokens + model.table_parameters * samples)
    flops += 4.0 * model.attention_width * contexts
    read_once = model.weight_bytes - (model.sparse.unused(of) if model.sparse else 0)
    weights = read_once * tokens / of
    states = 2.0 * model.state_bytes * len(rows)
    return StepWork(flops, weights + float(model.kv_bytes_per_token) * (read + tokens) + states)


class _Recent:
    """Sums that decay exponentially with `WINDOW_SECONDS`."""

    __slots__ = ("_at", "_began", "bytes", "flops", "seconds")

    def __init__(self, began: float) -> None:
        self._began = self._at = began
        self.flops = self.bytes = self.seconds = 0.0

    def add(self, work: StepWork, seconds: float, now: float) -> None:
        self.fade(now)
        self.flops += work.flops
        self.bytes += work.bytes
        self.seconds += seconds

    def fade(self, now: float) -> None:
        kept = math.exp(min(0.0, (self._at - now) / WINDOW_SECONDS))
        self.flops *= kept
        self.bytes *= kept
        self.seconds *= kept
        self._at = max(self._at, now)

    def share(self) -> float:
        """The share of the wall clock in which steps computed."""
        span = WINDOW_SECONDS * -math.expm1((self._began - self._at) / WINDOW_SECONDS)
        return min(1.0, self.seconds / span) if span > 0.0 else 0.0


class WorkMeter:
    """A `core.ports.Watcher`, folded after ``ledger``, which measures the seconds of steps.

    ``clock`` is the engine's. ``slots`` is the maximum number of running sequences. Utilization has metrics only if
    ``peaks`` are known. ``tokens`` is the number of positions computed so far.
    """

    fold_tokens = None

    def __init__(
        self,
        page: MetricsPage,
        ledger: CostLedger,
        model: ModelWork,
        clock: Callable[[], float],
        *,
        slots: int,
        peaks: Peaks = Peaks(),  # noqa: B008 (immutable)
    ) -> None:
        self._ledger, self.model, self._clock = ledger, model, clock
        self.slots, self.peaks = slots, peaks
        self._recent = {phase: _Recent(ledger.began) for phase in (ALL, PREFILL, DECODE)}
        self._seconds = (ledger.prefill_seconds, ledger.decode_seconds)
        self.tokens = 0
        flops = page.counter(
            "estimated_flops",
            "Operations of the model in all steps by phase, counted from its shape.",
            ["phase"],
        )
        nbytes = page.counter(
            "estimated_bytes",
            "Bytes of weights, keys and values that all steps moved by phase, counted from the shape.",
            ["phase"],
        )
        self._done = {phase: (flops.of(phase), nbytes.of(phase)) for phase in (PREFILL, DECODE)}
        self._saturation = page.gauge(
            "saturation_ratio",
            "Use of a resource, 0 to 1: share of the last minute in which steps computed (time), of sequence slots "
            "(slots), and of KV blocks (kv_cache).",
            ["resource"],
        )
        self._mfu = self._mbu = None
        if peaks.flops:
            self._mfu = page.gauge(
                "model_flops_utilization",
                "Operations of the last minute's steps as a share of the peak (--peak-flops), by phase and of all.",
                ["phase"],
            )
        if peaks.bytes_per_second:
            self._mbu = page.gauge(
                "memory_bandwidth_utilization",
                "Bytes of the last minute's steps as a share of the peak (--peak-bandwidth), by phase and of all.",
                ["phase"],
            )
        page.before_render(self.measure)

    def fold(self, event: Event, now: float) -> None:
        if type(event) is not Stepped:
            return
        work, ledger = work_of(event, self.model), self._ledger
        before, self._seconds = self._seconds, (ledger.prefill_seconds, ledger.decode_seconds)
        self.tokens += event.computed_tokens
        if event.prefill_rows:
            self._add(PREFILL, work.prefill, self._seconds[0] - before[0], now)
        self._add(DECODE, work.decode, self._seconds[1] - before[1], now)
        both = StepWork(work.prefill.flops + work.decode.flops, work.prefill.bytes + work.decode.bytes)
        self._recent[ALL].add(both, ledger.step_seconds, now)
        self._saturation.of("slots").value = min(1.0, event.running / self.slots)
        held = event.blocks_held / event.blocks_total if event.blocks_total else 0.0
        self._saturation.of("kv_cache").value = held

    def done(self) -> StepWork:
        """The work of all steps so far."""
        cells = self._done.values()
        return StepWork(sum(flops.value for flops, _ in cells), sum(nbytes.value for _, nbytes in cells))

    def flops_of(self, computed: int, generated: int) -> float:
        """Operations of computed positions and sampled tokens with the weights of a token, without attention."""
        return 2.0 * (self.model.linear_parameters * computed + self.model.table_parameters * generated)

    def measure(self) -> None:
        """Bring utilization and saturation up to date."""
        now = self._clock()
        for phase, recent in self._recent.items():
            recent.fade(now)
            seconds = recent.seconds
            if self._mfu is not None:
                self._mfu.of(phase).value = recent.flops / (seconds * self.peaks.flops) if seconds else 0.0
            if self._mbu is not None:
                most = seconds * self.peaks.bytes_per_second
                self._mbu.of(phase).value = recent.bytes / most if seconds else 0.0
        self._saturation.of("time").value = self._recent[ALL].share()
        if not self._ledger.open_requests:
            self._saturation.of("slots").value = self._saturation.of("kv_cache").value = 0.0

    def _add(self, phase: str, work: StepWork, seconds: float, now: float) -> None:
        flops, nbytes = self._done[phase]
        flops.value += work.flops
        nbytes.value += work.bytes
        self._recent[phase].add(work, seconds, now)
