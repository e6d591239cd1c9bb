"""Between the sockets and the engine: what may enter, whose event it is, and when it is given up.

Lives on one asyncio loop. It asks `core.tenancy.gate` before anything is queued, hands requests to the engine's
thread, and carries each step's events back in one hop. It must not know HTTP, text or wire formats; watchers
(metrics, the book of requests) are folded here, so that counting never costs the engine's thread a step.
What comes here must be computed: `serve.cache.lookup` has looked for an answer before.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

from headrace.core.events import AdmitReason, Admitted, Emitted, Event, Finished, PromptScored, TurnedAway
from headrace.core.ports import Watcher
from headrace.core.request import FinishReason, InvalidParameter, Request
from headrace.core.tenancy.classes import is_awaited
from headrace.core.tenancy.gate import Limits, Load, Reject, decide
from headrace.core.tenancy.quota import Limit, Room
from headrace.serve.quota_meter import QuotaMeter
from headrace.serve.thread import EngineThread, Progress, StepInterrupt, Steps

logger = logging.getLogger(__name__)

STALL_SECONDS = 60.0
"""Work that waits this long without one finished step means that the engine hangs."""

RATE_SECONDS = 10.0
"""How far back the rate of admissions looks, which tells a refused caller when to come again."""

HANDOVER_SECONDS = 0.002
"""How long the engine's thread may rest after a first token, so that it is written before the next step begins."""

HANDOVER_REQUESTS = 4
"""Beside more open requests than these, the background's apart, it does not: there a first token waits for its turn,
and rests would add up."""

EXPECT_SECONDS = 0.01
"""How long the background may rest for a call that is being read: reading takes a millisecond, or a few."""

NOTE_SECONDS = 0.02
"""How long it may take until what happened outside the engine is counted."""

Told = tuple[int, Emitted | PromptScored | Finished]
"""An event of one call, with the index of the call's sequence that it is about."""


ResultT = TypeVar("ResultT")


class Listener(Protocol):
    """Hears what becomes of ``requests``; events come with the index of the request that they are about."""

    requests: tuple[Request, ...]
    cached_tokens: list[int]

    @property
    def each_step(self) -> bool:
        """Whether somebody wants to hear of every step, and not of the end alone."""
        ...

    def tell(self, index: int, event: Emitted | PromptScored | Finished) -> None: ...


class Refused(Exception):
    """The gate is shut to this call; `verdict` says why and when to come again, `rooms` how its tenant's limits are."""

    def __init__(self, verdict: Reject, rooms: Mapping[Limit, Room]) -> None:
        super().__init__(verdict.message)
        self.verdict = verdict
        self.rooms = rooms


class Health(NamedTuple):
    """Whether steps progress while work is pending (``well``), and whether new calls are taken (``ready``)."""

    well: bool
    ready: bool
    why: str
    progress: Progress


class Answer:
    """What the sequences of one call have said and nobody has read yet.

    One reader. However many steps passed since it last looked, it is woken once and reads all of it: when a sequence
    has its first token, ``interval`` more since anything was due, or its end; with an interval of 0 only when the
    last sequence has ended. ``cached_tokens`` says of each sequence how many tokens of its prompt were computed before,
    ``timer`` ends the call at its deadline. ``note`` says how a response cache took part; empty where there is none.
    """

    def __init__(self, requests: Sequence[Request], interval: int) -> None:
        self.requests = tuple(requests)
        self.cached_tokens = [0] * len(self.requests)
        self.timer: asyncio.TimerHandle | None = None
        self.note = ""
        self.each_step = interval > 0
        self._interval = interval
        self._open = len(self.requests)
        # Tokens of each sequence since the reader was last to be woken; its first one is enough.
        self._gathered = [interval] * self._open
        self._due = False
        self._told: list[Told] = []
        self._reader: asyncio.Future[None] | None = None

    @property
    def settled(self) -> bool:
        """Whether all has been said, read or not."""
        return not self._open

    @property
    def exhausted(self) -> bool:
        """Whether all has been said and read."""
        return not self._open and not self._told

    async def read(self) -> list[Told]:
        """Events since the last read, in order; waits until it is time. Empty when all has been read to the end."""
        if self._open and not self._due:
            self._reader = asyncio.get_running_loop().create_future()
            try:
                await self._reader
            finally:
                self._reader = None
        self._due = False
        told, self._told = self._told, []
        return told

    def tell(self, index: int, event: Emitted | PromptScored | Finished) -> None:
        """Add one event and wake the reader where it is time."""
        self._told.append((index, event))
        if type(event) is Finished:
            self._open -= 1
            self._due = self._due or self.each_step or not self._open
        elif type(event) is Emitted and self.each_step:
            self._gathered[index] += len(event.tokens)
            if self._gathered[index] >= self._interval:
                self._gathered[index] = 0
                self._gathered = [count if count >= self._interval else 0 for count in self._gathered]
                self._due = True
        if self._due and self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class _Rate:
    """Events per second, the older the less they count."""

    def __init__(self) -> None:
        self._value = 0.0
        self._at = 0.0

    def count(self, now: float) -> None:
        self._value = self.value(now) + 1.0 / RATE_SECONDS
        self._at = now

    def value(self, now: float) -> float:
        return self._value * math.exp((self._at - now) / RATE_SECONDS)


class _Route:
    """Where the events of one request go; ``listener`` is None once nobody listens, ``begun`` says that tokens have."""

    __slots__ = ("begun", "index", "listener", "prompt_tokens", "queued", "urgent")

    def __init__(self, listener: Listener, index: int, request: Request) -> None:
        self.listener: Listener | None = listener
        self.index = index
        self.prompt_tokens = len(request.tokens)
        self.urgent = is_awaited(request.service_class)
        self.queued = True
        self.begun = False


class Service:
    """Takes calls on the running loop and answers them from the engine's events.

    ``limits`` bound what may wait, ``meter`` counts against the tenants' own, ``request_timeout`` (seconds) ends any
    call, ``bell`` breaks off what the engine does for nobody.
    """

    def __init__(
        self,
        engine: Steps,
        limits: Limits,
        watchers: Sequence[Watcher] = (),
        meter: QuotaMeter | None = None,
        request_timeout: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
        stall_seconds: float = STALL_SECONDS,
        bell: StepInterrupt | None = None,
    ) -> None:
        self.now = clock
        self.draining = False
        self._limits = limits
        self.meter = meter or QuotaMeter()
        self._request_timeout = request_timeout
        self._watchers = tuple(watchers)
        self._deaf_to_tokens: tuple[Watcher, ...] = (self.meter,)
        self._stall_seconds = stall_seconds
        self._routes: dict[str, _Route] = {}
        self._queued_requests = 0
        self._queued_tokens = 0
        self._urgent = 0  # open requests that are no background's
        self._admissions = _Rate()
        self._notes: list[tuple[Sequence[Event], float]] = []  # and when it happened
        self._idle = asyncio.Event()
        self._idle.set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.thread = EngineThread(engine, self._deliver, clock, bell)

    def watch(self, watcher: Watcher, tokens: bool = True) -> None:
        """Tell ``watcher`` of everything from now on, or of everything but tokens."""
        if tokens:
            self._watchers = (*self._watchers, watcher)
        else:
            self._deaf_to_tokens = (*self._deaf_to_tokens, watcher)

    def start(self) -> None:
        """Bind to the running loop and start the engine's thread."""
        self._loop = asyncio.get_running_loop()
        self.thread.start()

    def stop(self) -> bool:
        """End the engine's thread; calls that are still open hear nothing more. Whether it rests, and is sound."""
        self.count()
        return self.thread.stop() and not self.thread.progress().failure

    def open(self, requests: Sequence[Request], interval: int = 1) -> Answer:
        """Take the sequences of one call in, all or none; they are given up at the first one's deadline.

        Raises:
            Refused: the queue is full or the server drains.
            InvalidParameter: a request id that is in use.
        """
        answer = Answer(requests, interval)
        self.submit([answer])
        self.end_in_time(answer, self.close)
        return answer

    def submit(self, listeners: Sequence[Listener]) -> None:
        """Take in the requests of all ``listeners``, or none of them.

        Raises:
            Refused: the queue is full or the server drains.
            InvalidParameter: a request id that is in use.
        """
        requests = [request for listener in listeners for request in listener.requests]
        for request in requests:
            if request.id in self._routes:
                raise InvalidParameter("request_id", f"request_id {request.id!r} is already in use")
        prompt_tokens = sum(len(request.tokens) for request in requests)
        shortage = self.meter.shortage(requests, self.now()) if requests else None
        verdict = decide(self.load(), len(requests), prompt_tokens, self._limits, shortage)
        if isinstance(verdict, Reject):
            for r in requests:
                self.note(
                    TurnedAway(r.id, r.tenant, r.service_class, verdict.reason),
                    Finished(r.id, FinishReason.REJECTED, len(r.tokens), 0, 0, verdict.message),
                )
            rooms = self.meter.rooms(requests[0].tenant, self.now()) if requests else {}
            raise Refused(verdict, rooms)
        if requests:
            self.meter.enter(requests, self.now())
        for listener in listeners:
            for index, request in enumerate(listener.requests):
                route = self._routes[request.id] = _Route(listener, index, request)
                self._urgent += route.urgent
                self._queued_requests += 1
                self._queued_tokens += len(request.tokens)
                self.thread.submit(request)
        if requests:
            self._idle.clear()

    def expect(self) -> None:
        """A call is being read. Until it is here, no step begins of which only the background would have something: it
        would wait for the step's end, and be read more slowly beside it."""
        self.thread.expect(EXPECT_SECONDS)

    def end_in_time(self, answer: Answer, close: Callable[[Answer, FinishReason], None]) -> None:
        """Have ``close`` called at the deadline of the answer's first request, or when the server's patience ends.

        The engine knows the callers' own deadlines alone: what it foresees to miss one of these it need not begin,
        while an answer that the server may have to cut off is worth its beginning. Background work may wait for other
        requests as long as it must.
        """
        first = answer.requests[0]
        patience = self._request_timeout if is_awaited(first.service_class) else math.inf
        seconds = min(patience, math.inf if first.deadline is None else first.deadline - self.now())
        if seconds < math.inf:
            answer.timer = self._running_loop().call_later(seconds, close, answer, FinishReason.TIMEOUT)

    def close(self, answer: Answer, why: FinishReason = FinishReason.CANCELLED) -> None:
        """End what is still open of a call: its reader is told at once, the engine before its next step.

        Its callers must call it in the end, also when nothing is open any more.
        """
        if answer.timer is not None:
            answer.timer.cancel()
        self.withdraw(answer, why)

    def withdraw(self, listener: Listener, why: FinishReason) -> None:
        """End the requests of ``listener`` that are still open; it is told at once."""
        for request in listener.requests:
            route = self._routes.get(request.id)
            if route is not None and route.listener is listener:
                route.listener = None  # the engine's own Finished comes later, to nobody
                self.thread.cancel(request.id, why)
                listener.tell(route.index, Finished(request.id, why, len(request.tokens), 0, 0))

    def stop_sequence(self, answer: Answer, index: int) -> None:
        """A stop string ended one sequence; its `Finished` follows."""
        self.thread.cancel(answer.requests[index].id, FinishReason.STOP)

    def close_all(self) -> None:
        """End every open call; each reader is told."""
        open_routes = self._routes.values()
        for listener in {route.listener for route in open_routes if route.listener is not None}:
            self.withdraw(listener, FinishReason.CANCELLED)

    async def drain(self, timeout: float) -> bool:
        """Take nothing new and wait for the open calls; whether all ended within ``timeout`` seconds."""
        self.draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            return False
        return True

    async def between_steps(self, function: Callable[[], ResultT]) -> ResultT:
        """What ``function`` returns when it runs on the engine's thread, while no step is."""
        result: ResultT = await asyncio.wrap_future(self.thread.call(function))
        return result

    def load(self) -> Load:
        """What is queued now, and how fast the queue moves."""
        rate = self._admissions.value(self.now())
        return Load(self._queued_requests, self._queued_tokens, rate, self.draining)

    @property
    def awaited(self) -> bool:
        """Whether somebody waits for an answer, or his call is being read; the background's requests are nobody's."""
        return self._urgent > 0 or self.thread.expecting

    def open_requests(self) -> int:
        """Requests that the engine still holds, listened to or not."""
        return len(self._routes)

    def health(self) -> Health:
        """Whether the engine makes progress; a process that exists proves nothing."""
        progress = self.thread.progress()
        if progress.failure:
            why = "the engine failed"
        elif not progress.alive:
            why = "the engine's thread has ended"
        elif progress.stalled_seconds > self._stall_seconds:
            why = f"requests wait and no step has progressed for {progress.stalled_seconds:.0f} s"
        else:
            why = ""
        ready = not why and not self.draining
        return Health(not why, ready, why or ("draining" if self.draining else ""), progress)

    def _deliver(self, events: list[Event], now: float) -> None:
        """On the engine's thread: one hop onto the loop for all that a step told.

        An engine that begins its next step at once keeps the loop from writing what this one made: its kernels spin on
        every core there is. A first token lost up to a whole step so; therefore the engine rests for it.
        """
        loop = self._running_loop()
        written = threading.Event() if self._begins(events) else None
        try:
            loop.call_soon_threadsafe(self._take, events, now, written)
        except RuntimeError:  # the loop is closed: nobody is left to listen
            if not loop.is_closed():
                raise
            return
        if written is not None:
            written.wait(HANDOVER_SECONDS)

    def _begins(self, events: list[Event]) -> bool:
        """Whether somebody waits for the first of these events' tokens, and few others would wait with him."""
        if self._urgent > HANDOVER_REQUESTS:
            return False
        for event in events:
            route = self._routes.get(event.request_id) if type(event) is Emitted else None
            if route is None or route.begun or route.listener is None:
                continue
            if route.listener.each_step:
                return True
        return False

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            raise RuntimeError("the service has not been started")
        return self._loop

    def _take(self, events: list[Event], now: float, written: threading.Event | None) -> None:
        for event in events:
            match event:
                case Emitted() | PromptScored():
                    route = self._routes.get(event.request_id)
                    if route is not None and route.listener is not None:
                        route.begun = True
                        route.listener.tell(route.index, event)
                case Admitted(reason=AdmitReason.NEW):
                    self._admissions.count(now)
                    route = self._routes.get(event.request_id)
                    if route is not None:
                        self._unqueue(route)
                        if route.listener is not None:
                            # What an answer is known to begin with is found behind its prompt, and is none of it.
                            cached = min(event.cached_tokens, route.prompt_tokens)
                            route.listener.cached_tokens[route.index] = cached
                case Finished():
                    route = self._routes.pop(event.request_id, None)
                    if route is not None:
                        self._urgent -= route.urgent
                        self._unqueue(route)
                        if route.listener is not None:
                            route.listener.tell(route.index, event)
        if not self._routes:
            self._idle.set()
        # Behind the readers who were woken, who write in the loop's next turn.
        self._running_loop().call_soon(self._written, events, now, written)

    def _written(self, events: list[Event], now: float, written: threading.Event | None) -> None:
        """What the step made has been written. Last comes counting, a turn later, since the loop sends at a turn's end
        what was written in it: counting must delay no answer, and one that raises cost none."""
        if written is not None:
            written.set()
        self._running_loop().call_soon(self._fold, events, now)

    def note(self, *events: Event) -> None:
        """Tell the watchers of what happened outside the engine, within `NOTE_SECONDS`.

        Not at once: it comes from calls whose answers are about to be written, or whose step is about to begin, and
        the engine wants the interpreter too.
        """
        if not self._notes:
            self._running_loop().call_later(NOTE_SECONDS, self.count)
        self._notes.append((events, self.now()))

    def count(self) -> None:
        """Tell the watchers now of all that has been noted: for whoever wants to read their numbers."""
        notes, self._notes = self._notes, []
        for events, now in notes:
            try:
                self._fold(events, now)
            except Exception:
                logger.exception("a watcher failed on %s", events)

    def _fold(self, events: Sequence[Event], now: float) -> None:
        others = [event for event in events if type(event) is not Emitted]
        for watcher in self._deaf_to_tokens:
            for event in others:
                watcher.fold(event, now)
        for watcher in self._watchers:
            for event in events:
                watcher.fold(event, now)

    def _unqueue(self, route: _Route) -> None:
        if route.queued:
            route.queued = False
            self._queued_requests -= 1
            self._queued_tokens -= route.prompt_tokens
