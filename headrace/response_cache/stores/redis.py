"""The Redis (or Valkey) store: cached responses shared by servers with a common secret.

An entry is a string with a time to live. A tag is a version number in a hash, which makes invalidation reliable, and a
sorted set of the names of its entries, by expiry, which allows deletion. It uses no scripts and no modules. No request
waits for a scan. `redis_rows` has the rows of the semantic cache.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from headrace.core.ports import StoreFacts
from headrace.response_cache.rules.tags import EVERYTHING
from headrace.response_cache.stores.generation import GENERATION, PREFIX, VERSIONS, entry_name, new_generation
from headrace.response_cache.stores.redis_rows import RedisRows
from headrace.response_cache.stores.row_feed import RowFeed

CONNECTIONS = 16
CONNECT_SECONDS = 1.0
DELETED_AT_ONCE = 500


class RedisStore:
    """A `core.ports.Store` at ``url`` (``redis://``, ``rediss://`` or ``unix://``).

    Nothing is retried: a lookup has a deadline, and a failed one is a miss.

    Raises:
        TypeError: the query of the URL has an option that the client does not know.
    """

    name = "redis"

    def __init__(self, url: str, clock: Callable[[], float] = time.time) -> None:
        # Any: what the methods return is annotated differently from release to release.
        pool: Any = BlockingConnectionPool.from_url(
            url,
            max_connections=CONNECTIONS,
            timeout=None,  # each lookup has its own deadline
            socket_connect_timeout=CONNECT_SECONDS,
            retry=Retry(NoBackoff(), 0),
            protocol=3,
        )
        pool.make_connection()  # checks the options; it connects when it is used
        self._redis: Any = Redis(connection_pool=pool)
        self._clock = clock
        self._generation: str | None = None

    async def get(self, key: bytes) -> bytes | None:
        if self._generation is None:
            return None  # invalidations have not been read yet
        value: bytes | None = await self._redis.get(entry_name(self._generation, key))
        return value

    async def put(self, key: bytes, value: bytes, ttl: float, tags: tuple[str, ...]) -> None:
        if self._generation is None:
            return
        name, milliseconds = entry_name(self._generation, key), max(1, int(ttl * 1000))
        now = self._clock()
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.set(name, value, px=milliseconds)
            for tag in tags:
                if tag != EVERYTHING:
                    pipe.zadd(_names(tag), {name: now + ttl})
                    pipe.zremrangebyscore(_names(tag), "-inf", now)  # otherwise it would grow without limit
                    pipe.pexpire(_names(tag), milliseconds, nx=True)
                    pipe.pexpire(_names(tag), milliseconds, gt=True)
            await pipe.execute()

    async def delete(self, key: bytes) -> None:
        if self._generation is not None:
            await self._redis.delete(entry_name(self._generation, key))

    async def clear(self, tag: str) -> None:
        await self._redis.hincrby(VERSIONS, _encode(tag), 1)
        if tag == EVERYTHING:
            await self._redis.hset(VERSIONS, GENERATION, new_generation())
            async for name in self._redis.scan_iter(f"{PREFIX}{self._generation}:*", count=DELETED_AT_ONCE):
                await self._redis.unlink(name)
            await self.versions()
            return
        while names := await self._redis.zpopmin(_names(tag), DELETED_AT_ONCE):
            await self._redis.unlink(*[name for name, _ in names])

    async def versions(self) -> Mapping[str, int]:
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hsetnx(VERSIONS, GENERATION, new_generation())
            pipe.hgetall(VERSIONS)
            _, numbers = await pipe.execute()
        self._generation = numbers.pop(GENERATION.encode()).decode()
        return {tag.decode("utf-8", "surrogatepass"): int(number) for tag, number in numbers.items()}

    async def advance(self, steps: Mapping[str, int]) -> None:
        async with self._redis.pipeline(transaction=True) as pipe:
            for tag, by in steps.items():
                pipe.hincrby(VERSIONS, _encode(tag), by)
            await pipe.execute()

    def open_feed(self, space: bytes) -> RowFeed:
        """The rows of the semantic cache that servers share in ``space``."""
        return RedisRows(self._redis, lambda: self._generation, space, _names, self._clock)

    def facts(self) -> StoreFacts:
        return StoreFacts(None, None, 0)  # its memory is shared with others

    async def close(self) -> None:
        await self._redis.aclose()
        await self._redis.connection_pool.disconnect()


def _names(tag: str) -> str:
    return f"{PREFIX}tag:{hashlib.sha256(_encode(tag)).hexdigest()}"


def _encode(tag: str) -> bytes:
    return tag.encode("utf-8", "surrogatepass")
