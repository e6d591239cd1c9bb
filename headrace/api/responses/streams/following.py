"""Sends the events of a log as a stream, as they arrive. If the client disconnects, the response continues."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.api.exchange import DISCONNECTED, record_error
from headrace.api.generation.writing import DONE, PING
from headrace.api.replies import PING_SECONDS, SSE_HEADERS, hung_up
from headrace.api.responses.streams.log import EventLog


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
