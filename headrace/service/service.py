"""The layer between HTTP and the engine: admits requests, routes their events back, and ends them at their deadline.

It runs on one asyncio loop. `core.tenancy.gate` decides whether a request is queued. The service submits requests to
the engine thread, and routes the events of each step to their listeners. Watchers (metrics, request log) are called
here, so that they never delay the engine thread. Response caches come before it: `response_cache.lookup` submits only
what must be computed.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple, TypeVar

from headrace.core.drafting.prediction import PredictionProposer
from headrace.core.events import (
    AdmitReason,
    Admitted,
    Emitted,
    Event,
    Finished,
    PromptScored,
    TurnedAway,
    Verified,
)
from headrace.core.ports import Watcher
from headrace.core.request import FinishReason, InvalidParameter, Request
from headrace.core.tenancy.gate import Limits, Load, Reject, decide
from headrace.core.tenancy.quota import Limit, Room
from headrace.core.tenancy.tenants import is_awaited
from headrace.service.answer import ALONE, BESIDE_ENGINE, Answer, Listener, Route, StreamPace
from headrace.service.engine_process import EngineProcess, Mailbox
from headrace.service.quota_meter import QuotaMeter
from headrace.service.thread import EngineThread, Progress, StepInterrupt, Steps

# Takes calls of many prompts in without holding up the event loop: one piece of a few milliseconds at a time.

PIECE_SECONDS = 0.005  # see docs/decisions/security.md#limit-of-parts-in-a-body


class Intake:
    """The turns of all calls of one event loop."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    def pieces(self) -> Pieces:
        """The pieces of one call, whose first one begins now."""
        return Pieces(self._lock)


class Pieces:
    """The pieces of one call."""

    def __init__(self, lock: asyncio.Lock) -> None:
        self._lock = lock
        self._ends = time.perf_counter() + PIECE_SECONDS

    async def turn(self) -> None:
        """Between two small parts of the work: let others run if this piece has been long enough."""
        if time.perf_counter() < self._ends:
            return
        async with self._lock:
            await asyncio.sleep(0)
        self._ends = time.perf_counter() + PIECE_SECONDS


# The rate of admissions, exponentially averaged; `Retry-After` is computed from it.

RATE_SECONDS = 10.0
"""Time constant of the average."""


class AdmissionRate:
    """Admissions per second."""

    def __init__(self) -> None:
        self._value = 0.0
        self._at = 0.0

    def count(self, now: float) -> None:
        """Count one admission."""
        self._value = self.value(now) + 1.0 / RATE_SECONDS
        self._at = now

    def value(self, now: float) -> float:
        """The rate at this time."""
        return self._value * math.exp((self._at - now) / RATE_SECONDS)


logger = logging.getLogger(__name__)

STALL_SECONDS = 60.0
"""If requests wait this long without a completed step, the engine counts as stalled."""

HANDOVER_SECONDS = 0.002  # see docs/decisions/scheduling.md#delivery-of-first-tokens
"""How long the engine thread pauses after a first token, so that it is sent before the next step begins."""

HANDOVER_REQUESTS = 4
"""With more open foreground requests than this, the engine thread does not pause: the pauses would add up."""

EXPECT_SECONDS = 0.01  # see docs/decisions/background-work.md#interrupted-background-steps
"""Maximum pause of background work for a call whose body is being read, which takes a few milliseconds."""

COUNT_SECONDS = 0.05  # see docs/decisions/api.md#watchers-of-several-steps
"""Longest delay until watchers receive an event, unless others keep them busy."""

COUNTED_AT_ONCE = 64
"""So many events are not delayed, and sent to watchers without a look at the clock, at about 10 µs each."""

ResultT = TypeVar("ResultT")


class Refused(Exception):
    """A call was rejected at admission. `verdict` has the reason and `Retry-After`, `rooms` the tenant's limits."""

    def __init__(self, verdict: Reject, rooms: Mapping[Limit, Room]) -> None:
        super().__init__(verdict.message)
        self.verdict = verdict
        self.rooms = rooms


class Health(NamedTuple):
    """``well``: steps make progress while requests wait. ``ready``: calls are accepted. ``why``: the reason, if not."""

    well: bool
    ready: bool
    why: str
    progress: Progress


class Service:
    """Accepts calls on the running loop and answers them from the events of the engine.

    ``engine`` runs on a thread of this process, or it is a process that was started before.
    ``limits`` bound the queue, ``meter`` counts usage against the tenants' quotas, ``request_timeout`` (seconds) ends
    any call, ``interrupt`` stops a step that contains only background work.
    """

    def __init__(
        self,
        engine: Steps | EngineProcess,
        limits: Limits,
        watchers: Sequence[Watcher] = (),
        meter: QuotaMeter | None = None,
        request_timeout: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
        stall_seconds: float = STALL_SECONDS,
        interrupt: StepInterrupt | None = None,
    ) -> None:
        self.now = clock
        self.draining = False
        self.paused = False
        """Whether new calls are rejected until an administrator resumes the server."""
        self.sleeping = False
        """Whether new calls are rejected because the model sleeps, or is about to: see `service.sleep`."""
        self.woken = -math.inf  # when the model last woke up
        self.empty = asyncio.Event()  # set while the engine holds no request
        self.empty.set()
        self._limits = limits
        self.meter = meter or QuotaMeter()
        self._request_timeout = request_timeout
        self._watchers: tuple[Watcher, ...] = (self.meter, *watchers)
        self._stall_seconds = stall_seconds
        self._routes: dict[str, Route] = {}
        self.finished_requests = 0
        self._queued_requests = 0
        self._queued_tokens = 0
        self._urgent = 0  # open foreground requests
        self._entered = 0  # open calls that are computed between steps
        self._admissions = AdmissionRate()
        self._counting: asyncio.Handle | None = None  # the next call of `_count_some`
        self._ended = False  # whether a request has ended since the last one
        # Not sent to watchers yet, with their time.
        self._unfolded: deque[tuple[Sequence[Event], float]] = deque()
        self._idle = asyncio.Event()
        self._idle.set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.thread: Mailbox
        if isinstance(engine, EngineProcess):
            engine.listen(self._take)
            self.thread = engine
            self.pace = StreamPace(ALONE)
        else:
            self.thread = EngineThread(engine, self._deliver, clock, interrupt)
            self.pace = StreamPace(BESIDE_ENGINE)

    def watch(self, watcher: Watcher) -> None:
        """Send all events from now on to ``watcher``, after those that watch already."""
        self.count()
        self._watchers = (*self._watchers, watcher)

    def unwatch(self, watcher: Watcher) -> None:
        """Send no more events to ``watcher``."""
        self.count()
        self._watchers = tuple(each for each in self._watchers if each is not watcher)

    def start(self) -> None:
        """Bind to the running loop and start the engine thread."""
        self._loop = asyncio.get_running_loop()
        self.thread.start()

    def stop(self) -> bool:
        """Stop the engine thread; open calls receive no more events. Returns whether it stopped without a failure."""
        self.count()
        return self.thread.stop() and not self.thread.progress().failure

    def open(self, requests: Sequence[Request], interval: int = 1, paced: bool = False) -> Answer:
        """`submit` the sequences of one call. They are cancelled at the deadline of the first one.

        ``paced``: under load, the reader is woken less often than ``interval`` says.
        """
        answer = Answer(requests, interval, self.pace if paced else None)
        self.submit([answer])
        self.end_in_time(answer, self.close)
        return answer

    def submit(self, listeners: Sequence[Listener]) -> None:
        """Submit the requests of all ``listeners``, or none of them.

        Raises:
            Refused: the queue is full or the server is draining.
            InvalidParameter: a request id is in use.
        """
        requests = [request for listener in listeners for request in listener.requests]
        self.check_new(requests)
        prompt_tokens = sum(len(request.tokens) for request in requests)
        shortage = self.meter.shortage(requests, self.now()) if requests else None
        verdict = decide(self.load(), len(requests), prompt_tokens, self._limits, shortage)
        if isinstance(verdict, Reject):
            for r in requests:
                self.note(
                    TurnedAway(r.id, r.tenant, r.service_class, verdict.reason, r.slo),
                    Finished(r.id, FinishReason.REJECTED, len(r.tokens), 0, 0, verdict.message),
                )
            rooms = self.meter.rooms(requests[0].tenant, self.now(), requests[0].model) if requests else {}
            raise Refused(verdict, rooms)
        if requests:
            self.meter.enter(requests, self.now())
        for listener in listeners:
            for index, request in enumerate(listener.requests):
                route = self._routes[request.id] = Route(listener, index, request)
                self._urgent += route.urgent
                self._queued_requests += 1
                self._queued_tokens += len(request.tokens)
                self.thread.submit(request)
        if requests:
            self._idle.clear()
            self.empty.clear()

    def check_new(self, requests: Iterable[Request]) -> None:
        """Raise `InvalidParameter` if an open request, of any tenant, has the id of one of these."""
        for request in requests:
            if request.id in self._routes:
                raise InvalidParameter("request_id", f"request_id {request.id!r:.200} is already in use")

    def expect(self) -> None:
        """Announce a call whose body is being read. Until it arrives, no step with only background work begins, because
        the call would have to wait for its end."""
        self.thread.expect(EXPECT_SECONDS)

    def end_in_time(self, answer: Answer, close: Callable[[Answer, FinishReason], None]) -> None:
        """Call ``close`` at the deadline of the first request, or after the server's request timeout.

        The engine knows only the deadlines that requests ask for. It does not start a request that will miss its
        deadline, but it does start one that the request timeout may end. Background work has no timeout, because it may
        have to wait long for other requests.
        """
        first = answer.requests[0]
        timeout = first.settings.request_timeout or self._request_timeout
        patience = timeout if is_awaited(first.service_class) else math.inf
        seconds = min(patience, math.inf if first.deadline is None else first.deadline - self.now())
        if seconds < math.inf:
            answer.timer = self._running_loop().call_later(seconds, close, answer, FinishReason.TIMEOUT)

    def close(self, answer: Answer, why: FinishReason = FinishReason.CANCELLED) -> None:
        """End the open sequences of a call: its reader is informed at once, the engine before its next step.

        Must be called once for each call, even if all its sequences have ended.
        """
        if answer.timer is not None:
            answer.timer.cancel()
        self.withdraw(answer, why)

    def withdraw(self, listener: Listener, why: FinishReason) -> None:
        """End the open requests of ``listener``; it receives `Finished` events at once."""
        for request in listener.requests:
            route = self._routes.get(request.id)
            if route is not None and route.listener is listener:
                route.listener = None  # the engine's own Finished comes later and is dropped
                self.thread.cancel(request.id, why)
                listener.tell(route.index, Finished(request.id, why, len(request.tokens), 0, 0))

    def stop_sequence(self, answer: Answer, index: int) -> None:
        """End one sequence at a stop string; its `Finished` event follows."""
        if (route := self._routes.get(answer.requests[index].id)) and route.listener is answer:
            self.thread.cancel(answer.requests[index].id, FinishReason.STOP)

    def close_all(self) -> None:
        """Cancel every open call; each reader is informed."""
        open_routes = self._routes.values()
        for listener in {route.listener for route in open_routes if route.listener is not None}:
            self.withdraw(listener, FinishReason.CANCELLED)

    async def drain(self, timeout: float) -> bool:
        """Reject new calls and wait for the open ones; returns whether all ended within ``timeout`` seconds."""
        self.draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            return False
        return True

    def enter(self) -> None:
        """Begin a call that the engine thread computes between steps; `drain` waits until it calls `leave`."""
        self._entered += 1
        self._idle.clear()

    def leave(self) -> None:
        """End a call that has called `enter`."""
        self._entered -= 1
        self._update_idle()

    def _update_idle(self) -> None:
        if not self._routes:
            self.empty.set()
            if not self._entered:
                self._idle.set()

    async def between_steps(self, function: Callable[[], ResultT], last: bool = False) -> ResultT:
        """Run ``function`` on the engine thread between two steps, and return its result; ``last``: after all requests
        that wait for the second step.
        """
        result: ResultT = await asyncio.wrap_future(self.thread.call(function, last))
        return result

    def load(self) -> Load:
        """The size of the queue and the rate of admissions."""
        rate = self._admissions.value(self.now())
        closed = self.draining, self.paused, self.sleeping
        return Load(self._queued_requests, self._queued_tokens, rate, *closed)

    @property
    def awaited(self) -> bool:
        """Whether a foreground request is open, or a call is being read."""
        return self._urgent > 0 or self.thread.expecting

    def open_requests(self) -> int:
        """Number of requests that the engine still holds, with or without a listener."""
        return len(self._routes)

    def health(self) -> Health:
        """Whether the engine makes progress and accepts new calls."""
        progress = self.thread.progress()
        stalled = 0.0 if self.sleeping else min(progress.stalled_seconds, self.now() - self.woken)
        progress = progress._replace(stalled_seconds=stalled)
        if progress.failure:
            why = "the engine failed"
        elif not progress.alive:
            why = "the engine thread has ended"
        elif progress.stalled_seconds > self._stall_seconds:
            why = f"requests wait and no step has progressed for {progress.stalled_seconds:.0f} s"
        else:
            why = ""
        states = ("draining", self.draining), ("paused", self.paused), ("sleeping", self.sleeping)
        closed = next((name for name, holds in states if holds), "")
        if progress.restarting:
            closed = f"the engine is being started again: {progress.restarting}"
        return Health(not why, not why and not closed, why or closed, progress)

    def _deliver(self, events: list[Event], now: float) -> None:
        """On the engine thread: pass all events of a step to the event loop; pause for it to send a first token.

        The kernels of the next step would occupy every core: first tokens were up to one step late.
        """
        loop = self._running_loop()
        written = threading.Event() if self._begins(events) else None
        try:
            loop.call_soon_threadsafe(self._take, events, now, written)
        except RuntimeError:  # the loop is closed: there is no listener
            if not loop.is_closed():
                raise
            return
        if written is not None:
            written.wait(HANDOVER_SECONDS)

    def _begins(self, events: list[Event]) -> bool:
        """Whether the events contain a first token of a streamed answer while few requests are open."""
        if self._urgent > HANDOVER_REQUESTS:
            return False
        for event in events:
            route = self._routes.get(event.request_id) if type(event) is Emitted else None
            # Read once, because the loop may withdraw the listener meanwhile.
            listener = None if route is None or route.begun else route.listener
            if listener is not None and listener.each_step:
                return True
        return False

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            raise RuntimeError("the service has not been started")
        return self._loop

    def _take(self, events: list[Event], now: float, written: threading.Event | None = None) -> None:
        self.pace.begin()
        for event in events:
            match event:
                case Emitted() | PromptScored():
                    route = self._routes.get(event.request_id)
                    if route is not None and route.listener is not None:
                        route.begun = True
                        route.listener.tell(route.index, event)
                case Verified(source=PredictionProposer.name):
                    route = self._routes.get(event.request_id)
                    if route is not None and route.listener is not None:
                        predicted = route.listener.predicted
                        predicted[route.index] = predicted[route.index].plus(event)
                case Admitted(reason=AdmitReason.NEW):
                    self._admissions.count(now)
                    route = self._routes.get(event.request_id)
                    if route is not None:
                        self._unqueue(route)
                        if route.listener is not None:
                            # The output tokens of a resumed answer may be cached too; they are not prompt tokens.
                            cached = min(event.cached_tokens, route.prompt_tokens)
                            route.listener.cached_tokens[route.index] = cached
                case Finished():
                    self._ended = True
                    route = self._routes.pop(event.request_id, None)
                    if route is not None:
                        self.finished_requests += 1
                        self._urgent -= route.urgent
                        self._unqueue(route)
                        if route.listener is not None:
                            route.listener.tell(route.index, event)
        self._update_idle()
        self._unfolded.append((events, now))
        # After the readers that were woken, which write in the next iteration of the loop.
        self._running_loop().call_soon(self._written, written)

    def _written(self, written: threading.Event | None) -> None:
        """End the engine thread's pause, and run watchers one loop iteration later: the loop sends at the end of an
        iteration, so a slow watcher delays no response, and one that raises breaks none."""
        if written is not None:
            written.set()
        self._running_loop().call_soon(self._sent)

    def _sent(self) -> None:
        """Run watchers if a request has ended, or for many events: see `_count_later`."""
        self.pace.end()
        if self._ended or sum([len(events) for events, _ in self._unfolded]) >= COUNTED_AT_ONCE:
            self._count_some()
        else:
            self._count_later()

    def _count_later(self) -> None:
        """Send events to the watchers within `COUNT_SECONDS`, those of several steps at once."""
        if self._counting is None:
            self._counting = self._running_loop().call_later(COUNT_SECONDS, self._count_some)

    def note(self, *events: Event) -> None:
        """Send events that happened outside the engine to the watchers soon; first the caller writes its response."""
        self._unfolded.append((events, self.now()))
        self._count_later()

    def count(self) -> None:
        """Send all events to the watchers now; also called before metrics or the cost of a request are read."""
        while self._unfolded:
            self._count_next()

    def _count_some(self) -> None:
        """As `count`, for `PIECE_SECONDS`, as a thousand requests may end together; the rest in later iterations."""
        if self._counting is not None:
            self._counting.cancel()
        ends = time.perf_counter() + PIECE_SECONDS
        while self._unfolded and time.perf_counter() < ends:
            self._count_next()
        self._ended = self._ended and bool(self._unfolded)
        self._counting = self._running_loop().call_soon(self._count_some) if self._unfolded else None

    def _count_next(self) -> None:
        """Send the oldest events, at most `COUNTED_AT_ONCE`, to the watchers."""
        events, now = self._unfolded.popleft()
        if len(events) > COUNTED_AT_ONCE:
            self._unfolded.appendleft((events[COUNTED_AT_ONCE:], now))
            events = events[:COUNTED_AT_ONCE]
        runs = [(kind, [*run]) for kind, run in groupby(events, type)]
        for watcher in self._watchers:
            _fold(watcher, runs, now)

    def _unqueue(self, route: Route) -> None:
        if route.queued:
            route.queued = False
            self._queued_requests -= 1
            self._queued_tokens -= route.prompt_tokens


def _fold(watcher: Watcher, runs: Iterable[tuple[type[Event], list[Event]]], now: float) -> None:
    """Send runs of events of one type to a watcher. If it raises, the other watchers still receive them."""
    try:
        each, fold_tokens = not hasattr(watcher, "fold_tokens"), getattr(watcher, "fold_tokens", None)
        for kind, run in runs:
            if each or kind is not Emitted:
                for event in run:
                    watcher.fold(event, now)
            elif fold_tokens is not None:
                fold_tokens(run, now)
    except Exception:
        logger.exception("a watcher failed on %s", runs)
