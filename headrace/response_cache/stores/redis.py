"""The Redis (or Valkey) store: cached responses shared by servers with a common secret.

An entry is a string with a time to live. A tag is a version number in a hash, which makes invalidation reliable, and a
sorted set of the names of its entries, by expiry, which allows deletion. It uses no scripts and no modules. No request
waits for a scan. `RedisRows` shares rows of the semantic cache.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from headrace.core.ports import StoreFacts
from headrace.response_cache.ports import Change, RowFeed, WrittenRow
from headrace.response_cache.rules.tags import EVERYTHING
from headrace.response_cache.stores.generation import GENERATION, PREFIX, VERSIONS, entry_name, new_generation

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


LAYOUT = 1
"""Version of the rows and of the stream; rows of other versions have other names."""

CHANGES = 200_000
"""Changes that the stream remembers, about 60 bytes each; older rows are not found by servers that start later."""

_KEY = b"k"
_Position = tuple[int, int]
_BEGINNING: _Position = (0, 0)


class RedisRows:
    """A `ports.RowFeed` through ``client``: a string for each row, and a stream of the keys that changed.

    A row has the time to live of its response. Its name begins like the names of responses, so clearing everything
    deletes it too, and it is a member of the same sets by tag. The layout of rows and what they have in common are
    parts of the name: rows of another version, another model or another encoder are neither read nor deleted, and
    expire by themselves.

    The stream orders the changes of all servers. It has keys only, and is cut at `CHANGES`. Each server remembers how
    far it has read, and begins anew if the stream was lost.

    Args:
        client: an asyncio client of Redis.
        generation: the present generation of the store's names; None until it is known.
        space: what all rows have in common.
        tag_names: the name of the set of a tag.
        clock: Unix time.
    """

    def __init__(
        self,
        client: Any,
        generation: Callable[[], str | None],
        space: bytes,
        tag_names: Callable[[str], str],
        clock: Callable[[], float],
    ) -> None:
        self._redis = client
        self._generation = generation
        self._rows = f"rows{LAYOUT}:{space.hex()}"
        self._tag_names = tag_names
        self._clock = clock
        self._reading: str | None = None
        self._position = _BEGINNING
        self._own: set[_Position] = set()  # changes of this server that it has not read yet

    @property
    def ready(self) -> bool:
        return self._generation() is not None

    async def read(self, most: int) -> Sequence[Change]:
        generation = self._generation()
        if generation is None:
            return ()
        if generation != self._reading:
            self._begin(generation)
        feed = self._feed(generation)
        while True:
            async with self._redis.pipeline(transaction=False) as pipe:
                pipe.xrange(feed, f"({_spelt(self._position)}", "+", most)
                pipe.xrevrange(feed, "+", "-", 1)
                found, newest = await pipe.execute()
            if newest and _position(newest[0][0]) < self._position:
                self._begin(generation)  # the stream was lost, and another one begins
                continue
            if not found:
                return ()
            changes, last = [], self._position
            keys = [fields.get(_KEY, b"") for at, fields in found if _position(at) not in self._own]
            keys = list(dict.fromkeys(keys))
            if keys:
                rows = await self._redis.mget([self._name(generation, key) for key in keys])
                changes = list(map(Change, keys, rows))
            last = _position(found[-1][0])
            self._own = {each for each in self._own if each > last}
            self._position = last
            if changes or len(found) < most:
                return changes

    async def write(self, rows: Sequence[WrittenRow], deleted: Sequence[bytes]) -> None:
        generation = self._generation()
        if generation is None:
            return
        feed, now = self._feed(generation), self._clock()
        async with self._redis.pipeline(transaction=True) as pipe:
            for row in rows:
                self._put(pipe, generation, row, now)
            if deleted:
                pipe.unlink(*[self._name(generation, key) for key in deleted])
            before = len(pipe)
            changed = [*(row.key for row in rows), *deleted]
            for key in changed:
                pipe.xadd(feed, {_KEY: key}, maxlen=CHANGES, approximate=True)
            done = await pipe.execute()
        if generation == self._reading:
            self._own.update(map(_position, done[before:]))

    def _put(self, pipe: Any, generation: str, row: WrittenRow, now: float) -> None:
        name, milliseconds = self._name(generation, row.key), max(1, int(row.ttl * 1000))
        pipe.set(name, row.row, px=milliseconds)
        for tag in row.tags:
            if tag != EVERYTHING:  # the response under the same tags gives these sets their time to live
                pipe.zadd(self._tag_names(tag), {name: now + row.ttl})
                pipe.pexpire(self._tag_names(tag), milliseconds, nx=True)
                pipe.pexpire(self._tag_names(tag), milliseconds, gt=True)

    def _begin(self, generation: str) -> None:
        self._reading = generation
        self._position = _BEGINNING
        self._own.clear()

    def _feed(self, generation: str) -> str:
        return f"{PREFIX}{generation}:{self._rows}"

    def _name(self, generation: str, key: bytes) -> str:
        return f"{self._feed(generation)}:{key.hex()}"


def _position(name: bytes) -> _Position:
    milliseconds, _, number = name.partition(b"-")
    return int(milliseconds), int(number)


def _spelt(position: _Position) -> str:
    return f"{position[0]}-{position[1]}"
