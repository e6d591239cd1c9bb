"""The numbered events of one response, kept while it grows: clients read them from any number on."""

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
        """The log that `packed` has made."""
        text = zlib.decompress(packed)
        return cls((event + SEPARATOR for event in text.split(SEPARATOR)[:-1]), ended=True)

    def packed(self) -> bytes:
        """The log in a small form."""
        return zlib.compress(b"".join(self._events))

    @property
    def ended(self) -> bool:
        """Whether no event follows."""
        return self._ended

    def append(self, event: bytes) -> None:
        """Add the next event."""
        self._events.append(event)
        self._wake()

    def end(self) -> None:
        """No event follows."""
        self._ended = True
        self._wake()

    async def after(self, seen: int) -> list[bytes]:
        """The events from number ``seen`` on; waits for the first of them, and is empty where none follows."""
        while len(self._events) <= seen and not self._ended:
            await self._grown.wait()
        return self._events[seen:]

    def _wake(self) -> None:
        self._grown.set()
        self._grown = asyncio.Event()
