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
from headrace.response_cache.query import CacheQuery
from headrace.response_cache.rules.entry import Entry, lifetime
from headrace.response_cache.single_flight import SingleFlight

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
        keepers: informed of what has been written.
        written: called for each flight with the key of its entry, or with None if it was not written.
        busy: whether a request is being answered.
    """

    def __init__(
        self,
        exact: ExactCache,
        ttl: float,
        keepers: Sequence[CacheListener],
        written: Callable[[SingleFlight, bytes | None], None],
        busy: Callable[[], bool],
    ) -> None:
        self._exact = exact
        self._ttl = ttl
        self._keepers = tuple(keepers)
        self._written = written
        self._busy = busy
        self._waiting: dict[SingleFlight, float] = {}  # with the time of their end, the oldest first
        self._worker: asyncio.Task[None] | None = None
        self._writing: set[asyncio.Task[None]] = set()

    def add(self, flight: SingleFlight) -> None:
        """Write the response of a flight that has ended, soon."""
        if not self._exact.at_hand:
            self._begin(flight)
            return
        loop = asyncio.get_running_loop()
        self._waiting[flight] = loop.time()
        if self._worker is None or self._worker.done():
            self._worker = loop.create_task(self._work())

    def break_off(self, flight: SingleFlight) -> None:
        """Inform the keepers of a flight that has ended with an incomplete response."""
        left = UnfinishedAnswer(flight.tokens, flight.seconds, flight.versions, *self._life(flight))
        self.tell(lambda keeper: keeper.broken_off(flight.ask, left))

    async def catch_up(self, ask: CacheQuery) -> None:
        """Write at once the pending responses that could answer ``ask``, or that it could resume."""
        wanted = [flight for flight in self._waiting if flight.ask.beginning == ask.beginning]
        if wanted:
            for flight in wanted:
                self._begin(flight)
            await asyncio.sleep(0)

    def tell(self, tell: Callable[[CacheListener], None]) -> None:
        """Inform all keepers. If one fails, no request is affected."""
        for keeper in self._keepers:
            try:
                tell(keeper)
            except Exception:
                logger.exception("%s failed to process a response", type(keeper).__name__)

    async def finish(self) -> None:
        """Write everything that waits, and wait until it is written."""
        if self._worker is not None:
            self._worker.cancel()
            self._worker = None
        for flight in tuple(self._waiting):
            self._begin(flight)
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

    def _begin(self, flight: SingleFlight) -> asyncio.Task[None]:
        self._waiting.pop(flight, None)
        task = asyncio.get_running_loop().create_task(self._keep(flight))
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)
        return task

    async def _keep(self, flight: SingleFlight) -> None:
        key = None
        try:
            entry = self._entry(flight)
            key = await self._exact.keep(flight.ask, entry)
        finally:
            self._written(flight, key)
        if key is not None:
            self.tell(
                lambda keeper: keeper.kept(flight.ask, entry)
            )  # after writing, because they may look it up

    def _entry(self, flight: SingleFlight) -> Entry:
        ask, finished = flight.ask, flight.end
        assert finished is not None
        created, expires = self._life(flight)
        return Entry(
            tokens=flight.tokens,
            reason=finished.reason,
            prompt_tokens=len(ask.request.tokens),
            seconds=flight.seconds,
            created=created,
            expires=expires,
            stale_until=expires + ask.control.stale_while_revalidate,
            logprobs=flight.logprobs,
            stop_token=finished.stop_token,
            pulses=flight.pulses,
            versions=flight.versions,
        )

    def _life(self, flight: SingleFlight) -> tuple[float, float]:
        """Creation and expiry of a response. A resumed one is as old as its beginning, and expires no later."""
        ask, now = flight.ask, self._exact.wall()
        expires = now + lifetime(self._ttl if ask.control.ttl is None else ask.control.ttl, ask.key)
        if flight.resumed is None:
            return now, expires
        return flight.resumed.created, min(flight.resumed.expires, expires)
