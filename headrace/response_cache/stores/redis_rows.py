"""Shared rows of the semantic cache in Redis (or Valkey): a string for each row, and a stream of the keys that changed.

A row has the time to live of its response. Its name begins like the names of responses, so clearing everything deletes
it too, and it is a member of the same sets by tag. The layout of rows and what they have in common are parts of the
name: rows of another version, another model or another encoder are neither read nor deleted, and expire by themselves.

The stream orders the changes of all servers. It has keys only, and is cut at `CHANGES`. Each server remembers how far
it has read, and begins anew if the stream was lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from headrace.response_cache.rules.tags import EVERYTHING
from headrace.response_cache.stores.generation import PREFIX
from headrace.response_cache.stores.row_feed import Change, WrittenRow

LAYOUT = 1
"""Version of the rows and of the stream; rows of other versions have other names."""

CHANGES = 200_000
"""Changes that the stream remembers, about 60 bytes each; older rows are not found by servers that start later."""

_KEY = b"k"
_Position = tuple[int, int]
_BEGINNING: _Position = (0, 0)


class RedisRows:
    """A `row_feed.RowFeed` through ``client``.

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
