"""Streams of responses that can be read again, also while they grow."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterable, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.api.exchange import DISCONNECTED, record_error
from headrace.api.replies import DONE, PING, PING_SECONDS, SSE_HEADERS, hung_up

SEPARATOR = b"\n\n"


class EventLog:
    """The events of one response, numbered from 0, each as the bytes that a client receives.

    Any thread may add events; one event loop reads them.
    """

    def __init__(self, events: Iterable[bytes] = (), ended: bool = False) -> None:
        self._events = list(events)
        self._ended = ended
        self._grown = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

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
        self._loop = asyncio.get_running_loop()
        while len(self._events) <= seen and not self._ended:
            await self._grown.wait()
        return self._events[seen:]

    def _wake(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._notify)

    def _notify(self) -> None:
        self._grown.set()
        self._grown = asyncio.Event()


class FollowedStream(Response):
    """The events of ``log`` with numbers from ``seen`` on."""

    def __init__(self, log: EventLog, seen: int, headers: Mapping[str, str]) -> None:
        super().__init__(media_type="text/event-stream", headers={**SSE_HEADERS, **headers})
        del self.headers["content-length"]
        self._log = log
        self._seen = seen

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        gone = asyncio.create_task(hung_up(receive))
        sender = asyncio.create_task(self._send_events(send))
        try:
            await asyncio.wait([gone, sender], return_when=asyncio.FIRST_COMPLETED)
            if sender.done():
                sender.result()
            else:
                record_error(scope, DISCONNECTED)
        finally:
            gone.cancel()
            sender.cancel()

    async def _send_events(self, send: Send) -> None:
        while True:
            try:
                events = await asyncio.wait_for(self._log.after(self._seen), PING_SECONDS)
            except TimeoutError:
                await send({"type": "http.response.body", "body": PING, "more_body": True})
                continue
            self._seen += len(events)
            if events:
                await send({"type": "http.response.body", "body": b"".join(events), "more_body": True})
            else:
                await send({"type": "http.response.body", "body": DONE, "more_body": False})
                return
