"""What a store offers to share rows of the semantic cache: rows under keys, and a feed of the keys that changed.

Rows are opaque bytes here. A reader asks for what has changed since its last call, at first for everything. The rows
are returned as they are now, so a change may be read twice or together with a later one of the same key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable


class Change(NamedTuple):
    """A key that changed, and its row now; None if there is none any more."""

    key: bytes
    row: bytes | None


class WrittenRow(NamedTuple):
    """A row to write under a key, for ``ttl`` seconds. `core.ports.Store.clear` of one of its ``tags`` deletes it."""

    key: bytes
    row: bytes
    ttl: float
    tags: tuple[str, ...]


class RowFeed(Protocol):
    """The shared rows of one space. ``ready``: the store has been reached, so rows can be read and written.

    A space is what rows have in common so that they can be used: `open_feed` gets its name. ``read`` returns at most
    ``most`` changes that others have made since it was called last, oldest first; fewer if there are no more.
    """

    @property
    def ready(self) -> bool: ...

    async def read(self, most: int) -> Sequence[Change]: ...

    async def write(self, rows: Sequence[WrittenRow], deleted: Sequence[bytes]) -> None: ...


@runtime_checkable
class SharesRows(Protocol):
    """A `core.ports.Store` that can share rows."""

    def open_feed(self, space: bytes) -> RowFeed: ...
