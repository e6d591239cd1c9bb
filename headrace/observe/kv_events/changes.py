"""Changes of the prefix cache: written by the engine's thread, read by the publisher's."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple


class Stored(NamedTuple):
    """A block was added: its key, its tokens, and the key of the block before it (None: a sequence begins here)."""

    parent: bytes | None
    key: bytes
    tokens: tuple[int, ...]


class Removed(NamedTuple):
    """A block lost its content."""

    key: bytes


class Cleared(NamedTuple):
    """All blocks lost their content, or a reader must assume so."""


Change = Stored | Removed | Cleared


class Changes:
    """A `core.memory.block_pool.ContentListener` that remembers at most ``limit`` changes until `take`.

    Changes beyond the limit are dropped and counted in ``lost``, and the next `take` begins with `Cleared`. A reader
    then misses blocks, but never assumes blocks that the cache does not hold.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._changes: deque[Change] = deque()
        self.lost = 0

    def stored(self, parent: bytes | None, key: bytes, tokens: Sequence[int], block: int) -> None:
        self._add(Stored(parent, key, tuple(tokens)))

    def removed(self, key: bytes) -> None:
        self._add(Removed(key))

    def cleared(self) -> None:
        self._add(Cleared())

    def _add(self, change: Change) -> None:
        if len(self._changes) >= self._limit:
            self.lost += len(self._changes)
            self._changes.clear()
            self._changes.append(Cleared())
        self._changes.append(change)

    def take(self) -> list[Change]:
        """The changes since the last call, in order; for one other thread."""
        taken: list[Change] = []
        for _ in range(len(self._changes)):
            try:
                change = self._changes.popleft()
            except IndexError:  # the other thread has just cleared it
                break
            if isinstance(change, Cleared):
                taken.clear()
            taken.append(change)
        return taken
