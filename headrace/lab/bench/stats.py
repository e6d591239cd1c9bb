"""Measurements of one request from the client's side, the interface of targets, and definitions of the figures of a
run.

Percentiles are interpolated linearly between the two nearest ranks (type 7 of Hyndman and Fan, 1996, numpy's default).
Throughput counts tokens of delivered outputs, without padding, over the time from the first arrival to the end of the
last response. Goodput counts the requests that met all latency targets; failed and rejected requests meet none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

from headrace.lab.workload.work import Work
from headrace.observe.goodput import FairnessWindow


@dataclass(frozen=True, slots=True)
class Record:
    """One request's times, in seconds after the start of the run, and its token counts.

    ``arrived`` is when the request was due, so that a slow client does not make the server look better; in a closed
    loop it is when the request was sent. ``token_seconds`` are the times of the chunks with output, in order; a chunk
    may carry several tokens. ``error`` says why the response is incomplete. ``ended`` is when the stream reported its
    end: an end token counts as a token but has no chunk of its own.
    """

    id: str
    arrived: float
    finished: float
    token_seconds: tuple[float, ...] = ()
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: str = ""
    error: str = ""
    tenant: str = "default"
    service_class: str = "default"
    ended: float | None = None

    @property
    def ttft(self) -> float | None:
        """Time to first token, from arrival."""
        return self.token_seconds[0] - self.arrived if self.token_seconds else None

    @property
    def e2e(self) -> float:
        """Time from arrival to the end."""
        return self.finished - self.arrived

    @property
    def tpot(self) -> float | None:
        """Mean time per token after the first; None for outputs of one token."""
        if self.output_tokens < 2 or not self.token_seconds:
            return None
        last = max(self.token_seconds[-1], self.ended or 0.0)
        return (last - self.token_seconds[0]) / (self.output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Inter-token latencies: the times between two chunks with output."""
        return [later - earlier for earlier, later in pairwise(self.token_seconds)]


def wrong_length(work: Work, output_tokens: int) -> str:
    """The error message for an output of the wrong length; empty if the length is right or not prescribed."""
    if not work.ignore_eos or output_tokens == work.max_tokens:
        return ""
    return f"expected exactly {work.max_tokens} tokens, got {output_tokens}"


class Target(Protocol):
    """Something that serves a workload: an engine in this process, a URL, another library.

    ``completed`` counts the requests of the current run that have ended; a progress bar reads it.
    """

    name: str

    @property
    def completed(self) -> int: ...

    def run(self, work: Sequence[Work]) -> list[Record]:
        """Serve all requests and return their records, including those of failed requests."""
        ...

    def facts(self) -> dict[str, Any]:
        """Figures that the target reports about its last run, such as KV waste or batch size."""
        ...

    def close(self) -> None: ...


SLO_NAMES = ("ttft", "tpot", "itl", "e2e")


def percentile(values: Sequence[float], percent: float) -> float:
    """The ``percent``-th percentile of ``values``, interpolated; NaN if there are none."""
    if not values:
        return math.nan
    ordered = sorted(values)
    at = (len(ordered) - 1) * percent / 100.0
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def median(values: Sequence[float]) -> float:
    """The 50th percentile."""
    return percentile(values, 50.0)


@dataclass(frozen=True, slots=True)
class Spread:
    """Distribution of one quantity, in seconds."""

    count: int
    mean: float
    p50: float
    p95: float
    p99: float
    most: float


def spread(values: Sequence[float]) -> Spread:
    """The distribution of ``values``; NaN in all figures if there are none."""
    if not values:
        return Spread(0, *([math.nan] * 5))
    ordered = sorted(values)  # `percentile` sorts again, which takes linear time on sorted values
    return Spread(
        len(ordered),
        math.fsum(ordered) / len(ordered),
        percentile(ordered, 50.0),
        percentile(ordered, 95.0),
        percentile(ordered, 99.0),
        ordered[-1],
    )


@dataclass(frozen=True, slots=True)
class Group:
    """Results of one tenant or one class; ``slo_share`` (0 to 1) is the share of its requests within the SLO."""

    name: str
    requests: int
    failed: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft: Spread
    tpot: Spread
    e2e: Spread
    slo_share: float | None = None


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of one run.

    ``goodput`` is the number of requests per second that met every SLO, ``slo_share`` (0 to 1) their share. With
    several tenants, ``fairness`` is Jain's index over them (see `fairness`). ``tenants`` and ``classes`` are empty if
    there is only one.
    """

    requests: int
    failed: int
    seconds: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    requests_per_second: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    ttft: Spread
    tpot: Spread
    itl: Spread
    e2e: Spread
    slo: Mapping[str, float] = field(default_factory=dict)
    goodput: float | None = None
    slo_share: float | None = None
    fairness: float | None = None
    tenants: Sequence[Group] = ()
    classes: Sequence[Group] = ()


def within(times: Mapping[str, float | None], slo: Mapping[str, float]) -> bool:
    """Whether the ``times`` of a request, by quantity, meet every target of ``slo``.

    A quantity that the request does not have (None or NaN: TPOT of one token) meets its target.
    """
    return all((value := times[name]) is None or not value > limit for name, limit in slo.items())


def times_of(record: Record) -> Mapping[str, float | None]:
    """What targets are compared with, by quantity in seconds; ``itl`` is the request's longest gap."""
    longest = max(record.gaps, default=None)
    return {"ttft": record.ttft, "tpot": record.tpot, "itl": longest, "e2e": record.e2e}


def meets(record: Record, slo: Mapping[str, float]) -> bool:
    """Whether a request met every target of ``slo``, in seconds; one that failed met none.

    If no chunk of the output was seen, its times are unknown, and only a target of the whole request can be met.
    """
    times = times_of(record)
    if record.output_tokens and not record.token_seconds:
        times = dict.fromkeys(times, math.inf) | {"e2e": record.e2e}
    return not record.error and within(times, slo)


@dataclass(frozen=True, slots=True)
class Sample:
    """What all figures of a run, or of a part of its requests, are computed from, whether measured or simulated.

    ``ttft``, ``tpot`` and ``e2e`` are seconds of the requests that did not fail and have them. ``met`` is the number of
    requests that met every target, None without targets.
    """

    requests: int
    failed: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    ttft: Sequence[float]
    tpot: Sequence[float]
    e2e: Sequence[float]
    met: int | None

    @property
    def slo_share(self) -> float | None:
        """The share of requests that met every target; None without targets or requests."""
        return None if self.met is None or not self.requests else self.met / self.requests

    def group(self, name: str) -> Group:
        """The figures of a part of a run."""
        return Group(
            name=name,
            requests=self.requests,
            failed=self.failed,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=self.output_tokens,
            ttft=spread(self.ttft),
            tpot=spread(self.tpot),
            e2e=spread(self.e2e),
            slo_share=self.slo_share,
        )

    def summary(self, seconds: float, itl: Spread, slo: Mapping[str, float]) -> Summary:
        """The figures of a whole run of ``seconds``."""
        per_second = 1.0 / seconds if seconds > 0 else 0.0
        return Summary(
            requests=self.requests,
            failed=self.failed,
            seconds=seconds,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            cached_tokens=self.cached_tokens,
            requests_per_second=(self.requests - self.failed) * per_second,
            output_tokens_per_second=self.output_tokens * per_second,
            total_tokens_per_second=(self.prompt_tokens + self.output_tokens) * per_second,
            ttft=spread(self.ttft),
            tpot=spread(self.tpot),
            itl=itl,
            e2e=spread(self.e2e),
            slo=dict(slo),
            goodput=None if self.met is None else self.met * per_second,
            slo_share=self.slo_share,
        )


def _sample(records: Sequence[Record], slo: Mapping[str, float] | None) -> Sample:
    whole = [record for record in records if not record.error]
    return Sample(
        requests=len(records),
        failed=len(records) - len(whole),
        prompt_tokens=sum(r.prompt_tokens for r in whole),
        output_tokens=sum(r.output_tokens for r in whole),
        cached_tokens=sum(r.cached_tokens for r in whole),
        ttft=[r.ttft for r in whole if r.ttft is not None],
        tpot=[r.tpot for r in whole if r.tpot is not None],
        e2e=[r.e2e for r in whole],
        met=sum(meets(r, slo) for r in whole) if slo else None,
    )


def summarize(records: Sequence[Record], slo: Mapping[str, float] | None = None) -> Summary:
    """All figures of a run. Failed requests count only in ``requests``, ``failed``, ``seconds`` and the SLO share."""
    seconds = max((r.finished for r in records), default=0.0) - min((r.arrived for r in records), default=0.0)
    itl = spread([gap for r in records if not r.error for gap in r.gaps])
    return replace(
        _sample(records, slo).summary(seconds, itl, slo or {}),
        fairness=fairness(records) if len({r.tenant for r in records}) > 1 else None,
        tenants=groups(records, lambda r: r.tenant, slo),
        classes=groups(records, lambda r: r.service_class, slo),
    )


def slo_share(records: Sequence[Record], slo: Mapping[str, float]) -> float:
    """The share of requests within the SLO, 0 to 1; NaN if there are none."""
    return sum(meets(record, slo) for record in records) / len(records) if records else math.nan


def met_by_target(records: Sequence[Record], slo: Mapping[str, float]) -> dict[str, float]:
    """The share of requests that met each target alone, 0 to 1; the target with the smallest share binds."""
    return {name: slo_share(records, {name: limit}) for name, limit in slo.items()}


def slo_text(slo: Mapping[str, float]) -> str:
    """Targets in words."""
    return ", ".join(f"{name} {1000 * seconds:g} ms" for name, seconds in slo.items())


def groups(
    records: Sequence[Record], key: Callable[[Record], str], slo: Mapping[str, float] | None = None
) -> list[Group]:
    """The records grouped by ``key``, sorted by name; empty if there is only one group."""
    by_name: dict[str, list[Record]] = {}
    for record in records:
        by_name.setdefault(key(record), []).append(record)
    if len(by_name) < 2:
        return []
    return [_sample(by_name[name], slo).group(name) for name in sorted(by_name)]


def fairness(records: Sequence[Record]) -> float:
    """Jain's index over tenants of the service received, relative to equal shares (`observe.goodput`).

    From the client's side, a prompt is served when its first token arrives; until then the whole request waits.
    """
    changes: list[
        tuple[float, str, float, float]
    ] = []  # time, tenant, tokens served, change of waiting tokens
    for record in records:
        work = record.prompt_tokens - record.cached_tokens + record.output_tokens
        first = record.token_seconds[0] if record.token_seconds else record.finished
        changes.append((record.arrived, record.tenant, 0.0, work))
        changes.append((first, record.tenant, 0.0, -work))
        if record.token_seconds:
            changes.append((first, record.tenant, record.prompt_tokens - record.cached_tokens, 0.0))
            each = record.output_tokens / len(record.token_seconds)
            changes += [(at, record.tenant, each, 0.0) for at in record.token_seconds]
    window = FairnessWindow(lambda tenant: 1.0, slices=None)
    for now, tenant, served, waits in sorted(changes, key=lambda event: event[0]):
        if waits:
            window.wait(tenant, waits, now)
        if served:
            window.serve(tenant, served, now)
    window.close()
    return window.index()


class Figure(NamedTuple):
    """One number of a run. ``name`` is its key in reports (times in seconds). Tables show it under ``label``,
    multiplied by ``scale`` and with ``digits`` decimals."""

    name: str
    label: str
    read: Callable[[Summary], float]
    scale: float = 1.0
    digits: int = 1

    def shown(self, value: float) -> str:
        """A value as a cell of a table."""
        return "-" if math.isnan(value) else f"{self.scale * value:,.{self.digits}f}"


def _latencies() -> list[Figure]:
    figures = []
    for quantity in ("ttft", "tpot", "itl", "e2e"):
        for percentile in ("p50", "p95", "p99"):

            def read(summary: Summary, quantity: str = quantity, percentile: str = percentile) -> float:
                value: float = getattr(getattr(summary, quantity), percentile)
                return value

            label = f"{quantity.upper()} {percentile} ms"
            figures.append(Figure(f"{quantity}_{percentile}", label, read, 1000.0))
    return figures


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value


FIGURES: Sequence[Figure] = (
    Figure("output_tokens_per_second", "output tokens/s", lambda s: s.output_tokens_per_second),
    Figure("total_tokens_per_second", "total tokens/s", lambda s: s.total_tokens_per_second),
    Figure("requests_per_second", "requests/s", lambda s: s.requests_per_second, digits=2),
    *_latencies(),
    Figure("goodput", "goodput requests/s", lambda s: _or_nan(s.goodput), digits=2),
    Figure("slo_share", "requests within SLO %", lambda s: _or_nan(s.slo_share), 100.0),
    Figure("fairness", "Jain index of tenants", lambda s: _or_nan(s.fairness), digits=3),
)
"""All figures in the order of a table's rows; tables omit figures that no run has."""


def ratio(value: float, base: float) -> float:
    """A figure divided by the baseline's; NaN if either is undefined or the baseline is 0."""
    return value / base if base > 0 and not math.isnan(value) else math.nan
