"""Writes computed responses to the caches, after they have been sent.

A write takes one or two milliseconds of the event loop. It therefore waits, for a limited time, until no request is
being answered, and responses are written one at a time. A request that needs a pending response has it written at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from headrace.response_cache.exact import ExactCache
from headrace.response_cache.partial import UnfinishedAnswer
from headrace.response_cache.ports import CacheListener
from headrace.response_cache.rules.entry import Entry, lifetime
from headrace.response_cache.single_flight import Computation

logger = logging.getLogger(__name__)

KEEP_SECONDS = 0.02  # see docs/decisions/caches.md#cost-of-a-miss
"""Minimum delay of a write, because the next request often follows at once. Writes to a store outside the process begin
without delay."""

PATIENCE_SECONDS = 0.2
"""Maximum delay of a write while requests are being answered."""

LOOK_SECONDS = 0.005
"""Interval of the checks whether requests are being answered."""

WRITE_SECONDS = 2.0
"""Time for the last writes when the server stops."""


class CacheWriter:
    """Writes complete responses to the exact cache.

    Args:
        exact: the exact cache.
        ttl: seconds until a response expires, unless its request sets another time.
        listeners: informed of what has been written.
        written: called for each computation with the key of its entry, or with None if it was not written.
        busy: whether a request is being answered.
    """

    def __init__(
        self,
        exact: ExactCache,
        ttl: float,
        listeners: Sequence[CacheListener],
        written: Callable[[Computation, bytes | None], None],
        busy: Callable[[], bool],
    ) -> None:
        self._exact = exact
        self._ttl = ttl
        self._listeners = tuple(listeners)
        self._written = written
        self._busy = busy
        self._waiting: dict[Computation, float] = {}  # with the time of their end, the oldest first
        self._worker: asyncio.Task[None] | None = None
        self._writing: set[asyncio.Task[None]] = set()

    def add(self, computation: Computation) -> None:
        """Write the response of a computation that has ended, soon."""
        if not self._exact.at_hand:
            self._begin(computation)
            return
        loop = asyncio.get_running_loop()
        self._waiting[computation] = loop.time()
        if self._worker is None or self._worker.done():
            self._worker = loop.create_task(self._work())

    def interrupt(self, computation: Computation) -> None:
        """Inform the listeners of a computation that has ended with an incomplete response."""
        left = UnfinishedAnswer(
            computation.tokens, computation.seconds, computation.versions, *self._life(computation)
        )
        self.tell(lambda listener: listener.interrupted(computation.query, left))

    async def catch_up(self, beginning: bytes) -> None:
        """Write at once the pending responses that a query with this ``beginning`` could get, or could resume."""
        wanted = [each for each in self._waiting if each.query.beginning == beginning]
        if wanted:
            for computation in wanted:
                self._begin(computation)
            await asyncio.sleep(0)

    def tell(self, tell: Callable[[CacheListener], None]) -> None:
        """Inform all listeners. If one fails, no request is affected."""
        for listener in self._listeners:
            try:
                tell(listener)
            except Exception:
                logger.exception("%s failed to process a response", type(listener).__name__)

    async def finish(self) -> None:
        """Write everything that waits, and wait until it is written."""
        if self._worker is not None:
            self._worker.cancel()
            self._worker = None
        for computation in tuple(self._waiting):
            self._begin(computation)
        if self._writing:
            await asyncio.wait(self._writing, timeout=WRITE_SECONDS)

    async def _work(self) -> None:
        await asyncio.sleep(KEEP_SECONDS)
        clock = asyncio.get_running_loop().time
        while self._waiting:
            oldest, since = next(iter(self._waiting.items()))
            if self._busy() and clock() < since + PATIENCE_SECONDS:
                await asyncio.sleep(LOOK_SECONDS)
            else:
                await asyncio.wait([self._begin(oldest)])

    def _begin(self, computation: Computation) -> asyncio.Task[None]:
        self._waiting.pop(computation, None)
        task = asyncio.get_running_loop().create_task(self._keep(computation))
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)
        return task

    async def _keep(self, computation: Computation) -> None:
        key = None
        try:
            entry = self._entry(computation)
            key = await self._exact.keep(computation.query, entry)
        finally:
            self._written(computation, key)
        if key is not None:
            self.tell(
                lambda listener: listener.stored(computation.query, entry)
            )  # after writing, because they may look it up

    def _entry(self, computation: Computation) -> Entry:
        query, finished = computation.query, computation.end
        assert finished is not None
        created, expires = self._life(computation)
        return Entry(
            tokens=computation.tokens,
            reason=finished.reason,
            prompt_tokens=len(query.request.tokens),
            seconds=computation.seconds,
            created=created,
            expires=expires,
            stale_until=expires + query.control.stale_while_revalidate,
            logprobs=computation.logprobs,
            stop_token=finished.stop_token,
            pulses=computation.pulses,
            versions=computation.versions,
        )

    def _life(self, computation: Computation) -> tuple[float, float]:
        """Creation and expiry of a response. A resumed one is as old as its beginning, and expires no later."""
        query, now = computation.query, self._exact.wall()
        expires = now + lifetime(self._ttl if query.control.ttl is None else query.control.ttl, query.key)
        if computation.resumed is None:
            return now, expires
        return computation.resumed.created, min(computation.resumed.expires, expires)
