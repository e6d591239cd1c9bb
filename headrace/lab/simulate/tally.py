"""Client-side measurements, folded from events, and the figures of a finished run, by the same definitions as
`lab.bench`.

Nothing is stored per token. A finished request takes three doubles, so a million of them take 24 MB. Inter-token
latencies go into a sketch, and quantities over time into a bounded number of buckets.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.core.events import AdmitReason, Admitted, Emitted, Event, Finished, Preempted, Stepped, Verified
from headrace.core.request import FinishReason, Request
from headrace.core.tenancy.fair_share import jain
from headrace.lab.bench.stats import Group, Sample, Spread, Summary, within
from headrace.lab.simulate.runner import Front
from headrace.observe.sketch import Sketch

BUCKETS = 512


class Timeline:
    """Sums of named quantities in buckets of equal ``width`` seconds, from time 0 on."""

    def __init__(self, names: Iterable[str] = (), width: float = 0.125) -> None:
        self.width = width
        self.columns: dict[str, list[float]] = {name: [0.0] * BUCKETS for name in names}

    def add(self, name: str, begin: float, end: float, amount: float) -> None:
        """Spreads ``amount`` evenly over the time from ``begin`` to ``end``, which may be equal."""
        while end >= BUCKETS * self.width:
            self._widen()
        column = self.columns.get(name)
        if column is None:
            column = self.columns[name] = [0.0] * BUCKETS
        width = self.width
        first, last = int(begin / width), int(end / width)
        if first == last:
            column[first] += amount
            return
        density = amount / (end - begin)
        column[first] += density * ((first + 1) * width - begin)
        for place in range(first + 1, last):
            column[place] += density * width
        column[last] += density * (end - last * width)

    def coarse(self, name: str, width: float) -> list[float]:
        """A quantity in buckets of ``width``, which must be `width` times a power of two."""
        column, own = list(self.columns[name]), self.width
        while own < width:
            column = [column[i] + column[i + 1] for i in range(0, len(column), 2)]
            own *= 2.0
        return column + [0.0] * (BUCKETS - len(column))

    def _widen(self) -> None:
        self.width *= 2.0
        for name, column in self.columns.items():
            joined = [column[i] + column[i + 1] for i in range(0, BUCKETS, 2)]
            self.columns[name] = joined + [0.0] * (BUCKETS // 2)


MOST_TENANTS = 1000
"""Maximum number of tenants with separate figures; further ones are counted together as ``other``."""

OTHER = "other"


OUTPUT_WEIGHT = 2.0
"""Service of a generated token relative to a computed prompt token, as in VTC (OSDI '24)."""


class Backlog:
    """Unfinished work of one replica; admission control and the router read it."""

    __slots__ = ("open_requests", "open_tokens", "queued_requests", "queued_tokens")

    def __init__(self) -> None:
        self.open_requests = self.open_tokens = 0
        self.queued_requests = self.queued_tokens = 0


class _Open:
    """An open request. ``last`` is the time of its latest token; negative before the first one."""

    __slots__ = ("arrived", "counted", "first", "group", "last", "prompt_tokens", "queued")

    def __init__(self, arrived: float, group: int, prompt_tokens: int, counted: bool) -> None:
        self.arrived = arrived
        self.counted = counted
        self.group = group
        self.prompt_tokens = prompt_tokens
        self.first = self.last = -1.0
        self.queued = True


class GroupTally:
    """Requests of one tenant in one class. Times in seconds; ``tpot`` is NaN for outputs of one token."""

    def __init__(self, tenant: str, service_class: str) -> None:
        self.tenant = tenant
        self.service_class = service_class
        self.ttft, self.tpot, self.e2e = array("d"), array("d"), array("d")
        self.prompt_tokens = self.output_tokens = self.cached_tokens = 0
        self.failed: dict[str, int] = {}


class Tally:
    """All figures of a run, for any number of replicas.

    Over time, ``steps`` sums figures of the engines, ``service`` the tokens of each tenant, and ``waiting`` the seconds
    that its requests waited for a first token. ``with_rows`` adds a row per request. ``slots_full_seconds`` is the time
    in which all ``slots`` of a replica were taken while requests waited.
    """

    def __init__(self, slots: int = 1 << 62, *, with_rows: bool = False) -> None:
        self.slots = slots
        self.with_rows = with_rows
        self.rows: list[dict[str, Any]] = []
        self.slots_full_seconds = 0.0
        self.groups: list[GroupTally] = []
        self.gaps = Sketch()
        self.began = math.inf
        self.ended = 0.0
        self.preemptions = self.lost_tokens = 0
        self.drafted_tokens = self.accepted_tokens = 0
        self.step_count = self.step_rows = self.computed_tokens = 0
        self.blocks_peak = 0.0
        self.steps = Timeline(("seconds", "running", "waiting", "kv"))
        self.service = Timeline()
        self.waiting = Timeline()
        self._open: dict[str, _Open] = {}
        self._places: dict[tuple[str, str], int] = {}
        self._gap, self._gap_count = 0.0, 0

    @property
    def open_requests(self) -> int:
        return len(self._open)

    # -- arrivals ----------------------------------------------------------------------------------

    def expect(self, request: Request, counted: bool = True) -> None:
        """Registers an accepted request. One that is not ``counted`` only computes the prompt of another request."""
        self.began = min(self.began, request.arrived)
        group = self._group(request.tenant, request.service_class)
        self._open[request.id] = _Open(request.arrived, group, len(request.tokens), counted)

    def refuse(self, request: Request, reason: str) -> None:
        """Counts a request that was rejected at admission."""
        self.began = min(self.began, request.arrived)
        self.ended = max(self.ended, request.arrived)
        group = self.groups[self._group(request.tenant, request.service_class)]
        group.failed[reason] = group.failed.get(reason, 0) + 1
        if self.with_rows:
            self.rows.append(self._row(request.id, group, request.arrived, error=reason))

    def _group(self, tenant: str, service_class: str) -> int:
        key = (tenant, service_class)
        place = self._places.get(key)
        if place is None:
            if len(self._places) >= MOST_TENANTS and tenant != OTHER:
                return self._group(OTHER, service_class)
            place = self._places[key] = len(self.groups)
            self.groups.append(GroupTally(tenant, service_class))
        return place

    # -- events ------------------------------------------------------------------------------------

    def fold(
        self, events: Sequence[Event], began: float, now: float, backlog: Backlog, front: Front
    ) -> list[str]:
        """Folds the events of a step that ran from ``began`` to ``now``; returns the ids of finished requests."""
        ended: list[str] = []
        open_, each = self._open, front.event_seconds
        seen = max(now, front.free_at) if each else now
        for event in events:
            kind = type(event)
            if kind is Emitted:
                request = open_[event[0]]  # type: ignore[index]
                seen += each
                if request.last >= 0.0:
                    gap = seen - request.last
                    if gap == self._gap:
                        self._gap_count += 1
                    else:
                        self.gaps.add(self._gap, self._gap_count)
                        self._gap, self._gap_count = gap, 1
                else:
                    request.first = seen
                request.last = seen
            elif isinstance(event, Finished):
                self._finish(event, seen, backlog)
                ended.append(event.request_id)
            elif isinstance(event, Admitted):
                if event.reason is AdmitReason.NEW:
                    _dequeue(open_[event.request_id], backlog)
            elif isinstance(event, Stepped):
                self._step(event, began, now)
            elif isinstance(event, Preempted):
                self.preemptions += 1
                self.lost_tokens += event.lost_tokens
            elif isinstance(event, Verified):
                self.drafted_tokens += event.drafted
                self.accepted_tokens += event.accepted
        if each:
            front.free_at = seen
        return ended

    def _step(self, event: Stepped, began: float, now: float) -> None:
        self.step_count += 1
        self.step_rows += event.decode_rows + event.prefill_rows
        self.computed_tokens += event.computed_tokens
        held = event.blocks_held / event.blocks_total
        self.blocks_peak = max(self.blocks_peak, held)
        seconds, add = now - began, self.steps.add
        if event.waiting and event.running >= self.slots:
            self.slots_full_seconds += seconds
        add("seconds", began, now, seconds)
        add("running", began, now, event.running * seconds)
        add("waiting", began, now, event.waiting * seconds)
        add("kv", began, now, held * seconds)

    def _finish(self, event: Finished, now: float, backlog: Backlog) -> None:
        request = self._open.pop(event.request_id)
        backlog.open_requests -= 1
        backlog.open_tokens -= request.prompt_tokens
        _dequeue(request, backlog)
        if not request.counted:
            return
        self.ended = max(self.ended, now)
        group = self.groups[request.group]
        answered = request.first if request.first >= 0.0 else now
        self.waiting.add(group.tenant, request.arrived, answered, answered - request.arrived)
        if event.reason not in (FinishReason.STOP, FinishReason.LENGTH):
            group.failed[event.reason.value] = group.failed.get(event.reason.value, 0) + 1
            if self.with_rows:
                self.rows.append(
                    self._row(event.request_id, group, request.arrived, error=event.reason.value)
                )
            return
        group.ttft.append(request.first - request.arrived)
        further = event.output_tokens - 1
        group.tpot.append((request.last - request.first) / further if further else math.nan)
        group.e2e.append(now - request.arrived)
        group.prompt_tokens += event.prompt_tokens
        group.output_tokens += event.output_tokens
        group.cached_tokens += event.cached_tokens
        computed = event.prompt_tokens - event.cached_tokens
        self.service.add(group.tenant, request.first, request.first, computed)
        self.service.add(group.tenant, request.first, request.last, OUTPUT_WEIGHT * event.output_tokens)

        if self.with_rows:
            self.rows.append(
                self._row(
                    event.request_id,
                    group,
                    request.arrived,
                    ttft_seconds=group.ttft[-1],
                    tpot_seconds=group.tpot[-1] if further else None,
                    e2e_seconds=group.e2e[-1],
                    prompt_tokens=event.prompt_tokens,
                    cached_tokens=event.cached_tokens,
                    output_tokens=event.output_tokens,
                    finish_reason=event.reason.value,
                )
            )

    def _row(self, request_id: str, group: GroupTally, arrived: float, **more: Any) -> dict[str, Any]:
        """A request as a row of `lab.bench.report`."""
        return {
            "request": request_id,
            "tenant": group.tenant,
            "service_class": group.service_class,
            "arrived_seconds": arrived,
            **more,
        }

    def anew(self) -> Tally:
        """An empty tally with the same settings."""
        return Tally(self.slots, with_rows=self.with_rows)

    def close(self) -> None:
        """Ends the run: counts the last gaps, which were not yet in the sketch."""
        self.gaps.add(self._gap, self._gap_count)
        self._gap_count = 0


def _dequeue(request: _Open, backlog: Backlog) -> None:
    if request.queued:
        request.queued = False
        backlog.queued_requests -= 1
        backlog.queued_tokens -= request.prompt_tokens


SLO_NAMES = ("ttft", "tpot", "e2e")


def spread_of(sketch: Sketch) -> Spread:
    """The percentiles of a sketched distribution."""
    p50, p95, p99 = (sketch.percentile(percent) for percent in (50.0, 95.0, 99.0))
    most = sketch.most if sketch.count else math.nan
    return Spread(sketch.count, sketch.mean, p50, p95, p99, most)


@dataclass(frozen=True, slots=True)
class Outcome:
    """All figures of a run.

    ``facts`` are figures of the engines (steps, preemptions, cache, memory, fairness). ``timeline`` has one list per
    quantity with a value per bucket; its ``seconds`` are the starts of the buckets. ``failures`` counts failed requests
    by reason.
    """

    summary: Summary
    facts: Mapping[str, Any]
    failures: Mapping[str, int]
    tenants: Sequence[Group]
    classes: Sequence[Group]
    timeline: Mapping[str, Sequence[float]]
    ttft: Sequence[float]
    tpot: Sequence[float]


def outcome(tally: Tally, slo: Mapping[str, float], busy_seconds: Sequence[float] = ()) -> Outcome:
    """The figures of a finished run; ``busy_seconds`` has the busy time of each replica's device."""
    groups = tally.groups
    seconds = max(0.0, tally.ended - tally.began) if groups else 0.0
    failures: dict[str, int] = {}
    for group in groups:
        for reason, count in group.failed.items():
            failures[reason] = failures.get(reason, 0) + count
    whole = _sample(groups, slo)
    line = timeline(tally)
    hit_share = whole.cached_tokens / whole.prompt_tokens if whole.prompt_tokens else 0.0
    return Outcome(
        whole.summary(seconds, spread_of(tally.gaps), slo),
        _facts(tally, line, busy_seconds, seconds, hit_share),
        dict(sorted(failures.items())),
        [_sample(mine, slo).group(name) for name, mine in _by(groups, "tenant").items()],
        [_sample(mine, slo).group(name) for name, mine in _by(groups, "service_class").items()],
        line,
        whole.ttft,
        whole.tpot,
    )


def _facts(
    tally: Tally,
    line: Mapping[str, Sequence[float]],
    busy_seconds: Sequence[float],
    seconds: float,
    hit_share: float,
) -> dict[str, Any]:
    """Figures of the engines."""
    stepping = sum(tally.steps.columns["seconds"])
    return {
        "steps": tally.step_count,
        "batch_rows_mean": tally.step_rows / tally.step_count if tally.step_count else 0.0,
        "computed_tokens": tally.computed_tokens,
        "preemptions": tally.preemptions,
        "preempted_tokens": tally.lost_tokens,
        "drafted_tokens": tally.drafted_tokens,
        "accepted_tokens": tally.accepted_tokens,
        "cache_hit_percent": 100.0 * hit_share,
        "kv_used_percent_mean": 100.0 * sum(tally.steps.columns["kv"]) / stepping if stepping else 0.0,
        "kv_used_percent_peak": 100.0 * tally.blocks_peak,
        "slots_full_percent": 100.0 * tally.slots_full_seconds / stepping if stepping else 0.0,
        "device_busy_percent": 100.0 * _busy(busy_seconds, seconds),
        "jain_service": jain([sum(column) for column in tally.service.columns.values()]),
        "jain_backlogged": _mean(finite(line["jain"])),
    }


def _busy(busy_seconds: Sequence[float], seconds: float) -> float:
    """Mean busy share of the devices, each at most 1 (a step may end after the run)."""
    if not seconds or not busy_seconds:
        return 0.0
    return math.fsum(min(1.0, each / seconds) for each in busy_seconds) / len(busy_seconds)


def timeline(tally: Tally) -> dict[str, list[float]]:
    """Means per bucket: running requests, waiting requests, share of used blocks, and Jain's index over the tenants
    that were backlogged for the whole bucket (NaN with fewer than two)."""
    steps = tally.steps.columns
    width = max(line.width for line in (tally.steps, tally.service, tally.waiting))
    used = math.ceil(tally.ended / width) if tally.ended else 0
    stepping = tally.steps.coarse("seconds", width)
    means = {
        name: [
            amount / seconds if seconds else 0.0
            for amount, seconds in zip(tally.steps.coarse(name, width), stepping, strict=True)
        ][:used]
        for name in steps
        if name != "seconds"
    }
    services = {name: tally.service.coarse(name, width) for name in tally.service.columns}
    waits = {name: tally.waiting.coarse(name, width) for name in tally.waiting.columns}
    fairness = []
    for place in range(used):
        backlogged = [name for name, wait in waits.items() if wait[place] >= width]
        given = [services[name][place] if name in services else 0.0 for name in backlogged]
        fairness.append(jain(given) if len(given) > 1 else math.nan)
    return {"seconds": [width * place for place in range(used)], **means, "jain": fairness}


def _joined(groups: Iterable[GroupTally], name: str) -> array[float]:
    values = array("d")
    for group in groups:
        values.extend(getattr(group, name))
    return values


def _numbers(values: Iterable[float]) -> array[float]:
    return array("d", (value for value in values if value == value))


def finite(values: Iterable[float]) -> list[float]:
    """The finite values."""
    return [value for value in values if math.isfinite(value)]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def _sample(groups: Sequence[GroupTally], slo: Mapping[str, float]) -> Sample:
    """What the figures of these requests are computed from."""
    failed = sum(sum(group.failed.values()) for group in groups)
    e2e = _joined(groups, "e2e")
    prompt, output, cached = (
        sum(getattr(group, name) for group in groups)
        for name in ("prompt_tokens", "output_tokens", "cached_tokens")
    )
    return Sample(
        *(len(e2e) + failed, failed, prompt, output, cached),
        ttft=_joined(groups, "ttft"),
        tpot=_numbers(_joined(groups, "tpot")),
        e2e=e2e,
        met=sum(_met(group, slo) for group in groups) if slo else None,
    )


def _met(group: GroupTally, slo: Mapping[str, float]) -> int:
    """Number of requests within every target."""
    times = zip(group.ttft, group.tpot, group.e2e, strict=True)
    return sum(within(dict(zip(SLO_NAMES, each, strict=True)), slo) for each in times)


def _by(groups: Sequence[GroupTally], key: str) -> dict[str, list[GroupTally]]:
    parts: dict[str, list[GroupTally]] = {}
    for group in groups:
        parts.setdefault(getattr(group, key), []).append(group)
    return dict(sorted(parts.items()))
