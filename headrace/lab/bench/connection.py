"""HTTP for a load generator: sends a request, and passes each piece of the response on as soon as it arrives.

A client on the same machine takes CPU time from the server, so the path is short: httptools parses, and no task is
woken before a response is complete.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from typing import cast
from urllib.parse import urlsplit

from httptools import HttpParserError, HttpResponseParser

Told = Callable[[int, bytes], None]
"""Takes the status and a piece of the body."""


class Connection(asyncio.Protocol):
    """One connection; one request at a time."""

    def __init__(self) -> None:
        self.usable = True
        self._transport: asyncio.Transport | None = None
        self._parser = HttpResponseParser(self)
        self._status = 0
        self._framed = False  # the answer says where it ends; otherwise it ends with the connection
        self._told: Told | None = None
        self._whole: asyncio.Future[int] | None = None

    async def send(self, request: bytes, told: Told) -> int:
        """Send a request; return the status once its response is complete.

        Raises:
            ConnectionError: the connection ended before the response did, or the response is not HTTP.
        """
        assert self._transport is not None
        self._status, self._framed, self._told = 0, False, told
        self._whole = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._whole

    def close(self) -> None:
        """Close the connection at once."""
        self.usable = False
        if self._transport is not None:
            self._transport.abort()

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by inheritance

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except HttpParserError as error:  # its context is the error of the receiver, if there was one
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

    # What the parser calls.

    def on_header(self, name: bytes, value: bytes) -> None:
        self._framed = self._framed or name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        if self._told is not None:
            self._told(self._status, data)

    def on_message_complete(self) -> None:
        if self._status >= 200:  # an interim response is not the response
            self.usable = self._parser.should_keep_alive()
            self._end(None)

    def _end(self, error: Exception | None) -> None:
        whole, self._whole, self._told = self._whole, None, None
        if whole is None or whole.done():
            return
        if error is None:
            whole.set_result(self._status)
        else:
            whole.set_exception(error)


class Connections:
    """As many connections to one server as there are requests at once; reused with ``keep_alive``.

    ``url`` gives scheme, host and port.

    Raises:
        ValueError: the URL is not one of HTTP.
    """

    def __init__(self, url: str, *, keep_alive: bool = True) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"expected a URL like http://host:port, got {url!r}")
        self._host, self._authority = parts.hostname, parts.netloc.rpartition("@")[2]
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._port = parts.port or (443 if self._ssl else 80)
        self._keep_alive = keep_alive
        self._idle: list[Connection] = []

    async def post(self, path: str, headers: dict[str, str], body: bytes, told: Told) -> int:
        """Send a JSON body to ``path``; ``told`` gets each piece of the response, whose status is returned.

        Raises:
            OSError: no connection, or one that ended before the response did.
            ValueError: a header with a line break.
        """
        lines = {
            "Host": self._authority,
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
        }
        if not self._keep_alive:
            lines["Connection"] = "close"
        lines |= headers
        if any("\r" in line or "\n" in line for line in (path, *lines.values())):
            raise ValueError("a path or header must not contain line breaks")
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        connection = await self._connect()
        try:
            status = await connection.send(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + body, told)
        except BaseException:
            connection.close()
            raise
        if connection.usable and self._keep_alive:
            self._idle.append(connection)
        else:
            connection.close()
        return status

    def close(self) -> None:
        """Close all idle connections."""
        while self._idle:
            self._idle.pop().close()

    async def _connect(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
        loop = asyncio.get_running_loop()
        return (await loop.create_connection(Connection, self._host, self._port, ssl=self._ssl))[1]
