"""The end of a background task on the server's loop."""

from __future__ import annotations

import asyncio
from contextlib import suppress


async def end(task: asyncio.Task[None] | None) -> None:
    """Cancel a task and wait until it has ended; nothing if there is none."""
    if task is not None:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
