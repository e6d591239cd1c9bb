"""Sends requests on to another process of this server, and its responses back as they arrive."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol
from urllib.parse import quote, unquote_plus

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.api.models.client import Lost, Reply

logger = logging.getLogger(__name__)

Content = bytes | AsyncIterator[bytes]
"""A body, whole or as it arrives."""

NOT_FORWARDED = frozenset(
    {
        *(b"connection", b"content-length", b"expect", b"keep-alive", b"proxy-connection", b"te"),
        *(b"transfer-encoding", b"upgrade", b"x-request-id"),
    }
)
"""Headers of a request that concern one connection, or are set anew."""

NOT_RETURNED = frozenset({b"connection", b"date", b"keep-alive", b"transfer-encoding", b"x-request-id"})


class Counted(Protocol):
    """Counts the responses that are being sent."""

    open: int


def has_body(request: Request) -> bool:
    """Whether a request has a body."""
    return "transfer-encoding" in request.headers or request.headers.get("content-length", "0") != "0"


def target_of(request: Request, path: str | None = None) -> bytes:
    """Path and query at another process; ``?model=`` is not part of it."""
    raw = request.scope.get("raw_path") or quote(request.url.path).encode()
    query = b"&".join(
        each
        for each in request.scope["query_string"].split(b"&")
        if each and unquote_plus(each.partition(b"=")[0].decode("latin-1")) != "model"
    )
    target: bytes = raw if path is None else quote(path, safe="/:@!$'()*,;~").encode()
    return b"%s?%s" % (target, query) if query else target


def forwarded_headers(
    request: Request, request_id: str, body: Content, method: str
) -> list[tuple[bytes, bytes]]:
    """The headers of a request for another process; ``body`` is what is sent."""
    headers = [each for each in request.headers.raw if each[0] not in NOT_FORWARDED]
    headers.append((b"x-request-id", request_id.encode()))
    if not isinstance(body, bytes):
        headers.append((b"transfer-encoding", b"chunked"))
        return headers
    headers = [each for each in headers if each[0] != b"content-encoding"]
    if method == "POST" or body:
        headers.append((b"content-length", b"%d" % len(body)))
    return headers


class Relayed(Response):
    """The response of another process, sent on as it arrives. A client that disconnects ends the request there.

    ``counted`` counts open responses. ``send`` sends a body; without a ``content`` it is
    the request's own, as it arrives.
    """

    def __init__(
        self,
        counted: Counted,
        send: Callable[[Content], Awaitable[Reply]],
        content: bytes | None,
    ) -> None:
        self._counted = counted
        self._send = send
        self._content = content
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        read = asyncio.Event()
        if self._content is not None:
            read.set()
        content = _pieces(receive, read) if self._content is None else self._content
        self._counted.open += 1
        gone = asyncio.ensure_future(_gone(receive, read))
        sent = asyncio.ensure_future(self._send(content))
        try:
            await asyncio.wait({gone, sent}, return_when=asyncio.FIRST_COMPLETED)
            if not sent.done():
                return
            reply = await sent
            gone.add_done_callback(lambda _: reply.close())
            try:
                await _relay(reply, send)
            finally:
                reply.close()
        finally:
            self._counted.open -= 1
            gone.cancel()
            sent.cancel()


async def _relay(reply: Reply, send: Send) -> None:
    """Send a response on. It is cut off where the process has ended: uvicorn closes the connection then."""
    headers = [each for each in reply.headers if each[0] not in NOT_RETURNED]
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    try:
        async for piece in reply.pieces():
            await send({"type": "http.response.body", "body": piece, "more_body": True})
    except Lost:
        logger.warning("a response was cut off: its process has ended, or its client has gone")
        return
    await send({"type": "http.response.body", "body": b""})


async def _pieces(receive: Receive, read: asyncio.Event) -> AsyncIterator[bytes]:
    """The request's body as it arrives; sets ``read`` at its end.

    Raises:
        ClientDisconnect: the client has gone before.
    """
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        yield message.get("body", b"")
        more = message.get("more_body", False)
    read.set()


async def _gone(receive: Receive, read: asyncio.Event) -> None:
    """Wait until the client has disconnected."""
    await read.wait()
    while (await receive())["type"] != "http.disconnect":
        pass
