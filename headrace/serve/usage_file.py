"""Adds what has been used to a file, every few seconds and at the end, and answers from it.

What is counted and how it is stored is `observe`'s; this file has the clock and the thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol, TypeVar

logger = logging.getLogger("headrace.usage")

WRITE_SECONDS = 10.0
"""Time between two writes: as much is lost if the process is killed."""

ResultT = TypeVar("ResultT")


class Additions(Protocol):
    """What has been used since the last look."""

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
    """The task beside the server. ``take`` returns what has been used since its last call."""

    def __init__(self, store: Store, take: Callable[[], Additions]) -> None:
        self._store = store
        self._take = take
        self._waiting: list[Additions] = []  # could not be written yet
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to write; called on the server's loop."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Write the rest and close the file."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        await self._ask(lambda: None)
        await asyncio.to_thread(self._store.close)

    async def tenants(self) -> list[str]:
        """All tenants in the file."""
        return await self._ask(self._store.tenants)

    async def tenant(self, tenant: str) -> Mapping[str, Any]:
        """Usage and savings of one tenant, up to now."""
        return await self._ask(lambda: self._store.tenant(tenant))

    async def focus(self, tenant: str | None) -> str:
        """The accounts as CSV, up to now."""
        return await self._ask(lambda: self._store.focus(tenant))

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(WRITE_SECONDS)
            await self._ask(lambda: None)

    async def _ask(self, question: Callable[[], ResultT]) -> ResultT:
        """Write what is new, then ask the file, on a thread."""
        async with self._lock:
            added = self._take()
            if not added.empty:
                self._waiting.append(added)
            return await asyncio.to_thread(self._work, question)

    def _work(self, question: Callable[[], ResultT]) -> ResultT:
        while self._waiting:
            try:
                self._store.add(self._waiting[0])
            except Exception as error:  # a full disk, or another process that holds the file for long
                logger.warning("usage cannot be written: %s: %s", type(error).__name__, error)
                break
            del self._waiting[0]
        return question()
