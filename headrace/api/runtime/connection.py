"""One client connection: limits connections, the size of heads and the time of requests; reports the disconnect.

The head is the request line and the headers. The parser itself accepts any size, so a client without a key could fill
the server's memory. This class returns 414 or 431 and closes the connection. It returns 408 to a client that sends so
slowly that it only holds the connection.

A client may close its sending half after a request and wait for the response (``nc -N``, some HTTP/1.0 clients). TCP
does not show whether it waits or has closed the whole connection, until the server sends something. So before a
response has begun, the server sends a byte of urgent data, which no client reads: the system of a client that has
closed replies with a reset.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import select
import socket
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from headrace.api.errors import (
    ApiError,
    headers_too_large,
    invalid,
    request_line_too_long,
    too_many_connections,
    too_slow,
)
from headrace.api.exchange import PARTS, Turn

logger = logging.getLogger(__name__)

MAX_HEADERS = 100
"""Maximum headers of one request."""

MAX_HEADER_BYTES = 32 * 1024
"""Maximum bytes of all headers of one request, names and values."""

MAX_REQUEST_LINE_BYTES = 8 * 1024
"""Maximum bytes of a request's path and query."""

LINGER_SECONDS = 1.0
"""How long the rest of a refused request is read and dropped. Closing a connection with unread input resets it, and the
client would not receive the error."""


IDLE_SECONDS = 75.0
"""How long a new connection may send nothing."""

HEAD_SECONDS = 30.0
"""Time within which the head of a request must arrive."""

BODY_SECONDS = 60.0
MIN_BODY_RATE = 500
"""A body must arrive within 60 seconds and as fast as 500 bytes per second: within a minute and 2 s for each 1,000
bytes of it."""

FIRST_LOOK_SECONDS = 0.05  # see docs/decisions/api.md#disconnected-and-half-closed-clients
LAST_LOOK_SECONDS = 1.0
"""Interval of the checks whether a client that has closed its sending half is still there; it doubles up to this."""


class Turns:
    """Calls what all responses of a server do at a step in one callback of the loop: one for each takes longer."""

    def __init__(self) -> None:
        self._due: list[Turn] = []

    def soon(self, turn: Turn) -> None:
        """Give ``turn`` its turn in the next iteration of the running loop."""
        if not self._due:
            asyncio.get_running_loop().call_soon(self._run)
        self._due.append(turn)

    def _run(self) -> None:
        due, self._due = self._due, []
        for each in due:
            each.turn()


class Joined:
    """A transport for the head of a response and its first part: they are one write, so that a client wakes once."""

    __slots__ = ("_transport", "_waiting")

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._waiting: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Keep it until `flush`."""
        self._waiting.append(data)

    def flush(self) -> None:
        """Write all that waits."""
        if self._waiting:
            waiting, self._waiting = self._waiting, []
            self._transport.write(b"".join(waiting))

    def close(self) -> None:
        """Write all that waits, and close."""
        self.flush()
        self._transport.close()


class Parts:
    """Writes parts of a streamed response at once; see `exchange.ResponseParts`."""

    __slots__ = ("_cycle", "_gone", "_write", "ready", "sent", "soon")

    def __init__(self, cycle: RequestResponseCycle, turns: Turns) -> None:
        self._cycle = cycle
        self._write = cycle.transport.write
        self._gone: Callable[[], None] | None = None
        self.ready = False
        self.sent = 0
        self.soon = turns.soon

    def update(self) -> None:
        """It is ready while the response has begun, is sent in chunks, and its client reads in time.

        Stored, because a look at all of this for each token would take longer than the token's chunk.
        """
        cycle = self._cycle
        open_ = cycle.response_started and not (cycle.disconnected or cycle.response_complete)
        self.ready = open_ and cycle.chunked_encoding is True and not cycle.flow.write_paused

    def write(self, part: bytes) -> None:
        """Write a part, while ``ready``."""
        size = len(part)
        self.sent += size
        self._write(b"%x\r\n%b\r\n" % (size, part))

    async def join(self, sending: Awaitable[None]) -> None:
        """Await what sends the head of the response and its first part, and write both at once."""
        cycle, transport = self._cycle, self._cycle.transport
        joined: Any = Joined(transport)
        cycle.transport = joined
        try:
            await sending
        finally:
            cycle.transport = transport
            joined.flush()

    def watch(self, gone: Callable[[], None]) -> None:
        """Call ``gone`` soon after the client has disconnected."""
        self._gone = gone
        if self._cycle.disconnected:
            self.leave()
        else:
            self._cycle.flow.resume_reading()  # to see the disconnect behind requests that wait

    def unwatch(self) -> None:
        """The response is written: it needs to know no more."""
        self._gone = None

    def leave(self) -> None:
        """The client has disconnected."""
        if self._gone is not None:
            asyncio.get_running_loop().call_soon(self._gone)
            self._gone = None


class Connection(HttpToolsProtocol):
    """A connection that limits heads and times, and informs all its requests when the client disconnects.

    uvicorn informs only the request that it read last. With HTTP pipelining, that is not the one that is running, which
    would be computed to its end and written to a closed socket.
    """

    def __init__(self, *args: Any, room: ConnectionRoom, turns: Turns, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._room = room
        self._turns = turns
        self._cycles: list[RequestResponseCycle] = []  # whose responses are not complete
        self._pending_bytes = (
            0  # received since the parser last completed a head, a message or a piece of a body
        )
        self._header_bytes = 0
        self._refusal: ApiError | None = None
        self._deadline: float | None = None  # when the part of a request that is awaited is late
        self._timer: asyncio.TimerHandle | None = None
        self._awaited = ("head", HEAD_SECONDS)
        self._body_began = 0.0
        self._body_bytes = 0
        self._half_closed = False
        self._probes: int | None = None  # how many may still be sent; None: any number

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected; refuse it if there is no room."""
        super().connection_made(transport)
        if not self._room.admits(len(self.connections)):
            self._refuse(too_many_connections())
        self._expect("", IDLE_SECONDS)

    def data_received(self, data: bytes) -> None:
        """Parse received bytes; refuse a head or trailer that does not end within the limit."""
        if self._refusal is not None:
            return
        self._pending_bytes += len(data)
        super().data_received(data)
        if self._refusal is None and self._pending_bytes > MAX_REQUEST_LINE_BYTES + MAX_HEADER_BYTES:
            self._refuse(headers_too_large(MAX_HEADERS, MAX_HEADER_BYTES))

    def on_message_begin(self) -> None:
        """A request line begins."""
        super().on_message_begin()
        self._header_bytes = 0
        self._expect("head", HEAD_SECONDS)

    def on_url(self, url: bytes) -> None:
        """A part of the request line was read."""
        super().on_url(url)
        if len(self.url) > MAX_REQUEST_LINE_BYTES:
            self._reject(request_line_too_long(MAX_REQUEST_LINE_BYTES))

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header was read, or a trailer behind a chunked body."""
        super().on_header(name, value)
        self._header_bytes += len(name) + len(value)
        if len(self.headers) > MAX_HEADERS or self._header_bytes > MAX_HEADER_BYTES:
            self._reject(headers_too_large(MAX_HEADERS, MAX_HEADER_BYTES))

    def on_headers_complete(self) -> None:
        """The head is complete: the request is handed to the application."""
        super().on_headers_complete()
        self._pending_bytes = 0
        self._cycles.append(self.cycle)
        scope: Any = self.cycle.scope
        scope[PARTS] = Parts(self.cycle, self._turns)
        self._body_began, self._body_bytes = self.loop.time(), 0
        self._expect("body", BODY_SECONDS)

    def on_body(self, body: bytes) -> None:
        """A piece of the body was read."""
        super().on_body(body)
        self._pending_bytes = 0
        self._body_bytes += len(body)
        self._deadline = self._body_began + BODY_SECONDS + self._body_bytes / MIN_BODY_RATE

    def on_message_complete(self) -> None:
        """The request is complete; what follows is another one's head."""
        super().on_message_complete()
        self._pending_bytes = 0
        self._deadline = None
        if self.cycle.response_complete:
            self._forget()

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio takes an answer, uvicorn gives none
        """The client sends no more. Returns whether the connection stays open, for the response that it waits for.

        TLS has no such state: its connections close.
        """
        waits = self._waits() and not self.cycle.more_body and self._refusal is None
        if not waits or self.transport.get_extra_info("sslcontext") is not None:
            return False
        self.cycle.keep_alive = False
        if not self._half_closed:
            self._half_closed = True
            self._look(FIRST_LOOK_SECONDS)
        return True

    def _waits(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _look(self, seconds: float) -> None:
        """Close the connection if the client has closed it too; look again after ``seconds``."""
        if self.transport.is_closing() or not self._waits():
            return
        begun = any(each.response_started and not each.response_complete for each in self._cycles)
        ask = not begun and self._probes != 0
        if _is_reset(self.transport.get_extra_info("socket"), ask=ask):
            self.transport.abort()
            return
        if ask and self._probes is not None:
            self._probes -= 1
        self.loop.call_later(seconds, self._look, min(2 * seconds, LAST_LOOK_SECONDS))

    def on_response_complete(self) -> None:
        """A response was sent. If others follow, the client may read it later, behind one urgent byte at most."""
        if self.pipeline and self._probes is None:
            self._probes = 1
        super().on_response_complete()
        self._cycles = [each for each in self._cycles if not each.response_complete]
        if not (self._cycles or self.cycle.more_body):
            self._forget()

    def _forget(self) -> None:
        """Request and response are complete: an idle connection keeps nothing of them."""
        self.cycle = None  # type: ignore[assignment]
        self.scope = None  # type: ignore[assignment]
        self.headers = []
        self.url = b""

    def pause_writing(self) -> None:
        """The client reads late."""
        super().pause_writing()
        self._update_parts()

    def resume_writing(self) -> None:
        """The client has read enough."""
        super().resume_writing()
        self._update_parts()

    def _update_parts(self) -> None:
        for cycle in self._cycles:
            scope: Any = cycle.scope
            scope[PARTS].update()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has disconnected."""
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()
        for cycle in self._cycles:
            cycle.disconnected = cycle.disconnected or not cycle.response_complete
            self._leave(cycle)
        self._update_parts()
        self._cycles.clear()

    def _leave(self, cycle: RequestResponseCycle) -> None:
        cycle.message_event.set()
        scope: Any = cycle.scope
        scope[PARTS].leave()

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls this when the parser fails, or one of the callbacks above has raised."""
        error = self._refusal or invalid(msg, code="invalid_http")
        if self.cycle is not None and self.cycle.more_body:  # its own body is wrong
            self._give_up(error)
        else:
            self._refuse(error)

    def _expect(self, what: str, seconds: float) -> None:
        """A part of a request is awaited for so long. A connection has one timer, so that a request costs none."""
        self._awaited = what, seconds
        self._deadline = self.loop.time() + seconds
        if self._timer is None or self._timer.when() > self._deadline:
            self._set_timer(self._deadline)

    def _set_timer(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_at(at, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._deadline is None or self._refusal is not None:
            return
        what, seconds = self._awaited
        if self.flow.read_paused:  # the server does not read, so the client is not slow
            self._expect(what, seconds)
            return
        if self.loop.time() < self._deadline:
            self._set_timer(self._deadline)
            return
        if not what or (what == "body" and self.cycle.response_started):
            self.transport.close()  # there is no request to answer, or it has its answer
            return
        rate = f", or slower than {MIN_BODY_RATE} bytes per second" if what == "body" else ""
        self._give_up(too_slow(what, f"{seconds:g} s{rate}"))

    def _give_up(self, error: ApiError) -> None:
        """End a request whose rest is missing or wrong: send ``error`` if its response has not begun, and close."""
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete and not cycle.response_started:
            cycle.disconnected = cycle.response_complete = True
            self._leave(cycle)
        self._refuse(error)

    def _reject(self, error: ApiError) -> None:
        """Stop parsing, from within a callback of the parser."""
        self._refusal = error
        raise error

    def _refuse(self, error: ApiError) -> None:
        """Send ``error`` and close; if an earlier request of this connection still runs, only close."""
        self._refusal = error
        if self.transport.is_closing():
            return
        if any(not each.response_complete for each in self._cycles):
            self.transport.close()
            return
        self.transport.write(_response(error))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(LINGER_SECONDS, self.transport.close)


def _is_reset(connection: Any, *, ask: bool) -> bool:
    """Whether the client's system has reset a connection; with ``ask``, send the byte that makes it do so."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        poll = select.poll()
        poll.register(same, 0)  # errors and hang-ups are always reported
        if poll.poll(0):
            return True
        if ask and same.family in (socket.AF_INET, socket.AF_INET6):
            try:
                same.send(b"\n", socket.MSG_OOB | socket.MSG_DONTWAIT)
            except OSError:
                return bool(poll.poll(0))
    return False


def _response(error: ApiError) -> bytes:
    body = error.body()
    head = (
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n"
    )
    head += "".join(f"{name.lower()}: {value}\r\n" for name, value in error.headers.items()) + "\r\n"
    return head.encode("ascii") + body


WANTED_FILES = 65_536
"""Limit that is asked for if the system permits it: each connection is an open file."""

RESERVED_SHARE = 8
RESERVED_FILES = 256
"""An eighth of the limit, at most 256, stays free for files of the caches and for refusing connections."""

WARN_SECONDS = 60.0
_OPEN_FILES = ("/proc/self/fd", "/dev/fd")


class ConnectionRoom:
    """Decides whether a further connection fits ``limit`` open files, of which ``others`` are no connections."""

    def __init__(self, limit: int, others: int, clock: Callable[[], float]) -> None:
        self._limit = limit
        self._most = max(1, limit - others - min(RESERVED_FILES, limit // RESERVED_SHARE))
        self._clock = clock
        self._warned = -WARN_SECONDS

    def admits(self, connections: int) -> bool:
        """Whether ``connections``, the new one included, fit; the log says so at most once a minute if not."""
        if connections <= self._most:
            return True
        if (now := self._clock()) - self._warned >= WARN_SECONDS:
            self._warned = now
            logger.warning(
                "new connections are refused: %d are open, and the limit of open files is %d; raise it with "
                "ulimit -n, LimitNOFILE= or --ulimit nofile=",
                connections - 1,
                self._limit,
            )
        return False


def open_room(clock: Callable[[], float]) -> ConnectionRoom:
    """Raise the limit of open files as far as the system permits, and return the room that it leaves."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_FILES if hard == resource.RLIM_INFINITY else min(WANTED_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    limit = WANTED_FILES if soft == resource.RLIM_INFINITY else soft
    return ConnectionRoom(limit, _count_open(), clock)


def _count_open() -> int:
    for folder in _OPEN_FILES:
        if os.path.isdir(folder):
            return len(os.listdir(folder))
    return 0
