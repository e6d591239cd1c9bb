"""The blocks that peers can read: the full blocks in the prefix cache of the device, by key.

The engine's thread adds and removes entries; the exporter's threads read them. A block is removed before a step that
may overwrite it is launched. So if a block has the same entry before and after a copy, the copy is valid.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple


class _Entry(NamedTuple):
    block: int


class Published:
    """A `core.memory.content.ContentListener`; ``copy(block, target)`` copies the bytes of a block of the device."""

    def __init__(self, copy: Callable[[int, memoryview], None]) -> None:
        self._copy = copy
        self._entries: dict[bytes, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def stored(self, parent: bytes | None, key: bytes, tokens: Sequence[int], block: int) -> None:
        self._entries[key] = _Entry(block)

    def removed(self, key: bytes) -> None:
        self._entries.pop(key, None)

    def cleared(self) -> None:
        self._entries.clear()

    def leading(self, keys: Sequence[bytes]) -> int:
        """The number of leading keys that can be read now."""
        return next((i for i, key in enumerate(keys) if key not in self._entries), len(keys))

    def read(self, key: bytes, target: memoryview) -> bool:
        """Copy the block of a key; returns whether the copy is valid."""
        entry = self._entries.get(key)
        if entry is None:
            return False
        self._copy(entry.block, target)
        return self._entries.get(key) is entry  # see docs/decisions/fleet.md#blocks-of-peers
