"""The interface for transferring the bytes of blocks between processes.

Each connection has an area of equal slots, which the publishing server fills and the other one reads. The reader's next
request implies that all slots have been read, so no state is shared or left behind if either server is lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class CannotAttach(Exception):
    """The area of a peer cannot be read by this process."""


class Area(Protocol):
    """The slots of one connection, in the process that fills them."""

    slots: int

    def describe(self) -> Mapping[str, Any]:
        """The information that the other process needs to read the slots, as plain values for JSON."""
        ...

    def slot(self, number: int) -> memoryview:
        """A slot's bytes, to be written."""
        ...

    def close(self) -> None: ...


class View(Protocol):
    """The slots of a peer's area, in the process that reads them."""

    def read(self, slots: Sequence[int], targets: Sequence[memoryview]) -> None:
        """Copy each slot to its target. Raises OSError if it cannot; no target is written to afterwards."""
        ...

    def close(self) -> None: ...


class KVTransfer(Protocol):
    """A transfer method; ``name`` is its value of ``kv_connector``."""

    name: str

    def register(self, slots: int, slot_bytes: int) -> Area:
        """A new area. Raises OSError if there is no memory for it."""
        ...

    def attach(self, described: Mapping[str, Any], slot_bytes: int) -> View:
        """A peer's area.

        Raises:
            CannotAttach: it cannot be read from here.
        """
        ...
