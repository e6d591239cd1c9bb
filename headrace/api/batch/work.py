"""Runs the lines of a batch: a number at a time, in job order, each result written exactly once.

``run-batch`` and the batches of a server use it. They pass a function that sends a line, and a sink for results.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterator
from itertools import islice
from typing import Any, Protocol

from headrace.api.batch.job import Line, in_job_order
from headrace.api.batch.lines import BadLine, BatchRequest, refused

SLICE = 64
"""Number of lines that are read at once."""

Send = Callable[[BatchRequest], Awaitable[dict[str, Any]]]
"""Runs one line and returns its result."""


class Sink(Protocol):
    """Receives results: `batch.results.Results`, or `batch.results.SplitResults`."""

    def append(self, result: dict[str, Any]) -> None: ...


class Feed:
    """The lines without a result, in job order.

    They are read, parsed and ordered on a worker thread, because a large batch takes seconds.
    """

    def __init__(self, lines: Iterator[Line], done: Collection[str]) -> None:
        known = frozenset(done)
        self._lines = in_job_order(line for line in lines if line.key not in known)
        self._read: deque[Line] = deque()
        self._reading = asyncio.Lock()

    async def take(self) -> Line | None:
        """The next line; None after the last one."""
        if not self._read:
            async with self._reading:
                if not self._read:
                    # Shielded: the thread cannot be interrupted, and nothing else may read meanwhile.
                    reading = asyncio.ensure_future(asyncio.to_thread(self._slice))
                    try:
                        await asyncio.shield(reading)
                    except asyncio.CancelledError:
                        await asyncio.wait([reading])
                        raise
        return self._read.popleft() if self._read else None

    def _slice(self) -> None:
        self._read.extend(islice(self._lines, SLICE))


async def run_lines(
    feed: Feed,
    sink: Sink,
    send: Send,
    *,
    concurrency: int,
    ended: Callable[[dict[str, Any]], None] = lambda result: None,
) -> None:
    """Run all lines of ``feed``, ``concurrency`` at a time; ``ended`` is called after a result is written.

    An exception of ``send`` or ``sink`` ends the run. Running lines are then cancelled and have no result.
    """

    async def work() -> None:
        while (line := await feed.take()) is not None:
            result = refused(line) if isinstance(line, BadLine) else await send(line)
            sink.append(result)
            ended(result)

    workers = [asyncio.create_task(work()) for _ in range(concurrency)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
