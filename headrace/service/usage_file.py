"""Adds usage to a file every few seconds and at the end, and reads totals from it.

`observe` counts and stores; this file has the clock and the thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from headrace.service.background import end

logger = logging.getLogger("headrace.usage")

WRITE_SECONDS = 10.0
"""Interval between two writes: at most this much is lost if the process is killed."""

ResultT = TypeVar("ResultT")


class Additions(Protocol):
    """Usage since the last call of ``take``."""

    @property
    def empty(self) -> bool: ...


class Store(Protocol):
    """The file; all methods block."""

    def add(self, used: Any) -> None: ...

    def tenants(self) -> list[str]: ...

    def tenant(self, tenant: str) -> Mapping[str, Any]: ...

    def focus(self, tenant: str | None) -> str: ...

    def close(self) -> None: ...


class UsageFile:
    """The background task. ``take`` returns the usage since its last call."""

    def __init__(self, store: Store, take: Callable[[], Additions]) -> None:
        self._store = store
        self._take = take
        # Could not be written yet; later usage stays where it is counted.
        self._waiting: Additions | None = None
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to write; called on the server's loop."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Write the rest and close the file."""
        await end(self._task)
        await self._read(lambda: None)
        await asyncio.to_thread(self._store.close)

    async def tenants(self) -> list[str]:
        """All tenants in the file."""
        return await self._read(self._store.tenants)

    async def tenant(self, tenant: str) -> Mapping[str, Any]:
        """Usage and savings of one tenant, up to now."""
        return await self._read(lambda: self._store.tenant(tenant))

    async def focus(self, tenant: str | None) -> str:
        """The cost as CSV in the columns of FOCUS, up to now."""
        return await self._read(lambda: self._store.focus(tenant))

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(WRITE_SECONDS)
            await self._read(lambda: None)

    async def _read(self, read: Callable[[], ResultT]) -> ResultT:
        """Write new usage, then read the file, on a thread."""
        # Shielded: a thread cannot be stopped, so the lock is held until it ends, even if the caller is cancelled.
        return await asyncio.shield(self._read_locked(read))

    async def _read_locked(self, read: Callable[[], ResultT]) -> ResultT:
        async with self._lock:
            if self._waiting is not None:
                await asyncio.to_thread(self._write)
            if self._waiting is None:
                self._waiting = self._take()
                await asyncio.to_thread(self._write)
            return await asyncio.to_thread(read)

    def _write(self) -> None:
        assert self._waiting is not None
        try:
            if not self._waiting.empty:
                self._store.add(self._waiting)
        except Exception as error:  # a full disk, or another process that holds the file for long
            logger.warning("usage cannot be written: %s: %s", type(error).__name__, error)
        else:
            self._waiting = None
