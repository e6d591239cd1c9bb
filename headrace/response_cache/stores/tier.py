"""Wraps a store for the lookup: converts bytes to entries, and turns every fault into a miss.

A slow or unreachable store delays a few lookups by its deadline; then a circuit breaker disables it for a while.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from headrace.core.events import Fault, StoreFaulted
from headrace.core.ports import Store, StoreFacts, ValueTooLarge
from headrace.response_cache.ports import RowFeed, SharesRows
from headrace.response_cache.rules.circuit_breaker import CircuitBreaker
from headrace.response_cache.rules.entry import Damaged, Entry, Seal, pack, unpack

logger = logging.getLogger(__name__)

ValueT = TypeVar("ValueT")

WRITE_SECONDS = 2.0
"""Time limit of a write. No request waits for it, but the queue of writes must stay bounded."""


class Tier:
    """One store, and the deadline of a lookup in seconds (0: the store is in this process).

    ``seal`` authenticates the values of a store that others can write to. ``tell`` receives its faults.
    """

    def __init__(
        self,
        store: Store,
        deadline: float = 0.0,
        seal: Seal | None = None,
        tell: Callable[[StoreFaulted], None] = lambda event: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = store.name
        self.at_hand = not deadline  # a lookup never waits
        self._store = store
        self._deadline = deadline
        self._seal = seal
        self._tell = tell
        self._clock = clock
        self._reading = CircuitBreaker()
        self._writing = CircuitBreaker()  # a full disk can still be read
        self._warned_of_size = False  # long responses would fill the log; the metric counts them

    async def find(self, key: bytes) -> Entry | None:
        """The entry under ``key``; None if there is none or the store failed."""
        value = await self._call(lambda: self._store.get(key), self._reading, self._deadline)
        if value is None:
            return None
        try:
            return unpack(key, value if self._seal is None else self._seal.open(key, value))
        except Damaged as error:
            self._fault(Fault.DAMAGED, str(error))
            await self.forget(key)
            return None

    async def keep(self, key: bytes, entry: Entry, ttl: float) -> None:
        """Store ``entry`` for ``ttl`` seconds, unless the store fails."""
        value = pack(key, entry)
        sealed = value if self._seal is None else self._seal.close(key, value)
        counters = tuple([counter for counter, _ in entry.versions])
        try:
            await self._call(
                lambda: self._store.put(key, sealed, ttl, counters), self._writing, WRITE_SECONDS
            )
        except ValueTooLarge as error:
            self._fault(Fault.TOO_LARGE, str(error))

    async def forget(self, key: bytes) -> None:
        """Delete one entry, unless the store fails."""
        await self._call(lambda: self._store.delete(key), self._writing, WRITE_SECONDS)

    async def clear(self, counter: str) -> bool:
        """Delete all entries of a counter of tags and raise it; returns whether the store did."""
        done = await self._call(lambda: _done(self._store.clear(counter)), self._writing, WRITE_SECONDS)
        return done is not None

    async def versions(self) -> Mapping[str, int] | None:
        """The versions in the store; None if it failed."""
        return await self._call(self._store.versions, self._reading, WRITE_SECONDS)

    async def advance(self, steps: Mapping[str, int]) -> bool:
        """Raise versions in the store; returns whether the store did."""
        done = await self._call(lambda: _done(self._store.advance(steps)), self._writing, WRITE_SECONDS)
        return done is not None

    @property
    def failing(self) -> bool:
        """Whether the last lookup failed, so that an entry that was not found may exist."""
        return self._reading.is_failing

    def open_feed(self, space: bytes) -> tuple[RowFeed, Seal] | None:
        """The rows of the semantic cache that are shared through this store; None if it shares none."""
        if self._seal is None or not isinstance(self._store, SharesRows):
            return None
        return self._store.open_feed(space), self._seal

    def facts(self) -> StoreFacts:
        """The store's size."""
        return self._store.facts()

    async def close(self) -> None:
        """Finish writes and close the store."""
        try:
            async with asyncio.timeout(WRITE_SECONDS):
                await self._store.close()
        except Exception as error:
            logger.warning("%s could not be closed: %s", self.name, error)

    async def _call(
        self, call: Callable[[], Awaitable[ValueT]], breaker: CircuitBreaker, deadline: float
    ) -> ValueT | None:
        if self.at_hand:
            return await call()
        if not breaker.permits(self._clock()):
            self._fault(Fault.RESTING, "")
            return None
        try:
            async with asyncio.timeout(deadline):
                value = await call()
        except ValueTooLarge:
            breaker.succeeded()  # the store works
            raise
        except TimeoutError:
            self._fault(Fault.SLOW, f"no answer within {deadline:g} s")
        except Exception as error:  # client libraries raise errors of many types
            self._fault(Fault.FAILED, f"{type(error).__name__}: {error}")
        else:
            if breaker.is_open:
                logger.warning("cache store %s works again: circuit breaker closed", self.name)
            breaker.succeeded()
            return value
        was_open = breaker.is_open
        breaker.failed(self._clock())
        if breaker.is_open and not was_open:
            logger.warning("cache store %s is down: circuit breaker open, it is retried later", self.name)
        return None

    def _fault(self, fault: Fault, message: str) -> None:
        if fault in (Fault.DAMAGED, Fault.FAILED) or (fault is Fault.TOO_LARGE and not self._warned_of_size):
            logger.warning("%s: %s", self.name, message)
            self._warned_of_size = self._warned_of_size or fault is Fault.TOO_LARGE
        self._tell(StoreFaulted(self.name, fault, message))


async def _done(work: Awaitable[object]) -> bool:
    await work
    return True
