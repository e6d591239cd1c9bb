"""Engine processes that are threads of the test, and end when it says so."""

from __future__ import annotations

import socket
import subprocess
import threading
from contextlib import asynccontextmanager, suppress
from functools import partial

from headrace.core.events import Stepped
from headrace.core.tenancy.gate import Limits
from headrace.service.engine_host import EngineHost
from headrace.service.engine_process import EngineProcess, FromEngine
from headrace.service.packing import frame
from headrace.service.service import Service
from headrace.testing.engines import hashing_engine
from tests.doubles.services import SOON, read_all


class Child:
    """A process that ends when the test says so."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.killed = False

    def wait(self, timeout=None):
        if not self.killed and self.code == 0:
            raise subprocess.TimeoutExpired("engine", timeout)
        return -9 if self.killed else self.code

    def kill(self):
        self.killed = True


class House:
    """The service in front, and the host of the engine behind the socket."""

    def __init__(self, child: Child, engine=None) -> None:
        self.ours, self.theirs = socket.socketpair()
        self.engine = engine or hashing_engine(overlap=1)[0]
        self.questions = []
        self.process = EngineProcess(self.ours, child)
        self.service = Service(self.process, Limits(64, 1 << 20))
        self.host = EngineHost(
            self.theirs, self.engine, self.answer, lambda: self.engine.scheduler.pool.num_cached
        )
        self.halted = None
        self.thread = threading.Thread(target=self.run, daemon=True)

    def run(self):
        self.halted = self.host.run()
        self.host.closed("3 blocks are saved")

    def answer(self, name, arguments):
        self.questions.append((name, threading.current_thread().name))
        return getattr(self.engine, name)(*arguments)


@asynccontextmanager
async def house(code: int = -9, engine=None):
    made = House(Child(code), engine)
    made.thread.start()
    made.service.start()
    try:
        yield made
    finally:
        made.process.end()
        made.theirs.close()
        made.thread.join(SOON)
        assert not made.thread.is_alive()


async def read(answer):
    return [event for _, event in await read_all(answer)]


class Mortal:
    """A socket of a process that ends in the middle of its message ``last`` (None: it does not end)."""

    def __init__(self, connection: socket.socket, last: int | None) -> None:
        self.inner = connection
        self.left = last
        self.recv, self.shutdown, self.close = connection.recv, connection.shutdown, connection.close

    def sendall(self, sent: bytes) -> None:
        if self.left == 0:
            self.inner.sendall(sent[: len(sent) // 2])
            self.inner.shutdown(socket.SHUT_RDWR)
            raise ConnectionError
        if self.left is not None:
            self.left -= 1
        self.inner.sendall(sent)


class Successors:
    """Starts processes as threads; ``lasts`` are the last messages of them. Their descriptions are numbers.

    With ``gate``, each loads until it is set. ``accepted`` is the last description that is not refused.
    """

    lasting = frozenset({"set_knobs"})

    def __init__(self, lasts=(), accepted: int = 100, gate: threading.Event | None = None, make=None) -> None:
        self.lasts = list(lasts)
        self.accepted = accepted
        self.gate = gate
        self.make = make or (
            lambda: hashing_engine(num_blocks=24, max_num_seqs=4, max_model_len=64, overlap=1)[0]
        )
        self.engines = []
        self.asked = []
        self.threads = []

    def start(self):
        ours, theirs = socket.socketpair()
        number = len(self.engines)
        self.engines.append(self.make())
        self.asked.append([])
        last = self.lasts.pop(0) if self.lasts else None
        self.threads.append(
            threading.Thread(target=self.run, args=(number, Mortal(theirs, last)), daemon=True)
        )
        self.threads[-1].start()
        return ours, Child(-9)

    def run(self, number: int, connection: Mortal) -> None:
        if self.gate is not None and number:
            self.gate.wait(SOON)
        engine = self.engines[number]
        if number:
            with suppress(OSError):  # the server may have stopped
                connection.inner.sendall(frame((FromEngine.DESCRIBED, number)))
        host = EngineHost(connection, engine, partial(self.answer, number), lambda: number)
        host.closed("") if host.run() else connection.close()

    def answer(self, number, name, arguments):
        self.asked[number].append(name)
        return

    def accept(self, description):
        if description > self.accepted:
            raise ValueError("another model")
        return description


class Seen:
    """A watcher that stores the events, without those of steps."""

    def __init__(self) -> None:
        self.events, self.steps = [], []

    def fold(self, event, now):
        (self.steps if isinstance(event, Stepped) else self.events).append(event)

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]


@asynccontextmanager
async def running(successors: Successors):
    process = EngineProcess(*successors.start())
    process.successors = successors
    service = Service(process, Limits(256, 1 << 20))
    seen = Seen()
    service.watch(seen)
    service.start()
    try:
        yield service, process, seen
    finally:
        if successors.gate is not None:
            successors.gate.set()
        process.stop()
        process.end()
        for thread in successors.threads:
            thread.join(SOON)
            assert not thread.is_alive()
