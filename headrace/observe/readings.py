"""A reading of all counters at one time. Rates are differences of two readings."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from headrace.core.events import SkipReason
from headrace.core.ports import Watcher
from headrace.observe.cost.ledger import CostLedger
from headrace.observe.cost.report import CostReport, saved_fields
from headrace.observe.cost.usage import TenantSavings
from headrace.observe.goodput import Goodput
from headrace.observe.metrics import EngineTotals, Metrics
from headrace.observe.metrics_page import MetricsPage
from headrace.observe.requests import RequestBook, RequestSummary
from headrace.observe.steps.timelines import Timelines
from headrace.observe.usage import UsageBook
from headrace.observe.work import Peaks, StepWork, WorkMeter

# All folds over a server's events: metrics, goodput, explanations, usage, savings, cost, timelines, and their page.


class Folds(NamedTuple):
    """The metrics page, and the folds over the engine's events."""

    page: MetricsPage
    metrics: Metrics
    goodput: Goodput
    book: RequestBook
    usage: UsageBook
    savings: TenantSavings
    cost: CostReport
    work: WorkMeter
    timelines: Timelines

    @property
    def watchers(self) -> tuple[Watcher, ...]:
        """The folds in order; the cost ledger is first, because others read it."""
        return (
            *(self.cost.ledger, self.work, self.metrics, self.goodput),
            *(self.book, self.usage, self.savings, self.timelines),
        )

    def usage_of(self, tenant: str) -> dict[str, Any]:
        """A tenant's usage, cost and savings."""
        saved = saved_fields(self.savings.savings(tenant))
        return {**self.usage.account(tenant), **self.cost.tenant(tenant), **saved}

    def explain(self, request_id: str, now: float) -> dict[str, Any] | None:
        """The explanation of a request, with its cost."""
        shown = self.book.explain(request_id, now)
        if shown is not None:
            cost = shown["cost"]
            cost |= self.cost.request(request_id)
            cost["estimated_flops"] = self.work.flops_of(cost["computed_tokens"], cost["generated_tokens"])
        return shown


WINDOW_SECONDS = 5.0
"""Time over which rates are averaged."""

LONGEST_GAP_SECONDS = 3.0
"""After a longer pause, older readings are dropped."""


class Reading(NamedTuple):
    """Counters and sums of seconds since the start. ``loop`` is the CPU time of the event loop's thread."""

    at: float
    engine: EngineTotals
    attributed: float
    idle: float
    overhead: float
    prefill: float
    decode: float
    work: StepWork
    loop: float


def read(metrics: Metrics, ledger: CostLedger, work: WorkMeter, loop: float, now: float) -> Reading:
    """A reading of a server's folds."""
    balance = ledger.balance(now)
    return Reading(
        now,
        metrics.totals(),
        balance.attributed,
        balance.idle,
        balance.overhead,
        ledger.prefill_seconds,
        ledger.decode_seconds,
        work.done(),
        loop,
    )


class Readings:
    """The readings of the last `WINDOW_SECONDS`."""

    def __init__(self) -> None:
        self._kept: deque[Reading] = deque()

    def add(self, reading: Reading) -> None:
        """Add a reading; drop those before the window."""
        kept = self._kept
        if kept and reading.at - kept[-1].at > LONGEST_GAP_SECONDS:
            kept.clear()
        kept.append(reading)
        while len(kept) > 2 and kept[1].at <= reading.at - WINDOW_SECONDS:
            kept.popleft()

    @property
    def newest(self) -> Reading:
        """The last reading."""
        return self._kept[-1]

    def span(self) -> Span | None:
        """The window between the oldest and the newest reading; None with one reading."""
        first, last = self._kept[0], self._kept[-1]
        return Span(first, last) if last.at > first.at else None


class Span(NamedTuple):
    """Two readings, the second one later."""

    first: Reading
    last: Reading

    @property
    def seconds(self) -> float:
        """The time between them."""
        return self.last.at - self.first.at

    def rate(self, name: str) -> float:
        """Increase of an engine counter per second."""
        return self.grown(name) / self.seconds

    def grown(self, name: str) -> int:
        """Increase of an engine counter."""
        return int(getattr(self.last.engine, name) - getattr(self.first.engine, name))

    def blocked(self) -> int:
        """Requests that began to wait for KV blocks."""
        reason = SkipReason.NO_BLOCKS.value
        return self.last.engine.waits.get(reason, 0) - self.first.engine.waits.get(reason, 0)

    def batch(self) -> list[int]:
        """Steps by their number of rows."""
        pairs = zip(self.first.engine.batch_counts, self.last.engine.batch_counts, strict=True)
        return [after - before for before, after in pairs]

    def shares(self) -> dict[str, float]:
        """Shares of the wall clock: computing, idle and overhead. During a step that spans the whole window, all of it
        is computing."""
        parts = {
            "computing": self.last.attributed - self.first.attributed,
            "idle": self.last.idle - self.first.idle,
            "overhead": self.last.overhead - self.first.overhead,
        }
        total = sum(parts.values())
        if total <= 0.0:
            return {"computing": 1.0, "idle": 0.0, "overhead": 0.0}
        return {name: max(0.0, part) / total for name, part in parts.items()}

    def prefill_share(self) -> float:
        """Share of step time spent on prefill rows."""
        prefill, decode = self.last.prefill - self.first.prefill, self.last.decode - self.first.decode
        return prefill / (prefill + decode) if prefill + decode > 0.0 else 0.0

    def loop_share(self) -> float:
        """CPU seconds of the event loop per second."""
        return (self.last.loop - self.first.loop) / self.seconds

    def utilization(self, peaks: Peaks) -> tuple[float | None, float | None]:
        """Utilization of peak arithmetic and of peak bandwidth while steps computed; None if the peak is unknown."""
        seconds = self.last.attributed - self.first.attributed
        flops = self.last.work.flops - self.first.work.flops
        nbytes = self.last.work.bytes - self.first.work.bytes
        return (
            flops / (seconds * peaks.flops) if peaks.flops and seconds > 0.0 else None,
            nbytes / (seconds * peaks.bytes_per_second) if peaks.bytes_per_second and seconds > 0.0 else None,
        )


# Percentiles of latency over the requests that ended in the last minute.

LATENCY_SECONDS = 60.0
PERCENTILES = (0.5, 0.95, 0.99)


def percentiles(values: Iterable[float]) -> list[float] | None:
    """p50, p95 and p99, interpolated linearly; None without values."""
    ordered = sorted(values)
    return [_at(ordered, share) for share in PERCENTILES] if ordered else None


def _at(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def latency(requests: Iterable[RequestSummary], now: float) -> dict[str, Any]:
    """TTFT, TPOT and E2E of complete requests that ended in the last `LATENCY_SECONDS`, in seconds.

    Cached responses do not count.
    """
    recent = [
        each
        for each in requests
        if each.ended is not None
        and each.complete
        and each.first is not None
        and each.ended >= now - LATENCY_SECONDS
    ]
    return {
        "requests": len(recent),
        "ttft": percentiles(each.first - each.arrived for each in recent if each.first is not None),
        "tpot": percentiles(
            (each.last - each.first) / (each.output_tokens - 1)
            for each in recent
            if each.first is not None and each.last is not None and each.output_tokens > 1
        ),
        "e2e": percentiles(each.ended - each.arrived for each in recent if each.ended is not None),
    }
