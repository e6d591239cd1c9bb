"""The processes of a server of several models: each is a server of one model, at a Unix socket.

```
 started ──> running ── its process ends ──> restarting ──> running
                                                 └── cannot be started `MOST_STARTS` times ──> failed
```
A process that ends is started again while the other models go on. `close` of its channel, which also happens when this
process ends, drains and ends it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import NamedTuple, Protocol

from headrace.service.service import Health
from headrace.service.thread import Progress

logger = logging.getLogger(__name__)

MOST_STARTS = 5
"""How often a process is started again in a row before its model counts as failed."""

FIRST_DELAY_SECONDS = 1.0
"""Pause before a second start in a row; it doubles with each further one."""

STEADY_SECONDS = 60.0
"""A process that has run for this long has started well: later starts are counted anew."""

KILL_SECONDS = 10.0
"""How long processes may take to end after their drain, before they are killed."""

LINE_BYTES = 1 << 16


class ModelState(StrEnum):
    """The state of a model's process."""

    RUNNING = "running"
    RESTARTING = "restarting"
    FAILED = "failed"


class Started(NamedTuple):
    """A process, and the channel on which it reports that it listens. It ends when the channel is closed."""

    process: subprocess.Popen[bytes]
    channel: socket.socket


class Report(NamedTuple):
    """What a process says of itself when it listens: its ``names`` in the API, the device and the memory of the model.

    ``room_bytes`` was available to the process before it took any, ``total_bytes`` is all that it may take.
    """

    names: Sequence[str]
    device: str = ""
    total_bytes: int = 0
    room_bytes: int = 0


class NotStarted(Exception):
    """A process ended before it listened; its own messages say why."""


class ModelServer:
    """One model: the ``path`` of its socket, and its process, which ``start`` starts.

    ``kind`` is what messages call it. ``name`` is that of the option until the process has reported the model's
    ``names`` in the API.
    """

    def __init__(self, name: str, path: str, start: Callable[[], Started], kind: str = "model") -> None:
        self.names: tuple[str, ...] = (name,)
        self.path = path
        self.kind = kind
        self.state = ModelState.RESTARTING
        self._start = start
        self._started: Started | None = None
        self._changed = False  # what it reads at its start has changed while it started

    @property
    def name(self) -> str:
        """The first name, which labels and messages have."""
        return self.names[0]

    @property
    def pid(self) -> int:
        """The id of its process; 0 while there is none."""
        return 0 if self._started is None else self._started.process.pid

    def start(self) -> Report:
        """Start the process and wait until it listens; returns what it reports of itself.

        Raises:
            NotStarted: it has ended.
        """
        started = self._started = self._start()
        line = bytearray()
        while not line.endswith(b"\n"):
            received = started.channel.recv(LINE_BYTES)
            if not received:
                self.end(0.0)
                raise NotStarted(f"the {self.kind} {self.name} did not start; the messages above say why")
            line += received
        self.state = ModelState.RUNNING
        report = Report(**json.loads(line))
        self.names = tuple(report.names)
        if self._changed:
            self.reload()
        return report

    def reload(self) -> None:
        """Let the process read keys and tenants again once it listens: before, SIGHUP would end it."""
        self._changed = True
        if self.state is ModelState.RUNNING:
            self._changed = False
            self.send_signal(signal.SIGHUP)

    def send_signal(self, number: int) -> None:
        """Send a signal to the process, if there is one."""
        if self._started is not None:
            with suppress(ProcessLookupError):
                self._started.process.send_signal(number)

    def ended(self) -> bool:
        """Whether there is no process."""
        return self._started is None or self._started.process.poll() is not None

    async def wait(self) -> None:
        """Wait until the process has closed its channel, which it does when it ends."""
        if self._started is not None:
            channel = self._started.channel
            channel.setblocking(False)
            with suppress(OSError):
                while await asyncio.get_running_loop().sock_recv(channel, LINE_BYTES):
                    pass

    def end(self, seconds: float) -> None:
        """End the process, after at most ``seconds`` by force."""
        if self._started is None:
            return
        process, channel = self._started
        channel.close()
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._started = None


class ModelServers:
    """All models of a server, in the order in which they are listed; what `run_server` asks of a service.

    ``drain_timeout`` is that of each process.
    """

    def __init__(self, servers: Sequence[ModelServer], clock: Callable[[], float] = time.monotonic) -> None:
        self.all = tuple(servers)
        self.draining = False
        self.open = 0
        """Requests that are being answered."""
        self._clock = clock

    def named(self, name: str) -> ModelServer | None:
        """The model with one of its fixed names; others are known to its process only."""
        return next((each for each in self.all if name in each.names), None)

    # What the runtime of the HTTP server and the health watch ask.

    @property
    def awaited(self) -> bool:
        """Whether a request is open."""
        return self.open > 0

    def open_requests(self) -> int:
        """Number of requests that are being answered."""
        return self.open

    def health(self) -> Health:
        """Unhealthy if a model has failed for good. Ready while at least one model runs."""
        failed = [each.name for each in self.all if each.state is ModelState.FAILED]
        why = f"the engine of {', '.join(failed)} failed" if failed else ""
        running = any(each.state is ModelState.RUNNING for each in self.all)
        closed = "draining" if self.draining else "" if running else "no model runs"
        progress = Progress(running, 0, self.open, 0.0, why)
        return Health(not why, not why and not closed, why or closed, progress)

    async def drain(self, timeout: float) -> bool:
        """Let each process drain and end; returns whether no request was left after ``timeout`` seconds."""
        self.draining = True
        for each in self.all:
            each.send_signal(signal.SIGTERM)
        until = self._clock() + timeout + KILL_SECONDS
        while self._clock() < until and not all(each.ended() for each in self.all):
            await asyncio.sleep(0.02)
        return self.open == 0

    def close_all(self) -> None:
        """End what the drain has left."""
        for each in self.all:
            each.send_signal(signal.SIGKILL)

    def stop(self) -> None:
        """End all processes, at the end of the server."""
        self.draining = True
        for each in self.all:
            each.send_signal(signal.SIGTERM)
        for each in self.all:
            each.end(KILL_SECONDS)


class Processes(Protocol):
    """Processes that are started again until the server is ``draining``."""

    @property
    def all(self) -> Sequence[ModelServer]: ...

    @property
    def draining(self) -> bool: ...


class Restarts:
    """Starts the processes of ``servers`` again when they end."""

    def __init__(self, servers: Processes, clock: Callable[[], float] = time.monotonic) -> None:
        self._servers = servers
        self._clock = clock
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begin, on the running loop."""
        self._tasks = [asyncio.create_task(self._keep(each)) for each in self._servers.all]

    async def given_up(self) -> None:
        """Return when no process runs or is started again; never if one could be."""
        await asyncio.wait(self._tasks)

    async def stop(self) -> None:
        """Start nothing any more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _keep(self, server: ModelServer) -> None:
        starts, delay = 0, FIRST_DELAY_SECONDS
        while True:
            began = self._clock()
            await server.wait()
            if self._servers.draining:
                return
            if self._clock() - began > STEADY_SECONDS:
                starts, delay = 0, FIRST_DELAY_SECONDS
            server.state = ModelState.RESTARTING
            await asyncio.to_thread(server.end, KILL_SECONDS)
            while server.state is ModelState.RESTARTING:
                if starts == MOST_STARTS:
                    server.state = ModelState.FAILED
                    logger.error(
                        "the %s %s was started %d times and is given up", server.kind, server.name, starts
                    )
                    return
                logger.error(
                    "the process of the %s %s has ended; it is started again", server.kind, server.name
                )
                if starts:
                    await asyncio.sleep(delay)
                    delay *= 2
                starts += 1
                with suppress(NotStarted):
                    await asyncio.to_thread(server.start)
            logger.warning("the %s %s runs again", server.kind, server.name)
