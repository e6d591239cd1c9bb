"""Serves until told to stop, and stops in good order.

The first SIGTERM or SIGINT begins the drain: nothing new is taken, what runs may finish for a while, and then
each remaining client is told. The second stops at once.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
import time
from collections.abc import Callable
from types import FrameType
from typing import Any
from weakref import WeakSet

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from headrace.config import ConfigError, ServerOptions
from headrace.serve.http.garbage_collection import GarbageCollection
from headrace.serve.service import Service

logger = logging.getLogger(__name__)

FAREWELL_SECONDS = 5
"""What connections get to send their last bytes once every answer has ended."""

KEEP_ALIVE_SECONDS = 75
"""Longer than the pools of common clients keep a connection, so that they never write into a closing one."""


def check_tls(options: ServerOptions) -> None:
    """Raise `ConfigError` where the certificate or its key cannot be used: before a model is loaded for them."""
    if options.ssl_certfile is None:
        if options.ssl_keyfile is not None:
            raise ConfigError("--ssl-keyfile needs --ssl-certfile beside it")
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(options.ssl_certfile, options.ssl_keyfile)
    except OSError as error:
        files = " and ".join(filter(None, (options.ssl_certfile, options.ssl_keyfile)))
        raise ConfigError(f"--ssl-certfile, --ssl-keyfile: {files} cannot be used: {error}") from error


def check_address(options: ServerOptions) -> None:
    """Raise `ConfigError` where nobody can listen at the address: before a model is loaded for it."""
    host, port = options.host, options.port
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"--host {host}: {(error.strerror or str(error)).lower()}") from error
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    why = f"port {port} is in use on {host}; choose another with --port"
                elif error.errno == errno.EACCES:
                    why = f"port {port} needs root privileges; choose one above 1023 with --port"
                elif error.errno == errno.EADDRNOTAVAIL:
                    why = f"--host {host}: this machine has no such address"
                else:
                    why = f"cannot listen on {host}:{port}: {(error.strerror or str(error)).lower()}"
                raise ConfigError(why) from error


def run_server(app: ASGIApp, service: Service, options: ServerOptions, ready: Callable[[str], None]) -> None:
    """Serve until a signal ends it; must be called on the main thread.

    Args:
        app, service: as `create_app` made them of each other; the app starts the service.
        options: address, TLS, and how long the drain may take.
        ready: called once with the server's URL when it listens.
    """
    config = uvicorn.Config(
        app,
        http=Connection,
        host=options.host,
        port=options.port,
        ssl_keyfile=options.ssl_keyfile,
        ssl_certfile=options.ssl_certfile,
        log_level="warning",
        access_log=False,
        server_header=False,
        ws="none",
        lifespan="on",
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=FAREWELL_SECONDS,
    )
    try:
        DrainingServer(config, service, options.drain_timeout, ready).run()
    finally:
        service.stop()


class Connection(HttpToolsProtocol):
    """A client's connection, whose end is told to all requests that came over it.

    uvicorn tells the one that it read last. A client may send several without waiting, and then the one that is being
    answered is another, which would be computed to its end for nobody and written to a closed socket.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._cycles: WeakSet[RequestResponseCycle] = WeakSet()  # those that are over are freed

    def on_headers_complete(self) -> None:
        """A request begins."""
        super().on_headers_complete()
        self._cycles.add(self.cycle)

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        super().connection_lost(exc)
        for cycle in self._cycles:
            cycle.disconnected = cycle.disconnected or not cycle.response_complete
            cycle.message_event.set()


class DrainingServer(uvicorn.Server):
    """A uvicorn server that goes on listening while it drains, so that clients hear why they are refused."""

    def __init__(
        self,
        config: uvicorn.Config,
        service: Service,
        drain_timeout: float,
        ready: Callable[[str], None],
    ) -> None:
        super().__init__(config)
        self._service = service
        self._garbage = GarbageCollection(
            lambda: service.awaited, lambda: self.server_state.total_requests, time.monotonic
        )
        self._drain_timeout = drain_timeout
        self._ready = ready
        self._signals = 0
        self._drain: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then say where."""
        self._garbage.take_over()
        await super().startup(sockets)
        if self.started:
            port = self.servers[0].sockets[0].getsockname()[1]
            host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
            self._ready(f"{'https' if self.config.is_ssl else 'http'}://{host}:{port}")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal: the first begins the drain at the next tick, the second ends the server."""
        self._signals += 1
        if self._signals > 1:
            logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # cut answers are no news now
            self.force_exit = self.should_exit = True

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second: whether to leave the main loop."""
        if self._signals and self._drain is None:
            self._drain = asyncio.create_task(self._drain_service())
        self._garbage.tick()
        return await super().on_tick(counter)

    async def _drain_service(self) -> None:
        waiting = self._service.open_requests()
        logger.warning("draining: %d requests may finish within %g s", waiting, self._drain_timeout)
        if not await self._service.drain(self._drain_timeout):
            logger.warning(
                "drain ended with %d requests open; they are cancelled", self._service.open_requests()
            )
            self._service.close_all()
        self.should_exit = True
