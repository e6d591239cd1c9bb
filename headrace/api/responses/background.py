"""Responses with ``background: true``: computed while no client waits, and stored when they end."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from headrace.api.compile.call import Call
from headrace.api.errors import ApiError, failed, shutting_down
from headrace.api.replies import FEW_TOKENS, write_beside
from headrace.api.responses.store import ResponseStore
from headrace.api.responses.streams import EventLog
from headrace.api.responses.writer import ResponseWriter
from headrace.core.request import FinishReason

logger = logging.getLogger(__name__)


class Running:
    """A running response: its call, its writer, and the log of its events, if it is streamed."""

    def __init__(self, call: Call, writer: ResponseWriter, log: EventLog | None) -> None:
        self.cancelled = False
        self.log = log
        self._call = call
        self._writer = writer
        self.task = asyncio.create_task(self._run())

    def cancel(self) -> None:
        """End the call; its status becomes ``cancelled`` if it has not ended already."""
        self.cancelled = True
        self._call.abort()

    def stop(self) -> None:
        """End the call because the server ends."""
        self._call.close(FinishReason.CANCELLED)

    async def _run(self) -> None:
        try:
            await (self._compute() if self.log is None else self._stream())
        except ApiError as error:
            self._fail(error, "cancelled" if self.cancelled else "failed")
        except asyncio.CancelledError:
            self._fail(shutting_down(), "failed")
            raise
        except Exception:
            logger.exception("call failed", extra={"fields": {"id": self._call.id}})
            self._fail(failed(), "failed")
        finally:
            self._call.close()

    async def _compute(self) -> None:
        await self._call.advance()
        if not self._call.done:
            self._writer.began()
        while not self._call.done:
            await self._call.advance()
        await write_beside(self._call, self._writer.complete)

    async def _stream(self) -> None:
        """Write the events into the log, which clients follow."""
        call, writer = self._call, self._writer
        writer.queued()
        begun = ended = False
        while not call.done:
            for choice in await call.advance():
                if not begun:
                    writer.began()
                    begun = True
                if (delta := choice.gained()) is not None:
                    write = partial(writer.chunk, choice, delta)
                    write() if len(delta.tokens) < FEW_TOKENS else await write_beside(call, write)
                if choice.finish_reason is not None and not ended:
                    await write_beside(call, partial(writer.ending, choice))
                    ended = True
        await write_beside(call, writer.closing)

    def _fail(self, error: ApiError, status: str) -> None:
        if self.log is None:
            self._writer.failed(error, status)
        else:
            self._writer.failure(error, status)


class BackgroundResponses:
    """The responses that run in the background. When the server stops, it ends them and closes their store
    (`api.app.BackgroundWork`)."""

    def __init__(self, store: ResponseStore) -> None:
        self._store = store
        self._running: dict[str, Running] = {}

    def begin(self, call: Call, writer: ResponseWriter, log: EventLog | None = None) -> None:
        """Compute an open call; ``log`` is its writer's, if it is streamed."""
        running = self._running[call.id] = Running(call, writer, log)
        running.task.add_done_callback(lambda _: self._running.pop(call.id, None))

    def log(self, id: str) -> EventLog | None:
        """The events of a running response, if it is streamed."""
        running = self._running.get(id)
        return None if running is None else running.log

    async def cancel(self, id: str) -> None:
        """End a response, if it is running, and wait until its final state is stored."""
        running = self._running.get(id)
        if running is not None:
            running.cancel()
            await asyncio.wait([running.task])

    def start(self) -> None:
        """Do nothing: work begins with the first request."""

    async def stop(self) -> None:
        """End all responses, write what is pending, and close the store."""
        running = list(self._running.values())
        for each in running:
            each.stop()
        if running:
            await asyncio.wait([each.task for each in running])
        self._store.close()
