"""The in-process store: evicts the least recently used responses at its memory limit."""

from __future__ import annotations

import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import NamedTuple

from headrace.core.ports import StoreFacts, ValueTooLarge

ENTRY_BYTES = 400
"""Memory of the table per entry: slots, key, record and numbers (measured)."""

LARGEST_SHARE = 8
"""A value may use at most 1/8 of the limit, so that it does not evict everything else."""


class _Kept(NamedTuple):
    value: bytes
    until: float
    tags: tuple[str, ...]
    nbytes: int


class MemoryStore:
    """A `core.ports.Store` of at most ``max_bytes``, including bookkeeping."""

    name = "memory"

    def __init__(self, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes = max_bytes
        self._clock = clock
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()
        self._nbytes = 0
        self._evictions = 0

    async def get(self, key: bytes) -> bytes | None:
        kept = self._kept.get(key)
        if kept is None:
            return None
        if kept.until <= self._clock():
            self._drop(key)
            return None
        self._kept.move_to_end(key)
        return kept.value

    async def put(self, key: bytes, value: bytes, ttl: float, tags: tuple[str, ...]) -> None:
        self._drop(key)
        nbytes = sys.getsizeof(value) + ENTRY_BYTES + sys.getsizeof(tags) + sum(map(sys.getsizeof, tags))
        if nbytes > (limit := self._max_bytes // LARGEST_SHARE):
            raise ValueTooLarge(nbytes, limit)
        self._kept[key] = _Kept(value, self._clock() + ttl, tags, nbytes)
        self._nbytes += nbytes
        while self._nbytes > self._max_bytes:
            self._drop(next(iter(self._kept)))
            self._evictions += 1

    async def delete(self, key: bytes) -> None:
        self._drop(key)

    async def clear(self, tag: str) -> None:
        for key in [key for key, kept in self._kept.items() if tag in kept.tags]:
            self._drop(key)

    async def versions(self) -> Mapping[str, int]:
        return {}  # the process itself has them, and the store ends with it

    async def advance(self, steps: Mapping[str, int]) -> None:
        pass

    def facts(self) -> StoreFacts:
        return StoreFacts(len(self._kept), self._nbytes, self._evictions)

    async def close(self) -> None:
        self._kept.clear()
        self._nbytes = 0

    def _drop(self, key: bytes) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            self._nbytes -= kept.nbytes
