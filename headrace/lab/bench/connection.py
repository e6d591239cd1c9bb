"""HTTP client of the load generator: sends a request, and passes on each piece of the response when it arrives.

A client on the same machine takes CPU time from the server, so httptools parses, and the sending task resumes only when
the response is complete.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import cast
from urllib.parse import urlsplit

from httptools import HttpParserError, HttpResponseParser

Receiver = Callable[[int, bytes], None]
"""Called with the status and a piece of the body."""


class Connection(asyncio.Protocol):
    """One connection; one request at a time. ``began`` says whether any byte of the response has arrived."""

    def __init__(self) -> None:
        self.usable = True
        self.began = False
        self._transport: asyncio.Transport | None = None
        self._parser = HttpResponseParser(self)
        self._status = 0
        self._framed = (
            False  # headers give the length or chunked encoding; otherwise the body ends with the connection
        )
        self._receiver: Receiver | None = None
        self._response: asyncio.Future[int] | None = None

    async def send(self, request: bytes, receiver: Receiver) -> int:
        """Sends a request; returns the status when its response is complete.

        Raises:
            ConnectionError: the connection ended before the response did, or the response is not HTTP.
        """
        assert self._transport is not None
        self._status, self._framed, self.began, self._receiver = 0, False, False, receiver
        self._response = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._response

    def close(self) -> None:
        """Closes the connection at once."""
        self.usable = False
        if self._transport is not None:
            self._transport.abort()

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's class does not inherit from it

    def data_received(self, data: bytes) -> None:
        self.began = True
        try:
            self._parser.feed_data(data)
        except HttpParserError as error:  # its context is the receiver's error, if the receiver raised one
            self._end(
                error.__context__
                if isinstance(error.__context__, Exception)
                else ConnectionError(f"not HTTP: {error}")
            )
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.usable = False
        if self._status and not self._framed and exc is None:
            self._end(None)
        else:
            self._end(
                exc or ConnectionResetError("the server closed the connection before the end of the response")
            )

    # Called by the parser.

    def on_header(self, name: bytes, value: bytes) -> None:
        self._framed = self._framed or name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        if self._receiver is not None:
            self._receiver(self._status, data)

    def on_message_complete(self) -> None:
        if self._status >= 200:  # 1xx responses are interim
            self.usable = self._parser.should_keep_alive()
            self._end(None)

    def _end(self, error: Exception | None) -> None:
        response, self._response, self._receiver = self._response, None, None
        if response is None or response.done():
            return
        if error is None:
            response.set_result(self._status)
        else:
            response.set_exception(error)


class Connections:
    """A pool of connections to one server, one per concurrent request; reused while the server keeps them open.

    Only scheme, host and port of ``url`` count.

    Raises:
        ValueError: the URL is not an HTTP URL.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"expected a URL like http://host:port, got {url!r}")
        self._host, self._authority = parts.hostname, parts.netloc.rpartition("@")[2]
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._ssl else 80)
        self._idle: list[Connection] = []

    async def post(self, path: str, headers: dict[str, str], body: bytes, receiver: Receiver) -> int:
        """Posts a JSON body to ``path``; passes each piece of the response to ``receiver`` and returns the status.

        Servers close idle connections without notice, also while the next request is on its way (RFC 9112, section
        9.3.1). A request whose reused connection ends before any byte of the response is sent once more, on a new
        connection. Generating text twice does no harm, so this holds for a POST too.

        Raises:
            OSError: no connection, or it ended before the response did.
            ValueError: a header contains a line break.
        """
        lines = {
            "Host": self._authority,
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
        }
        lines |= headers
        if any("\r" in line or "\n" in line for line in (path, *lines.values())):
            raise ValueError("a path or header must not contain line breaks")
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        request = f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + body
        connection = self._reusable()
        if connection is not None:
            try:
                return await self._send(connection, request, receiver)
            except OSError:
                if connection.began:
                    raise
        return await self._send(await self._open(), request, receiver)

    async def _send(self, connection: Connection, request: bytes, receiver: Receiver) -> int:
        try:
            status = await connection.send(request, receiver)
        except BaseException:
            connection.close()
            raise
        if connection.usable:
            self._idle.append(connection)
        else:
            connection.close()
        return status

    def close(self) -> None:
        """Closes all idle connections."""
        while self._idle:
            self._idle.pop().close()

    def _reusable(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
        return None

    async def _open(self) -> Connection:
        loop = asyncio.get_running_loop()
        return (await loop.create_connection(Connection, self._host, self._port, ssl=self._ssl))[1]
