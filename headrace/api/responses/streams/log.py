"""The numbered events of one response: clients read them from any number on, also while it grows."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterable

SEPARATOR = b"\n\n"


class EventLog:
    """The events of one response, numbered from 0, each as the bytes that a client receives."""

    def __init__(self, events: Iterable[bytes] = (), ended: bool = False) -> None:
        self._events = list(events)
        self._ended = ended
        self._grown = asyncio.Event()

    @classmethod
    def of(cls, packed: bytes) -> EventLog:
        """The log from the bytes that `packed` returned."""
        text = zlib.decompress(packed)
        return cls((event + SEPARATOR for event in text.split(SEPARATOR)[:-1]), ended=True)

    def packed(self) -> bytes:
        """The log as compressed bytes."""
        return zlib.compress(b"".join(self._events))

    @property
    def ended(self) -> bool:
        """Whether the log is complete."""
        return self._ended

    def append(self, event: bytes) -> None:
        """Add the next event."""
        self._events.append(event)
        self._wake()

    def end(self) -> None:
        """Mark the log as complete."""
        self._ended = True
        self._wake()

    async def after(self, seen: int) -> list[bytes]:
        """The events with numbers from ``seen`` on. Waits for the first one; empty if the log is complete before it."""
        while len(self._events) <= seen and not self._ended:
            await self._grown.wait()
        return self._events[seen:]

    def _wake(self) -> None:
        self._grown.set()
        self._grown = asyncio.Event()
