"""Work of steps, counted from the model's shape: operations, bytes moved, utilization of the peaks, and saturation.

```
 operations  2 * linear weights * tokens + 2 * LM head * sampling rows + 4 * layers * heads * head size * contexts
 bytes       weights once a step + keys and values: read for each row's context, written for each token
```
Contexts are the sum of the positions that all tokens attend to; sliding windows are not taken into account. Both count
what the model needs, not what the hardware did, as MFU and MBU are defined.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from headrace.core.events import Event, Stepped
from headrace.observe.cost.ledger import CostLedger
from headrace.observe.metrics_page import MetricsPage

WINDOW_SECONDS = 60.0
"""Time constant of utilization and saturation."""


class ModelWork(NamedTuple):
    """Sizes of a model that determine the work of a step: numbers of weights, total attention width, and bytes."""

    linear_parameters: int
    table_parameters: int
    attention_width: int
    weight_bytes: int
    kv_bytes_per_token: int


class Peaks(NamedTuple):
    """The device's peak operations and bytes per second; 0: not known."""

    flops: float = 0.0
    bytes_per_second: float = 0.0


class StepWork(NamedTuple):
    """Operations and bytes of one step."""

    flops: float
    bytes: float


def work_of(event: Stepped, model: ModelWork) -> StepWork:
    """The work of a committed step."""
    rows = event.work.rows
    if not rows:
        return StepWork(0.0, 0.0)
    tokens = event.computed_tokens
    contexts = read = tokens + sum([row[1] for row in rows])
    if tokens > len(rows):
        contexts = sum([row[2] * row[1] + row[2] * (row[2] + 1) // 2 for row in rows])
        read = sum([row[1] + row[2] for row in rows])
    samples = sum([row[4] for row in rows])
    flops = 2.0 * (model.linear_parameters * tokens + model.table_parameters * samples)
    flops += 4.0 * model.attention_width * contexts
    return StepWork(flops, model.weight_bytes + float(model.kv_bytes_per_token) * (read + tokens))


class _Recent:
    """Sums that decay exponentially with `WINDOW_SECONDS`."""

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
        self._ledger, self._model, self._clock = ledger, model, clock
        self.slots, self.peaks = slots, peaks
        self._recent = _Recent(ledger.began)
        self.tokens = 0
        self._flops = page.counter(
            "estimated_flops", "Operations of the model in all steps, counted from its shape."
        ).of()
        self._bytes = page.counter(
            "estimated_bytes",
            "Bytes of weights, keys and values that all steps moved, counted from the shape.",
        ).of()
        self._saturation = page.gauge(
            "saturation_ratio",
            "Use of a resource, 0 to 1: share of the last minute in which steps computed (time), of sequence slots "
            "(slots), and of KV blocks (kv_cache).",
            ["resource"],
        )
        self._mfu = self._mbu = None
        if peaks.flops:
            self._mfu = page.gauge(
                "model_flops_utilization", "Operations of the last minute's steps as a share of --peak-flops."
            ).of()
        if peaks.bytes_per_second:
            self._mbu = page.gauge(
                "memory_bandwidth_utilization",
                "Bytes of the last minute's steps as a share of --peak-bandwidth.",
            ).of()
        page.before_render(self.measure)

    def fold(self, event: Event, now: float) -> None:
        if type(event) is not Stepped:
            return
        work = work_of(event, self._model)
        self.tokens += event.computed_tokens
        self._flops.value += work.flops
        self._bytes.value += work.bytes
        self._recent.add(work, self._ledger.step_seconds, now)
        self._saturation.of("slots").value = min(1.0, event.running / self.slots)
        held = event.blocks_held / event.blocks_total if event.blocks_total else 0.0
        self._saturation.of("kv_cache").value = held

    def done(self) -> StepWork:
        """The work of all steps so far."""
        return StepWork(self._flops.value, self._bytes.value)

    def measure(self) -> None:
        """Bring utilization and saturation up to date."""
        recent = self._recent
        recent.fade(self._clock())
        self._saturation.of("time").value = recent.share()
        if not self._ledger.open_requests:
            self._saturation.of("slots").value = self._saturation.of("kv_cache").value = 0.0
        seconds = recent.seconds
        if self._mfu is not None:
            self._mfu.value = recent.flops / (seconds * self.peaks.flops) if seconds else 0.0
        if self._mbu is not None:
            self._mbu.value = recent.bytes / (seconds * self.peaks.bytes_per_second) if seconds else 0.0
