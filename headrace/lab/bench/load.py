"""Load on a server: requests at given times (open loop), or a fixed number of concurrent requests (closed loop).

An open loop sends at the workload's times and measures from then, even if the server is slow. A closed loop sends less
when the server is overloaded (coordinated omission).
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from headrace.lab.bench.client import Endpoint, ask
from headrace.lab.bench.connection import Connections
from headrace.lab.bench.record import Record
from headrace.lab.workload import Work

if sys.platform == "win32":
    from asyncio import run as run_loop
else:
    from uvloop import run as run_loop  # the client takes CPU time from a server on the same machine


async def offer(
    endpoint: Endpoint,
    work: Sequence[Work],
    concurrency: int | None = None,
    completed: Callable[[], None] = lambda: None,
) -> list[Record]:
    """Sends all of ``work`` and waits for every response; records are in the order of ``work``.

    ``concurrency`` limits the open requests. If all requests are due at the start, this is a closed loop, and a
    request's times count from when it is sent. ``completed`` is called when a request has ended.

    Raises:
        ValueError: the endpoint's URL is not an HTTP URL.
    """
    slots = asyncio.Semaphore(concurrency if concurrency is not None else len(work) or 1)
    closed = concurrency is not None and all(each.arrival == 0.0 for each in work)
    connections = Connections(endpoint.url)
    began = time.perf_counter()

    def clock() -> float:
        return time.perf_counter() - began

    async def send(each: Work) -> Callable[[], Record]:
        await asyncio.sleep(max(0.0, each.arrival - clock()))
        async with slots:
            arrived = clock() if closed else each.arrival
            record = await ask(connections, endpoint, each, arrived, clock)
            completed()
            return record

    try:
        seen = await asyncio.gather(*(send(each) for each in work))
    finally:
        connections.close()
    return [record() for record in seen]


class ServerTarget:
    """A `record.Target` behind a URL; ``before`` is called before every run, ``kernels`` is what the server reports."""

    def __init__(
        self,
        name: str,
        endpoint: Endpoint,
        concurrency: int | None = None,
        before: Callable[[], object] = lambda: None,
        kernels: str = "",
    ) -> None:
        self.name = name
        self.completed = 0
        self._endpoint = endpoint
        self._concurrency = concurrency
        self._before = before
        self._kernels = {"kernels": kernels} if kernels else {}

    def run(self, work: Sequence[Work]) -> list[Record]:
        self._before()
        self.completed = 0
        return run_loop(offer(self._endpoint, work, self._concurrency, self._count))

    def _count(self) -> None:
        self.completed += 1

    def facts(self) -> dict[str, Any]:
        limit = {} if self._concurrency is None else {"max_concurrency": self._concurrency}
        return self._kernels | limit

    def close(self) -> None:
        """Does nothing: no connection stays open between runs."""
