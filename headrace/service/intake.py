"""Takes calls of many prompts in without holding up the event loop: one piece of a few milliseconds at a time."""

from __future__ import annotations

import asyncio
import time

PIECE_SECONDS = 0.005  # see docs/decisions/security.md#limit-of-parts-in-a-body


class Intake:
    """The turns of all calls of one event loop."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    def pieces(self) -> Pieces:
        """The pieces of one call, whose first one begins now."""
        return Pieces(self._lock)


class Pieces:
    """The pieces of one call."""

    def __init__(self, lock: asyncio.Lock) -> None:
        self._lock = lock
        self._ends = time.perf_counter() + PIECE_SECONDS

    async def turn(self) -> None:
        """Between two small parts of the work: let others run if this piece has been long enough."""
        if time.perf_counter() < self._ends:
            return
        async with self._lock:
            await asyncio.sleep(0)
        self._ends = time.perf_counter() + PIECE_SECONDS
