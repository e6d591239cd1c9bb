"""What the tuner has seen: the requests of the present period, as jobs to evaluate, and what was measured in it."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle
from statistics import fmean
from typing import Any, NamedTuple

from headrace.core.events import Admitted, Arrived, Chunked, Emitted, EngineLost, Event, Finished, Stepped
from headrace.tuning.measures import WindowMeter


class Job(NamedTuple):
    """A request of a period: ``prompt`` tokens are to be computed after ``context`` known ones, ``output`` to be
    generated. One that has its first token already has ``prompt`` 0. One that was open when the period began had
    ``waited`` so many seconds before.
    """

    arrived: float
    prompt: int
    context: int
    output: int
    waited: float = 0.0


class Period(NamedTuple):
    """What happened between two times: jobs by arrival; those that were open at the beginning arrive then."""

    began: float
    ended: float
    jobs: Sequence[Job]

    @property
    def load(self) -> float:
        """Tokens per second of the jobs that arrived, prompts and outputs."""
        tokens = sum(job.prompt + job.output for job in self.jobs if job.arrived > self.began)
        return tokens / (self.ended - self.began)


class Outcome(NamedTuple):
    """How an evaluation went.

    A measurement of the period shows ``seconds_per_token``, the time that requests are open, per token,
    ``period_ttft_p99`` and ``period_itl_p99``; it takes ``period_steps`` steps. The others are of the same work for all
    knobs, until the last job has ended, so they compare these: ``open_seconds``, ``ttft_p99`` and ``itl_p99``. Tails
    are 0 where there is none.
    """

    seconds_per_token: float
    period_ttft_p99: float
    period_itl_p99: float
    period_steps: int
    open_seconds: float
    ttft_p99: float
    itl_p99: float


class _Live:
    """A request that is open, or ended within the period.

    ``known`` positions of the prompt are cached or computed; ``done`` were when the period began, and ``before`` tokens
    had been generated. ``began`` is when it arrived, or when the period began if that was later.
    """

    __slots__ = ("arrived", "before", "began", "done", "ended", "known", "prompt", "tokens")

    def __init__(self, arrived: float, prompt: int) -> None:
        self.arrived, self.began, self.prompt = arrived, arrived, prompt
        self.known = self.done = self.tokens = self.before = 0
        self.ended = False


class Watched(NamedTuple):
    """A period, the metrics that were measured in it by name, and what is left of its requests at its end."""

    period: Period
    measured: Mapping[str, float]
    left: Sequence[Job]


class History:
    """A fold over events. It follows all open requests; `open` begins a period, `close` ends it.

    A period that had to wait for an engine in place of a lost one has no measurement of the settings.
    """

    def __init__(self) -> None:
        self._meter = WindowMeter()
        self._live: dict[str, _Live] = {}
        self._period: list[_Live] = []
        self._began: float | None = None
        self._lost = False  # no step since the engine was lost
        self._disturbed = False  # the engine was lost in this period, or had not run again when it began
        self._folds: Mapping[type, Callable[[Any, float], None]] = {
            Arrived: self._arrived,
            Admitted: self._admitted,
            Chunked: self._chunked,
            Emitted: self._emitted,
            Finished: self._finished,
            EngineLost: self._engine_lost,
            Stepped: self._stepped,
        }

    def fold(self, event: Event, now: float) -> None:
        """Count one event."""
        self._meter.fold(event, now)
        fold = self._folds.get(type(event))
        if fold is not None:
            fold(event, now)

    def open(self, now: float) -> None:
        """Begin a period with the requests that are open; one that was open already is dropped."""
        self._meter.open(now)
        self._began = now
        self._disturbed = self._lost
        self._period = list(self._live.values())
        for each in self._period:
            each.began, each.done, each.before = now, each.known, each.tokens

    def close(self, now: float) -> Watched | None:
        """End the period; None if no request of it has generated a token, or the engine was lost."""
        began, self._began = self._began, None
        measured, _ = self._meter.close(now)
        if began is None or self._disturbed:
            return None
        ended = [each for each in self._period if each.ended and each.tokens > each.before]
        if not ended:
            return None
        # how long the open requests will become is not known: as long as those that ended
        lengths = cycle([each.tokens for each in ended])
        jobs, left = [], []
        for each in self._period:
            if each.ended and each.tokens > each.before:
                jobs.append(_job(each, each.tokens))
            elif not each.ended:
                length = max(each.tokens + 1, next(lengths))
                jobs.append(_job(each, length))
                left.append(_left(each, length, now))
        return Watched(Period(began, now, jobs), measured, left)

    def _arrived(self, event: Arrived, now: float) -> None:
        live = self._live[event.request_id] = _Live(now, event.prompt_tokens)
        if self._began is not None:
            self._period.append(live)

    def _admitted(self, event: Admitted, now: float) -> None:
        live = self._live.get(event.request_id)
        if live is not None and not live.tokens:
            live.known = event.cached_tokens
            # Cached before the period or not: it is not computed.
            live.done = max(live.done, event.cached_tokens)

    def _chunked(self, event: Chunked, now: float) -> None:
        live = self._live.get(event.request_id)
        if live is not None and not live.tokens:
            live.known = event.start + event.length

    def _emitted(self, event: Emitted, now: float) -> None:
        live = self._live.get(event.request_id)
        if live is not None:
            live.tokens += len(event.tokens)

    def _finished(self, event: Finished, now: float) -> None:
        live = self._live.pop(event.request_id, None)
        if live is not None:
            live.ended = True

    def _engine_lost(self, event: EngineLost, now: float) -> None:
        self._lost = self._disturbed = True

    def _stepped(self, event: Stepped, now: float) -> None:
        self._lost = False


def _job(live: _Live, length: int) -> Job:
    """What is left of a request at the beginning of the period, if it generates ``length`` tokens in all."""
    if live.before:
        return Job(live.began, 0, live.prompt + live.before, length - live.before)
    return Job(
        live.began, max(1, live.prompt - live.done), live.done, length, waited=live.began - live.arrived
    )


def _left(live: _Live, length: int, now: float) -> Job:
    """What is left of it ``now``."""
    if live.tokens:
        return Job(now, 0, live.prompt + live.tokens, length - live.tokens)
    return Job(now, max(1, live.prompt - live.known), live.known, length, waited=now - live.arrived)


PERIODS = 5  # see docs/decisions/tuning.md#length-and-state-of-a-rehearsal
"""Scenes whose requests are repeated, and the length of a forecast in periods."""

PRESENT_PERIODS = 2
"""Scenes whose mean is the present load."""

MEMORY_SECONDS = 3600.0
"""How long loads are remembered."""

LATER = 1.3
"""How many times the present load may come in any case."""


class Forecast(NamedTuple):
    """The same requests at the present load, and at a higher one."""

    now: Period
    later: Period


class Forecaster:
    """Remembers the last periods; ``period_seconds`` is how long they last."""

    def __init__(self, period_seconds: float) -> None:
        self._seconds = period_seconds
        self._periods: deque[Period] = deque(maxlen=PERIODS)
        self._loads: deque[float] = deque(maxlen=max(PRESENT_PERIODS, round(MEMORY_SECONDS / period_seconds)))

    def add(self, period: Period) -> None:
        """A period has ended; one without arrivals tells nothing."""
        if period.load:
            self._periods.append(period)
            self._loads.append(period.load)

    @property
    def ready(self) -> bool:
        """Whether enough periods are known."""
        return len(self._loads) >= PRESENT_PERIODS

    def forecast(self, left: Sequence[Job], periods: int) -> Forecast:
        """The next so many periods, with what is ``left`` of open requests; `ready` must be true."""
        means = list(_means(self._loads))
        present, jump = means[-1], _largest_jump(means)
        later = max(LATER * present, min(max(means), jump * present))
        seconds = periods * self._seconds
        last = list(self._periods)[-periods:]
        return Forecast(*(_again(last, left, load, seconds) for load in (present, later)))


def _again(periods: Sequence[Period], left: Sequence[Job], load: float, seconds: float) -> Period:
    """The requests of these periods, repeated, each period at this ``load``; what is ``left`` is open before."""
    began = now = periods[-1].ended
    jobs = [job._replace(arrived=began) for job in left]
    for period in itertools.cycle(periods):
        if now >= began + seconds:
            break
        slower = period.load / load
        jobs += [
            job._replace(arrived=now + slower * (job.arrived - period.began))
            for job in period.jobs
            if job.arrived > period.began
        ]
        now += slower * (period.ended - period.began)
    return Period(began, now, jobs)


def _means(loads: Sequence[float]) -> Iterator[float]:
    """The mean of each `PRESENT_PERIODS` loads in a row."""
    values = list(loads)
    for at in range(len(values) - PRESENT_PERIODS + 1):
        yield fmean(values[at : at + PRESENT_PERIODS])


def _largest_jump(means: Sequence[float]) -> float:
    """The largest factor by which the load has risen or fallen from some periods to the next ones."""
    pairs = zip(means, means[PRESENT_PERIODS:], strict=False)
    return math.exp(max((abs(math.log(after / before)) for before, after in pairs), default=0.0))
