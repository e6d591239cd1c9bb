"""Several front ends before one server (``--api-server-count``): their processes, and the sockets between them.

```
 port ── front end 1 ──┐ calls, over one connection each
      ── front end 2 ──┤──> this process: caches, admission, metrics, engine (or `--engine-process`)
      ── front end N ──┘ all other routes, as HTTP over a Unix socket
```
Each front end has a socket of its own at the port (``SO_REUSEPORT``), so that one that ends takes no connection of the
others with it, and new ones go to those that run.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from headrace.api.fronts.owner import Owner
from headrace.api.runtime.listening import unix_socket
from headrace.config import ConfigError, Options, ServerOptions, read_launch
from headrace.service.model_servers import (
    KILL_SECONDS,
    ModelServer,
    ModelState,
    NotStarted,
    Restarts,
    Started,
)
from headrace.wiring.front_end import http_path

logger = logging.getLogger(__name__)

OPTION = "--api-server-count"

PROGRAM = "headrace.wiring.front_end"

UNSET = ("metrics_port",)
"""Options that a front end does not have, also where a file or the environment names them."""


def check_front_ends(options: Options) -> None:
    """Refuse options that need HTTP in the process of the caches, before anything is loaded.

    Raises:
        ConfigError: an option needs it.
    """
    for given, option in (
        (options.cache.kv_transfer_config is not None, "--kv-transfer-config"),
        (read_launch() is not None, "a launcher of ranks such as torchrun"),
    ):
        if given:
            raise ConfigError(f"{OPTION}: {option} needs one front end; leave one of them out")


class Ports:
    """The address that all front ends share. It is reserved until `close`."""

    def __init__(self, options: ServerOptions) -> None:
        self._held: list[socket.socket] = []
        self._addresses: list[tuple[socket.AddressFamily, tuple[object, ...]]] = []
        port = options.port
        for family, _, _, _, address in socket.getaddrinfo(
            options.host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            bound = (address[0], port, *address[2:])
            held = _bound(family, bound)
            port = held.getsockname()[1]
            self._held.append(held)
            self._addresses.append((family, (address[0], port, *address[2:])))
        self.url = f"{'https' if options.ssl_certfile else 'http'}://{options.host}:{port}"

    def sockets(self) -> list[socket.socket]:
        """Sockets of another front end."""
        return [_bound(family, address) for family, address in self._addresses]

    def close(self) -> None:
        """Give the address back."""
        for each in self._held:
            each.close()


def _bound(family: socket.AddressFamily, address: tuple[object, ...]) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    if family == socket.AF_INET6:
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    made.bind(address)
    return made


class SharedSocket:
    """The Unix socket of ``--uds``, which all front ends accept at."""

    def __init__(self, path: str, held: socket.socket) -> None:
        self._held = held
        self.url = f"unix:{path}"

    def sockets(self) -> list[socket.socket]:
        """The socket, for another front end."""
        return [self._held.dup()]


@contextmanager
def opened_address(options: ServerOptions) -> Iterator[Ports | SharedSocket]:
    """The address of all front ends, until the block ends.

    Raises:
        ConfigError: it cannot be used.
    """
    if options.uds is not None:
        with unix_socket(options.uds) as held:
            yield SharedSocket(options.uds, held)
        return
    ports = Ports(options)
    try:
        yield ports
    finally:
        ports.close()


class FrontEnds:
    """The front ends of a server, as background work: they start when it listens, and end before it.

    ``start`` starts the front end with a name, before the owner's socket at a path. Clients know the server by ``url``;
    ``folder`` has the sockets between the processes.
    """

    def __init__(self, count: int, url: str, folder: str, start: Callable[[str, str], Started]) -> None:
        self.draining = False
        self.owner: Owner | None = None
        self.refusal = ""
        """Why a front end did not start with the server."""
        self.failure = ""
        """Why the server ended by itself."""
        self._path = f"{folder}/calls"
        self._url = url
        names = [str(number + 1) for number in range(count)]
        self.all = [
            ModelServer(name, self._path, partial(start, name, self._path), "front end") for name in names
        ]
        self._restarts = Restarts(self)
        self._server: asyncio.Server | None = None
        self._task: asyncio.Task[None] | None = None

    def own_options(self, options: ServerOptions) -> ServerOptions:
        """The options of this process's own HTTP server, which only front ends reach."""
        return replace(options, uds=http_path(self._path), ssl_certfile=None, ssl_keyfile=None)

    def begin(self, ready: Callable[[str], None], own_url: str) -> None:
        """This process listens at ``own_url``: start the front ends, then call ``ready`` with the server's URL."""
        self._task = asyncio.get_running_loop().create_task(self._begin(ready))

    async def _begin(self, ready: Callable[[str], None]) -> None:
        assert self.owner is not None
        self._server = await asyncio.get_running_loop().create_unix_server(self.owner.connect, self._path)
        try:
            await asyncio.gather(*(asyncio.to_thread(each.start) for each in self.all))
        except NotStarted as error:
            self.refusal = str(error)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        await self._restarts.start()
        ready(self._url)
        await self._restarts.given_up()
        self.failure = "the server ends, because no front end could be started again"
        logger.error("%s", self.failure)
        os.kill(os.getpid(), signal.SIGTERM)

    def reload(self) -> None:
        """Let all front ends read keys and the log level again."""
        for each in self.all:
            each.reload()

    def _terminate(self) -> None:
        for each in self.all:
            each.send_signal(signal.SIGTERM)

    def start(self) -> None:
        """Nothing: `begin` starts them."""

    async def stop(self) -> None:
        """End the front ends, which send what they have; the server has drained."""
        self.draining = True
        if self._task is not None:
            self._task.cancel()
        await self._restarts.stop()
        self._terminate()
        running = [each for each in self.all if each.state is ModelState.RUNNING]
        await asyncio.gather(*(asyncio.to_thread(each.end, KILL_SECONDS) for each in running))
        if self._server is not None:
            self._server.close()

    def close(self) -> None:
        """End what is left, at the end of this process."""
        self.draining = True
        self._terminate()
        for each in self.all:
            each.end(KILL_SECONDS)


def start_front_end(options: Options, address: Ports | SharedSocket, name: str, path: str) -> Started:
    """Start the front end ``name`` of an owner whose socket is at ``path``.

    Raises:
        OSError: it cannot be started.
    """
    ours, theirs = socket.socketpair()
    sockets = address.sockets()
    numbers = [each.fileno() for each in sockets]
    given = {**options.source.given, **dict.fromkeys(UNSET)}
    file = options.source.file
    command = [sys.executable, "-m", PROGRAM, str(theirs.fileno())]
    with theirs:  # a session of its own: signals of the terminal are this process's
        passed = [theirs.fileno(), *numbers]
        process = subprocess.Popen(command, pass_fds=passed, stdin=subprocess.DEVNULL, start_new_session=True)
    for each in sockets:
        each.close()
    sent = [given, None if file is None else str(file), name, path, numbers]
    ours.sendall(json.dumps(sent).encode() + b"\n")
    return Started(process, ours)
