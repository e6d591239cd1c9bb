"""Runs the HTTP server: listens, reloads on SIGHUP, drains on SIGTERM.

The first SIGTERM or SIGINT starts the drain: the server accepts no new request, running requests may finish for
``--drain-timeout`` seconds, and then each remaining client receives an error. The second signal stops it at once.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any, NamedTuple, Protocol

import uvicorn
from starlette.types import ASGIApp

from headrace.api.runtime.connection import Connection, ConnectionRoom, Turns, open_room
from headrace.api.runtime.listening import TlsFiles, unix_socket
from headrace.config import ServerOptions

logger = logging.getLogger("headrace.shutdown")

# Runs Python's garbage collection, which stops all threads, while no request waits.
#
# Reference counting frees most objects at once. The collector finds reference cycles and walks over all
# objects that it covers: 100 to 400 ms for everything in a server, a few milliseconds for the objects of the
# last second. Therefore the objects of the start-up are frozen and never searched again: they live as long as
# the server. Recent objects are collected often. Those that survive are old, and are collected only in idle
# time.
#
#  start-up ──> frozen, never searched
#  created ──> recent ──collected often, between two responses──> old ──collected in idle time
#
# The three are Python's permanent generation, its two young generations, and its oldest one.

NEVER = 1_000_000_000
"""Collections of younger objects before Python itself collects older ones: more than will occur."""

RECENT_SECONDS = 0.1
"""Interval between two collections of recent objects."""

REST_SECONDS = 30.0
"""Minimum interval between two full collections."""

SHARE = 0.001
"""Maximum share of time that full collections may take."""

QUIET_SECONDS = 2.0  # see docs/decisions/background-work.md#garbage-collection
"""Idle time after which a full collection may start: it is then unlikely to delay a request."""

MANY = 80
"""Collections of the youngest generation, of some 700 new objects each, after which recent objects are collected
without waiting for idle time: large calls create so many that a later collection would stop all threads for longer."""

PATIENCE = 10.0
"""A collection waits at most this many intervals for idle time; then it runs anyway."""

_RECENT, _OLD = 1, 2
"""The oldest of the generations that are recent, and the generation of old objects."""


class GarbageCollection:
    """Decides when to collect.

    Args:
        busy: whether a request waits for its response.
        calls: the number of requests so far.
        clock: seconds.
        created: the collections of the youngest generation since the last one of recent objects.
    """

    def __init__(
        self,
        busy: Callable[[], bool],
        calls: Callable[[], int],
        clock: Callable[[], float],
        created: Callable[[], int] = lambda: gc.get_count()[_RECENT],
    ) -> None:
        self._busy = busy
        self._calls = calls
        self._clock = clock
        self._created = created
        self._called = calls()
        self._quiet_since = self._recent_ended = self._all_ended = clock()
        self._rest = REST_SECONDS

    def take_over(self) -> None:
        """Let Python itself collect the youngest objects only, and freeze the objects of the start-up."""
        gc.collect()
        gc.freeze()
        gc.set_threshold(gc.get_threshold()[0], NEVER, NEVER)
        self._quiet_since = self._recent_ended = self._all_ended = self._clock()

    def tick(self) -> None:
        """Run the collection that is due. Call it several times a second."""
        now = self._clock()
        busy, called = self._busy(), self._calls()
        if busy or called != self._called:
            self._called, self._quiet_since = called, now
        quiet = now - self._quiet_since >= QUIET_SECONDS
        if _due(now - self._all_ended, self._rest, quiet):
            gc.collect(_OLD)
            self._recent_ended = self._all_ended = self._clock()
            self._rest = max(REST_SECONDS, (self._all_ended - now) / SHARE)
        elif self._created() >= MANY or _due(now - self._recent_ended, RECENT_SECONDS, not busy):
            gc.collect(_RECENT)
            self._recent_ended = self._clock()


def _due(passed: float, rest: float, good_moment: bool) -> bool:
    return passed >= (rest if good_moment else PATIENCE * rest)


startup = logging.getLogger("headrace.startup")

FAREWELL_SECONDS = 5
"""How long connections may take to send their last bytes after every response has ended."""

KEEP_ALIVE_SECONDS = 75
"""Longer than common clients keep pooled connections, so that they do not write into a closing one."""


class Drained(Protocol):
    """What is drained before the server ends: the service of an engine, or the processes of several models."""

    @property
    def awaited(self) -> bool: ...

    def open_requests(self) -> int: ...

    async def drain(self, timeout: float) -> bool: ...

    def close_all(self) -> None: ...

    def stop(self) -> object: ...


class Apps(NamedTuple):
    """The application of the main port, and that of the metrics port (None: there is no such port)."""

    main: ASGIApp
    metrics: ASGIApp | None = None


def run_server(
    apps: Apps,
    service: Drained,
    options: ServerOptions,
    ready: Callable[[str], None],
    reload: Callable[[], Coroutine[Any, Any, None]],
    sockets: list[socket.socket] | None = None,
) -> None:
    """Serve until a signal ends it; must be called on the main thread.

    Args:
        apps, service: the applications, and what they answer with; the main app starts it.
        options: addresses, TLS, and the duration of the drain.
        ready: called once with the server's URL when it listens.
        reload: run on the server's loop at each SIGHUP.
        sockets: bound sockets to listen on, instead of the address of ``options``.
    """
    room = open_room(time.monotonic)
    side = None
    if apps.metrics is not None:
        assert options.metrics_port is not None
        side = SideServer(_config(apps.metrics, options, room, port=options.metrics_port, lifespan="off"))
    config = _config(
        apps.main,
        options,
        room,
        port=options.port,
        lifespan="on",
        ssl_keyfile=options.ssl_keyfile,
        ssl_certfile=options.ssl_certfile,
    )
    config.load()
    tls = None
    if options.ssl_certfile is not None:
        assert config.ssl is not None
        tls = TlsFiles(config.ssl, options.ssl_certfile, options.ssl_keyfile)
    server = DrainingServer(config, service, options.drain_timeout, ready, reload, side, tls)
    try:
        if sockets is not None or options.uds is None:
            server.run(sockets)
        else:
            with unix_socket(options.uds) as listener:
                server.run([listener])
    finally:
        service.stop()


def _config(app: ASGIApp, options: ServerOptions, room: ConnectionRoom, **more: Any) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=partial(Connection, room=room, turns=Turns()),  # type: ignore[arg-type]  # it is called as the class would be
        host=options.host,
        log_config=None,  # its records go to the handlers of the process
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="none",
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=FAREWELL_SECONDS,
        **more,
    )


class SideServer(uvicorn.Server):
    """A second port on the loop of the first; it leaves the signals alone."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture no signals: the main server decides when both end."""
        yield

    def port(self) -> int:
        """The port that it listens on."""
        number: int = self.servers[0].sockets[0].getsockname()[1]
        return number


class DrainingServer(uvicorn.Server):
    """A uvicorn server that keeps listening while it drains, so that clients learn why their requests are rejected."""

    def __init__(
        self,
        config: uvicorn.Config,
        service: Drained,
        drain_timeout: float,
        ready: Callable[[str], None],
        reload: Callable[[], Coroutine[Any, Any, None]],
        side: SideServer | None = None,
        tls: TlsFiles | None = None,
    ) -> None:
        super().__init__(config)
        self._service = service
        self._garbage = GarbageCollection(
            lambda: service.awaited, lambda: self.server_state.total_requests, time.monotonic
        )
        self._drain_timeout = drain_timeout
        self._ready = ready
        self._reload = reload
        self._side = side
        self._tls = tls
        self._signals = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._drain: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then report the address."""
        self._garbage.take_over()
        await super().startup(sockets)
        if not self.started:
            return
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._hang_up)
        if self._side is not None:
            self._begin(self._side.serve())
            while not self._side.started:  # an address in use was found before the model was loaded
                await asyncio.sleep(0.01)
            startup.info("metrics port %d", self._side.port(), extra={"fields": {"port": self._side.port()}})
        if self._tls is not None:
            self._tls.watch.start()
        self._ready(self._url(self.servers[0].sockets[0].getsockname()))

    def _url(self, address: str | tuple[Any, ...]) -> str:
        """The URL of the socket's ``address``, which is a path for a Unix socket."""
        if isinstance(address, str):
            return f"unix:{address}"
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        return f"{'https' if self.config.is_ssl else 'http'}://{host}:{address[1]}"

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Close both ports."""
        if self._side is not None:
            self._side.should_exit = True
        if self._tls is not None:
            await self._tls.watch.stop()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal: the first starts the drain at the next tick, the second stops the server."""
        self._signals += 1
        if self._signals > 1:
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # cut responses are expected now
            self.force_exit = self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second; returns whether to leave the main loop."""
        if self._signals and self._drain is None:
            self._drain = asyncio.create_task(self._drain_service())
        self._garbage.tick()
        return await super().on_tick(counter)

    def _hang_up(self) -> None:
        if self._tls is not None:
            self._begin(asyncio.to_thread(self._tls.reload))
        self._begin(self._reload())

    def _begin(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a background task of the server failed", exc_info=error)

    async def _drain_service(self) -> None:
        service, waiting = self._service, self._service.open_requests()
        fields = {"open_requests": waiting, "timeout_seconds": self._drain_timeout}
        logger.info("draining: new requests are rejected", extra={"fields": fields})
        cancelled = 0 if await service.drain(self._drain_timeout) else service.open_requests()
        if cancelled:
            service.close_all()
        level = logging.WARNING if cancelled else logging.INFO
        fields = {"drained_requests": waiting - cancelled, "cancelled_requests": cancelled}
        logger.log(level, "drained", extra={"fields": fields})
        self.should_exit = True
