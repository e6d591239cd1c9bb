"""Threads on which chat templates are rendered that need a process of their own, so that no tenant delays another.

Such a template takes up to `CPU_SECONDS` of a core. Each tenant has one at a time, in the order of its requests, so
tenants take turns, and the event loop's threads stay free for tokenizing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from headrace.api.errors import ApiError

MAX_THREADS = 4
MAX_WAITING = 64
"""Requests of a tenant that wait for a template which they sent."""

ResultT = TypeVar("ResultT")


class _Lane:
    """The requests of one tenant: one runs, the others wait."""

    def __init__(self) -> None:
        self.turn = asyncio.Lock()
        self.requests = 0


class TemplateLanes:
    """Runs the work of each tenant one after the other, and that of different tenants in parallel."""

    def __init__(self) -> None:
        self._lanes: dict[str, _Lane] = {}
        self._threads = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="chat-template")

    async def run(self, tenant: str, work: Callable[[], ResultT], param: str) -> ResultT:
        """The result of ``work``. ``param`` is the field whose templates are rendered.

        Raises:
            ApiError: 429, too many requests of the tenant wait for templates that they sent.
        """
        lane = self._lanes.setdefault(tenant, _Lane())
        if param == "chat_template" and lane.requests > MAX_WAITING:
            raise ApiError(
                429,
                f"chat_template: {MAX_WAITING} requests of this tenant wait already for their templates.",
                type="rate_limit_error",
                param=param,
                code="rate_limit_exceeded",
                retry_after=1,
            )
        lane.requests += 1
        try:
            await lane.turn.acquire()
        except asyncio.CancelledError:
            self._leave(tenant, lane)
            raise
        running = asyncio.get_running_loop().run_in_executor(self._threads, work)
        # Its turn ends with the work, which goes on when the client has disconnected.
        running.add_done_callback(lambda _: self._end_turn(tenant, lane))
        return await asyncio.shield(running)

    def _end_turn(self, tenant: str, lane: _Lane) -> None:
        lane.turn.release()
        self._leave(tenant, lane)

    def _leave(self, tenant: str, lane: _Lane) -> None:
        lane.requests -= 1
        if not lane.requests:
            self._lanes.pop(tenant, None)
