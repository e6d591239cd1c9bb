"""The Memcached store: cached responses shared by servers with a common secret.

Memcached has no tags and cannot list its entries. All versions of tags are stored under one key, changed by
compare-and-swap. Invalidated entries stay, unservable, until they expire or are evicted.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from pymemcache.client.base import PooledClient
from pymemcache.exceptions import MemcacheError, MemcacheServerError

from headrace.core.ports import StoreFacts, ValueTooLarge
from headrace.response_cache.rules.tags import EVERYTHING
from headrace.response_cache.stores.generation import GENERATION, VERSIONS, entry_name, new_generation

CONNECTIONS = 4
SOCKET_SECONDS = 1.0
ITEM_BYTES = 1 << 20
"""Memcached's default size limit of an item (its option ``-I``), for a server that does not report its own."""

_LIMIT = b"item_size_max"
_REFUSED = b"too large"
"""Part of the error of a server for an item above its limit."""

LONGEST_SECONDS = 30 * 86400
"""Longest time to live: Memcached interprets a longer one as a date."""

ATTEMPTS = 16

ValueT = TypeVar("ValueT")


class MemcachedStore:
    """A `core.ports.Store` at ``host``:``port``; the client blocks, so it has its own threads."""

    name = "memcached"

    def __init__(self, host: str, port: int) -> None:
        self._client = PooledClient(
            (host, port),
            connect_timeout=SOCKET_SECONDS,
            timeout=SOCKET_SECONDS,
            no_delay=True,
            max_pool_size=CONNECTIONS,
            default_noreply=False,
        )
        self._threads = ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="headrace-memcached")
        self._generation: str | None = None
        self._largest_bytes: int | None = None  # read from the server by the first write

    async def get(self, key: bytes) -> bytes | None:
        if self._generation is None:
            return None  # invalidations have not been read yet
        name = entry_name(self._generation, key)
        return await self._run(lambda: self._client.get(name))

    async def put(self, key: bytes, value: bytes, ttl: float, tags: tuple[str, ...]) -> None:
        if self._generation is None:
            return
        name, seconds = entry_name(self._generation, key), min(LONGEST_SECONDS, max(1, int(ttl)))
        await self._run(lambda: self._set(name, value, seconds))

    async def delete(self, key: bytes) -> None:
        if self._generation is not None:
            name = entry_name(self._generation, key)
            await self._run(lambda: self._client.delete(name))

    async def clear(self, tag: str) -> None:
        known = await self._run(lambda: self._clear(tag))
        self._generation = str(known[GENERATION])

    async def versions(self) -> Mapping[str, int]:
        known = await self._run(lambda: self._change(lambda known: None))
        self._generation = str(known[GENERATION])
        return {tag: int(number) for tag, number in known.items() if tag != GENERATION}

    async def advance(self, steps: Mapping[str, int]) -> None:
        def change(known: dict[str, str | int]) -> None:
            for tag, by in steps.items():
                known[tag] = int(known.get(tag, 0)) + by

        await self._run(lambda: self._change(change))

    def facts(self) -> StoreFacts:
        return StoreFacts(None, None, 0)

    async def close(self) -> None:
        await self._run(self._client.close)
        self._threads.shutdown(wait=False)

    def _set(self, name: str, value: bytes, seconds: int) -> None:
        if self._largest_bytes is None:
            self._largest_bytes = self._item_bytes()
        if len(value) > self._largest_bytes:  # the server would read all of it, then refuse it
            raise ValueTooLarge(len(value), self._largest_bytes)
        try:
            self._client.set(name, value, expire=seconds)
        except MemcacheServerError as error:
            if _REFUSED not in error.args[0]:
                raise
            raise ValueTooLarge(len(value), self._largest_bytes) from None  # it counts its own bytes too

    def _item_bytes(self) -> int:
        """The size limit of an item, as the server reports it; a proxy may report none."""
        try:
            return int(self._client.stats("settings").get(_LIMIT, ITEM_BYTES))
        except MemcacheError:
            return ITEM_BYTES

    def _clear(self, tag: str) -> dict[str, str | int]:
        def change(known: dict[str, str | int]) -> None:
            known[tag] = int(known.get(tag, 0)) + 1
            if tag == EVERYTHING:
                known[GENERATION] = new_generation()

        return self._change(change)

    def _change(self, change: Callable[[dict[str, str | int]], None]) -> dict[str, str | int]:
        """The versions after ``change``; created if they are missing."""
        for _ in range(ATTEMPTS):
            value, token = self._client.gets(VERSIONS)
            known: dict[str, str | int] = (
                {GENERATION: new_generation()} if value is None else json.loads(value)
            )
            before = dict(known)
            change(known)
            if value is not None and known == before:
                return known
            encoded = json.dumps(known).encode()
            if (
                self._client.add(VERSIONS, encoded)
                if value is None
                else self._client.cas(VERSIONS, encoded, token)
            ):
                return known
        raise OSError("the versions were changed by others at every attempt")

    async def _run(self, call: Callable[[], ValueT]) -> ValueT:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)
