"""Whether people got what they hoped for: SLOs by class, waiting by class, fairness between tenants.

Goodput is the share of requests inside all of their SLO (DistServe, OSDI '24). A request without an SLO is inside; one
that the server turned away, failed or gave up is not; one that its caller gave up is judged by what was due until then.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from headrace.core.events import (
    AdmitReason,
    Admitted,
    Arrived,
    Chunked,
    Emitted,
    Event,
    Finished,
    Preempted,
    Stepped,
    TurnedAway,
)
from headrace.core.request import FinishReason
from headrace.observe.fairness import FairnessWindow
from headrace.observe.metrics import REQUEST_SECONDS
from headrace.observe.metrics_page import MetricsPage
from headrace.observe.series import Cell, Histogram

SHARE_SECONDS = 60.0
"""How far back the goodput share looks: a request weighs 37 % of the newest when it is so old."""

PRIOR_TOKENS = 128.0
"""What an answer is taken to need before any has ended; afterwards their mean."""

MEMORY = 200
"""Answers that the mean of lengths remembers."""


class _Share:
    """A share of events, the older the less they count."""

    __slots__ = ("at", "good", "total")

    def __init__(self) -> None:
        self.good = self.total = 0.0
        self.at = 0.0

    def count(self, good: bool, now: float) -> float:
        faded = math.exp(min(0.0, self.at - now) / SHARE_SECONDS)
        self.good = self.good * faded + good
        self.total = self.total * faded + 1.0
        self.at = now
        return self.good / self.total


class _Class:
    """The series of one class."""

    __slots__ = ("queue", "running", "share", "share_cell", "waiting")

    def __init__(self, waiting: Cell, running: Cell, queue: Histogram, share_cell: Cell) -> None:
        self.waiting = waiting
        self.running = running
        self.queue = queue
        self.share = _Share()
        self.share_cell = share_cell


class _Live:
    """A request until it ends; ``due`` is the work in tokens that waits with it."""

    __slots__ = ("arrived", "due", "first", "group", "last", "name", "running", "slo", "tenant")

    def __init__(self, event: Arrived, arrived: float, group: _Class, due: float) -> None:
        self.name = event.service_class
        self.slo = event.slo
        self.tenant = event.tenant
        self.arrived = arrived
        self.group = group
        self.due = due
        self.first: float | None = None
        self.last = arrived
        self.running = False


class Goodput:
    """A `core.ports.Watcher` that writes to ``sheet``; ``weight`` is a tenant's share beside others'."""

    def __init__(self, sheet: MetricsPage, weight: Callable[[str], float] = lambda tenant: 1.0) -> None:
        self._attained = sheet.counter("slo_attained", "Requests inside the bound.", ["class", "slo"])
        self._missed = sheet.counter(
            "slo_missed", "Requests outside the bound; slo all: any.", ["class", "slo"]
        )
        self._shares = sheet.gauge("goodput_share", "Requests inside all of their SLO lately.", ["class"])
        self._waiting = sheet.gauge("class_requests_waiting", "Requests of a class that wait.", ["class"])
        self._running = sheet.gauge("class_requests_running", "Requests of a class that run.", ["class"])
        self._queue = sheet.histogram(
            "class_queue_time_seconds", "Arrival to first admission.", REQUEST_SECONDS, ["class"]
        )
        self._refusals = sheet.counter(
            "requests_turned_away", "Requests refused at the gate.", ["class", "reason"]
        )
        self._jain = sheet.gauge(
            "tenant_fairness_jain",
            "Jain's index of tenants' service beside their fair share, last minute.",
        ).of()
        self._jain.value = 1.0
        self._window = FairnessWindow(weight)
        self._told_at = -math.inf
        self._answer_tokens = PRIOR_TOKENS
        self._classes: dict[str, _Class] = {}
        self._live: dict[str, _Live] = {}
        self._folds: dict[type, Callable[[Any, float], None]] = {
            Emitted: self._emitted,
            Chunked: self._chunked,
            Stepped: self._stepped,
            Arrived: self._arrived,
            Admitted: self._admitted,
            Preempted: self._preempted,
            Finished: self._finished,
            TurnedAway: self._turned_away,
        }

    def fold(self, event: Event, now: float) -> None:
        fold = self._folds.get(type(event))
        if fold is not None:
            fold(event, now)

    def _class(self, name: str) -> _Class:
        if name not in self._classes:
            self._classes[name] = _Class(
                self._waiting.of(name), self._running.of(name), self._queue.of(name), self._shares.of(name)
            )
        return self._classes[name]

    def _arrived(self, event: Arrived, now: float) -> None:
        arrived = now if event.at is None else event.at
        group = self._class(event.service_class)
        due = event.prompt_tokens + self._answer_tokens
        self._live[event.request_id] = live = _Live(event, arrived, group, due)
        group.waiting.value += 1
        self._window.wait(live.tenant, due, now)

    def _admitted(self, event: Admitted, now: float) -> None:
        live = self._live[event.request_id]
        live.running = True
        live.group.waiting.value -= 1
        live.group.running.value += 1
        self._window.wait(live.tenant, -live.due, now)
        if event.reason is AdmitReason.NEW:
            at = now if event.at is None else event.at
            live.group.queue.observe(max(0.0, at - live.arrived))

    def _chunked(self, event: Chunked, now: float) -> None:
        self._window.serve(self._live[event.request_id].tenant, event.length, now)

    def _emitted(self, event: Emitted, now: float) -> None:
        live = self._live[event.request_id]
        self._window.serve(live.tenant, len(event.tokens), now)
        live.last = now
        if live.first is None:
            live.first = now

    def _preempted(self, event: Preempted, now: float) -> None:
        live = self._live[event.request_id]
        live.running = False
        live.group.running.value -= 1
        live.group.waiting.value += 1
        self._window.wait(live.tenant, live.due, now)

    def _stepped(self, event: Stepped, now: float) -> None:
        if now >= self._told_at + 1.0:
            self._told_at = now
            self._jain.value = self._window.index()

    def _turned_away(self, event: TurnedAway, now: float) -> None:
        self._refusals.of(event.service_class, event.reason).value += 1
        self._judge(event.service_class, "all", False, now)

    def _finished(self, event: Finished, now: float) -> None:
        live = self._live.pop(event.request_id, None)
        if live is None:
            return
        if live.running:
            live.group.running.value -= 1
        else:
            live.group.waiting.value -= 1
            self._window.wait(live.tenant, -live.due, now)
        if event.reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._answer_tokens += (event.output_tokens - self._answer_tokens) / MEMORY
        for slo, good in _verdicts(event, live, now).items():
            self._judge(live.name, slo, good, now)

    def _judge(self, service_class: str, slo: str, good: bool, now: float) -> None:
        (self._attained if good else self._missed).of(service_class, slo).value += 1
        if slo == "all":
            group = self._class(service_class)
            group.share_cell.value = group.share.count(good, now)


def _verdicts(event: Finished, live: _Live, now: float) -> dict[str, bool]:
    """Which bounds a request kept, and whether it kept ``all``; nothing of what cannot be said."""
    whole = event.reason in (FinishReason.STOP, FinishReason.LENGTH)
    given_up = event.reason is FinishReason.CANCELLED
    first = now if live.first is None else live.first
    verdicts = {}
    if (bound := live.slo.ttft_seconds) is not None:
        began = whole or live.first is not None
        inside = first - live.arrived <= bound
        if began or not given_up or not inside:
            verdicts["ttft"] = began and inside
    if (bound := live.slo.tpot_seconds) is not None and not given_up:
        pace = (live.last - first) / max(1, event.output_tokens - 1)
        verdicts["tpot"] = whole and pace <= bound
    kept = all(verdicts.values())
    if not given_up:
        verdicts["all"] = whole and kept
    elif not kept:
        verdicts["all"] = False
    return verdicts
