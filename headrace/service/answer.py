"""The queue of one call's events: written at each engine step, read in batches.

`service.service` and the response caches write into an `Answer`; `api.compile.call` reads it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from headrace.core.events import Emitted, Finished, PromptScored, Verified
from headrace.core.request import Request
from headrace.core.tenancy.tenants import is_awaited

# How many tokens of a stream share one event, so that writing events leaves the processor to the rest of the
# server.
#
# An event costs the same time whatever it holds. With hundreds of streams, writing an event for each token
# takes a core. On one interpreter the engine then waits for the event loop at each step. So streams gather
# more tokens while writing takes more than a share of the time, and fewer when it takes less again.

BESIDE_ENGINE = 0.2  # see docs/decisions/api.md#tokens-that-share-an-event-under-load
"""Share of the time that writing streams may take while the engine runs in the same process."""

ALONE = 0.7
"""The same while the engine has its own process: the loop needs the rest for new requests."""

MOST_TOKENS = 16
"""Most tokens that are gathered because of the load."""

WINDOW_SECONDS = 0.25
"""How often the number of tokens is decided."""


class StreamPace:
    """Decides the ``tokens`` that a stream gathers at least before an event is written.

    The event loop calls `begin` before it wakes the readers of a step, and `end` when they have written. ``share`` is
    the part of the time that this may take, ``clock`` the time, ``used`` the CPU time of the event loop's thread.
    """

    def __init__(
        self,
        share: float,
        clock: Callable[[], float] = time.monotonic,
        used: Callable[[], float] = time.thread_time,
    ) -> None:
        self.tokens = 1
        self._share = share
        self._clock = clock
        self._used = used
        self._window = clock()
        self._written = 0.0  # CPU seconds in this window
        self._steps = 0  # that have begun
        self._began = 0.0

    def begin(self) -> None:
        """The readers of a step are about to be woken. The next step may begin before this one's `end`."""
        if not self._steps:
            self._began = self._used()
        self._steps += 1

    def end(self) -> None:
        """The events of a step are written."""
        used = self._used()
        self._written += used - self._began
        self._began = used
        self._steps -= 1
        seconds = self._clock() - self._window
        if seconds < WINDOW_SECONDS:
            return
        # One event for each token would take so many times as long.
        wanted = math.ceil(self.tokens * self._written / seconds / self._share)
        self.tokens = min(MOST_TOKENS, max(1, wanted, self.tokens // 2))
        self._window += seconds
        self._written = 0.0


NOT_BEGUN = 1 << 62
"""Gathered tokens of a sequence without any: so many that the first token is enough."""

IndexedEvent = tuple[int, Emitted | PromptScored | Finished]
"""An event of one call, with the index of the sequence that it belongs to."""


class Predicted(NamedTuple):
    """Numbers of accepted and rejected tokens of the client's prediction."""

    accepted: int = 0
    rejected: int = 0

    def plus(self, event: Verified) -> Predicted:
        """The numbers with one more verified draft."""
        return Predicted(self.accepted + event.accepted, self.rejected + event.drafted - event.accepted)


class Listener(Protocol):
    """Receives the events of ``requests``, each with the index of the request that it belongs to."""

    requests: tuple[Request, ...]
    cached_tokens: list[int]
    predicted: list[Predicted]

    @property
    def each_step(self) -> bool:
        """Whether the listener needs the events of every step, or only the last one."""
        ...

    def tell(self, index: int, event: Emitted | PromptScored | Finished) -> None: ...


class Reader(Protocol):
    """Reads an answer without a task that waits for it."""

    def wake(self) -> None:
        """A read is due. Called once until the next `Answer.take`."""
        ...


class Route:
    """The listener of one request (None after it was withdrawn); ``begun``: its first token has arrived."""

    __slots__ = ("begun", "index", "listener", "prompt_tokens", "queued", "urgent")

    def __init__(self, listener: Listener, index: int, request: Request) -> None:
        self.listener: Listener | None = listener
        self.index = index
        self.prompt_tokens = len(request.tokens)
        self.urgent = is_awaited(request.service_class)
        self.queued = True
        self.begun = False


class Answer:
    """The unread events of the sequences of one call.

    There is one reader. It is woken after the first token of a sequence, after ``interval`` more tokens, and at the end
    of a sequence, and then reads everything. With an interval of 0 it is woken only when the last sequence has ended.
    With a ``pace``, the interval is at least what the pace says now.
    ``cached_tokens`` are the prompt tokens of each sequence that were found in the prefix cache, ``predicted`` the
    accepted and rejected tokens of the client's predictions.
    ``timer`` ends the call at its deadline. ``note`` is the value of the ``X-Headrace-Cache`` header;
    empty without a response cache. ``first_token_at`` is the time of the first token, on the monotonic clock.
    """

    __slots__ = (
        *("requests", "cached_tokens", "predicted", "timer", "note", "each_step", "first_token_at"),
        *("_interval", "_pace", "_open", "_gathered", "_due", "_unread", "_waiting", "_reader"),
        "__weakref__",
    )

    def __init__(self, requests: Sequence[Request], interval: int, pace: StreamPace | None = None) -> None:
        self.requests = tuple(requests)
        self.cached_tokens = [0] * len(self.requests)
        self.predicted = [Predicted()] * len(self.requests)
        self.timer: asyncio.TimerHandle | None = None
        self.note = ""
        self.each_step = interval > 0
        self.first_token_at: float | None = None
        self._interval = interval
        self._pace = pace
        self._open = len(self.requests)
        self._gathered = [NOT_BEGUN] * self._open  # tokens of each sequence since the last read was due
        self._due = False
        self._unread: list[IndexedEvent] = []
        self._waiting: asyncio.Future[None] | None = None
        self._reader: Reader | None = None

    @property
    def settled(self) -> bool:
        """Whether every event has arrived, read or not."""
        return not self._open

    @property
    def exhausted(self) -> bool:
        """Whether every event has arrived and has been read."""
        return not self._open and not self._unread

    async def read(self) -> list[IndexedEvent]:
        """Wait until a read is due; return the events since the last read, in order. Empty after the last event."""
        await self.due()
        return self.take()

    def take(self) -> list[IndexedEvent]:
        """Return the events since the last read, in order, whether a read is due or not."""
        self._due = False
        unread, self._unread = self._unread, []
        return unread

    def wakes(self, reader: Reader | None) -> None:
        """Wake ``reader`` when a read is due, in place of one that waits for `due`; None: no longer."""
        self._reader = reader
        if reader is not None and (self._due or not self._open):
            reader.wake()

    async def due(self) -> None:
        """Wait until a read is due. Only the reader may call it."""
        if self._open and not self._due:
            self._waiting = asyncio.get_running_loop().create_future()
            try:
                await self._waiting
            finally:
                self._waiting = None

    def tell(self, index: int, event: Emitted | PromptScored | Finished) -> None:
        """Add one event, and wake the reader if a read is due."""
        self._unread.append((index, event))
        if type(event) is Emitted:
            if self.first_token_at is None:
                self.first_token_at = time.monotonic()
            if not self.each_step:
                return
            interval, pace = self._interval, self._pace
            if pace is not None and pace.tokens > interval:
                interval = pace.tokens
            due = interval == 1 or self._gather(index, len(event.tokens), interval)
        elif type(event) is Finished:
            self._open -= 1
            due = self.each_step or not self._open
        else:
            due = False
        if due and not self._due:
            self._due = True
            if self._reader is not None:
                self._reader.wake()
            elif self._waiting is not None and not self._waiting.done():
                self._waiting.set_result(None)

    def _gather(self, index: int, tokens: int, interval: int) -> bool:
        """Count tokens of a sequence; returns whether they are enough for a read."""
        gathered = self._gathered
        gathered[index] += tokens
        if gathered[index] < interval:
            return False
        gathered[index] = 0
        if len(gathered) > 1:
            self._gathered = [count if count >= NOT_BEGUN else 0 for count in gathered]
        return True
