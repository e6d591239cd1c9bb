"""Sends requests on to another process of this server, and its responses back as they arrive."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Protocol
from urllib.parse import quote, unquote_plus

import httptools
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

logger = logging.getLogger(__name__)

# Sends requests to the process of a model: HTTP/1.1 over its Unix socket, pieces of bodies as they arrive.

PIECE_BYTES = 64 << 10
"""Maximum bytes that are read at once."""

MOST_IDLE = 64
"""Connections that are kept for later requests."""

BLANK = b"\r\n"


class Lost(Exception):
    """The process does not listen, or has ended before its response was complete."""


class ModelClient:
    """Connections to the socket at ``path``; idle ones are kept."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._idle: list[_Connection] = []

    async def send(
        self,
        method: str,
        target: bytes,
        headers: Iterable[tuple[bytes, bytes]],
        body: bytes | AsyncIterator[bytes] = b"",
    ) -> Reply:
        """Send a request and return its response when the head has arrived. ``headers`` frame the body.

        A kept connection may have been closed meanwhile: a request with a whole body is then sent again.

        Raises:
            Lost: there is no response.
        """
        lines = [b"%s %s HTTP/1.1" % (method.encode("ascii"), target)]
        lines += [b"%s: %s" % each for each in headers]
        head = BLANK.join([*lines, b"", b""])
        while isinstance(body, bytes) and self._idle:
            with suppress(Lost):
                return await self._reply(self._idle.pop(), method, head, body)
        try:
            reader, writer = await asyncio.open_unix_connection(self._path, limit=PIECE_BYTES)
        except OSError as error:
            raise Lost from error
        return await self._reply(_Connection(reader, writer), method, head, body)

    async def _reply(
        self, connection: _Connection, method: str, head: bytes, body: bytes | AsyncIterator[bytes]
    ) -> Reply:
        reply = Reply(self, connection, without_body=method == "HEAD")
        try:
            await reply.begin(head, body)
        except BaseException:
            reply.close()
            raise
        return reply

    def keep(self, connection: _Connection) -> None:
        """Take back a connection that may be used again."""
        if len(self._idle) < MOST_IDLE:
            self._idle.append(connection)
        else:
            connection.writer.close()

    def close(self) -> None:
        """Close the idle connections."""
        for each in self._idle:
            each.writer.close()
        self._idle.clear()


class _Connection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer


class Reply:
    """One response: ``status`` and ``headers``, then its `pieces`. It must be closed."""

    def __init__(self, client: ModelClient, connection: _Connection, *, without_body: bool) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self._client = client
        self._connection: _Connection | None = connection
        self._without_body = without_body
        self._parser = httptools.HttpResponseParser(self)
        self._pieces: list[bytes] = []
        self._head_complete = self._complete = self._lasting = False
        self._sending: asyncio.Task[None] | None = None

    async def begin(self, head: bytes, body: bytes | AsyncIterator[bytes]) -> None:
        """Send the request, and read the head of the response, which may come before the body was sent.

        Raises:
            Lost: the connection was closed before.
        """
        assert self._connection is not None
        writer = self._connection.writer
        if isinstance(body, bytes):
            writer.write(head + body)
        else:
            writer.write(head)
            self._sending = asyncio.create_task(_sent(writer, body))
            self._sending.add_done_callback(lambda task: _broken_off(task, writer))
        while not self._head_complete:
            await self._read()

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body, as it arrives.

        Raises:
            Lost: the connection was closed before its end.
        """
        while True:
            pieces, self._pieces = self._pieces, []
            if pieces:
                yield b"".join(pieces)
            elif self._complete:
                return
            else:
                await self._read()

    async def whole(self) -> bytes:
        """The whole body; errors as `pieces`."""
        return b"".join([piece async for piece in self.pieces()])

    def close(self) -> None:
        """End the exchange: a connection whose response is complete is kept, another one closed."""
        connection, self._connection = self._connection, None
        sent = self._sending is None or self._sending.done()
        if self._sending is not None:
            self._sending.cancel()
        if connection is None:
            return
        if self._complete and sent and self._lasting and not self._without_body:
            self._client.keep(connection)
        else:
            connection.writer.transport.abort()

    async def _read(self) -> None:
        if self._connection is None:
            raise Lost
        try:
            data = await self._connection.reader.read(PIECE_BYTES)
            if not data:
                raise Lost
            self._parser.feed_data(data)
        except (OSError, httptools.HttpParserError) as error:
            raise Lost from error

    # Called by the parser.

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header was read."""
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """The head is complete, unless it announces another one (100 to 199)."""
        self.status = self._parser.get_status_code()
        if self.status < 200:
            self.headers.clear()
        else:
            self._head_complete, self._complete = True, self._without_body

    def on_body(self, body: bytes) -> None:
        """A piece of the body was read."""
        self._pieces.append(body)

    def on_message_complete(self) -> None:
        """The response is complete."""
        self._complete = self._head_complete
        self._lasting = self._parser.should_keep_alive()


async def _sent(writer: asyncio.StreamWriter, body: AsyncIterator[bytes]) -> None:
    """Send a body in chunks; a process that reads no more of it answers or closes the connection."""
    with suppress(OSError):
        async for piece in body:
            if piece:
                writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
                await writer.drain()
        writer.write(b"0\r\n\r\n")


def _broken_off(task: asyncio.Task[None], writer: asyncio.StreamWriter) -> None:
    """Close the connection if the body could not be read to its end, so that it is not taken for complete."""
    if not task.cancelled() and task.exception() is not None:
        writer.transport.abort()


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
