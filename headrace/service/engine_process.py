"""An engine in a process of its own, as the service sees it, and the messages between the two.

```
 service ── SUBMIT, CANCEL, EXPECT, ASK, STOP ──> socket ──> `engine_host` ── mailbox ──> engine thread
         <── EVENTS of a step, COUNTS, ANSWER ──                           <── batches of events ──
```
There is one message a step, however many requests run. The event loop reads the socket itself, so no other thread of
this process wakes up for a step. A process that ends, whatever the cause, fails every open request and all later ones.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Protocol

from headrace.core.events import Event, Finished
from headrace.core.request import FinishReason, Request
from headrace.service.packing import Frames, Plain, frame, packed, unpack_events
from headrace.service.thread import ENGINE_FAILED, Progress

logger = logging.getLogger(__name__)

READ_BYTES = 1 << 20

STEP_BYTES = 8 << 20
"""Size of the socket's buffers: hundreds of steps, so that the engine does not wait for a loop that reads late."""

END_SECONDS = 2.0
"""How long a process that has closed its socket may take to end."""

SAVE_SECONDS = 600.0
"""How long the process may take to save its cache, after its last step."""

LAST_STEP_SECONDS = 1.0
"""How much longer than the engine thread the process may take to report that it has stopped."""


class ToEngine:
    """The first field of a message to the engine's process."""

    SUBMIT = 0
    CANCEL = 1
    EXPECT = 2
    ASK = 3
    STOP = 4


class FromEngine:
    """The first field of a message of the engine's process.

    ``HALTED`` says whether the engine thread stopped in time, ``CLOSED`` what is saved for the next process.
    """

    EVENTS = 0
    COUNTS = 1
    ANSWER = 2
    HALTED = 3
    CLOSED = 4


class Child(Protocol):
    """What is used of a `subprocess.Popen`."""

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...


class Mailbox(Protocol):
    """What the service uses of an engine: its thread in this process, or an `EngineProcess`.

    `EngineThread` says what each method does.
    """

    def start(self) -> None: ...

    def stop(self, timeout: float = 5.0) -> bool: ...

    def submit(self, request: Request) -> None: ...

    def cancel(self, request_id: str, why: FinishReason) -> None: ...

    def expect(self, seconds: float) -> None: ...

    @property
    def expecting(self) -> bool: ...

    def call(self, function: Callable[[], Any]) -> Future[Any]: ...

    def tell(self, event: Event) -> None: ...

    def progress(self) -> Progress: ...


class EngineProcess:
    """A `Mailbox` of an engine that ``child`` runs behind ``connection``.

    Its methods belong to the event loop, except those that a `call` uses. ``counts`` is the last message of counts.
    """

    def __init__(
        self, connection: socket.socket, child: Child, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.counts: Plain = None
        self._connection = connection
        self._child = child
        self._clock = clock
        self._deliver: Callable[[list[Event], float], None] = lambda events, now: None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._frames = Frames()
        self._unsent = bytearray()
        self._writing = False
        self._open: dict[str, Request] = {}
        self._pending_since: float | None = None
        self._last_progress = clock()
        self._steps = 0
        self._failure = ""
        self._ended = False
        self._halted: bool | None = None
        self._saved: str | None = None
        self._expected_until = -math.inf
        self._numbers = itertools.count()
        self._asked: dict[int, Future[Plain]] = {}
        self._calls = ThreadPoolExecutor(1, thread_name_prefix="headrace-engine-calls")

    def listen(self, deliver: Callable[[list[Event], float], None]) -> None:
        """Call ``deliver(events, now)`` on the event loop for each step that has events; before `start`."""
        self._deliver = deliver

    def start(self) -> None:
        """Read the engine's messages on the running loop from now on."""
        self._loop = asyncio.get_running_loop()
        self._connection.setblocking(False)
        self._loop.add_reader(self._connection, self._read)

    def stop(self, timeout: float = 5.0) -> bool:
        """Stop after the current step; returns whether it stopped in time. Open requests stay open."""
        if self._halted is None and not self._failure:
            self._leave_loop()
            self._connection.settimeout(timeout + LAST_STEP_SECONDS)
            with suppress(OSError):
                self._connection.sendall(self._unsent + frame((ToEngine.STOP, timeout)))
                self._wait_until(lambda: self._halted is not None)
            self._halted = bool(self._halted)
            self._fail_asked()
            self._calls.shutdown(wait=False, cancel_futures=True)
        return bool(self._halted)

    def close(self) -> str:
        """Wait until the process has saved what the next one can use, and has ended; returns a note on it."""
        if self._halted:
            self._connection.settimeout(SAVE_SECONDS)
            with suppress(OSError):
                self._wait_until(lambda: self._saved is not None)
        self.end()
        return self._saved or ""

    def end(self) -> None:
        """Close the connection, which ends the process, and wait for that."""
        self._leave_loop()
        self._connection.close()
        try:
            self._child.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()

    def submit(self, request: Request) -> None:
        """Submit a request; it ends in exactly one `Finished`. One that cannot be sent is not open."""
        message = frame((ToEngine.SUBMIT, packed(Request, request)))
        if self._pending_since is None:
            self._pending_since = self._clock()
        self._open[request.id] = request
        if self._failure:
            self._running_loop().call_soon(self._fail_open)
        else:
            self._send(message)

    def cancel(self, request_id: str, why: FinishReason) -> None:
        """End a request before the next step. Unknown ids are ignored."""
        self._send(frame((ToEngine.CANCEL, request_id, why.value)))

    def expect(self, seconds: float) -> None:
        """Announce a request within ``seconds``: until then, no step with only background work begins."""
        self._expected_until = self._clock() + seconds
        self._send(frame((ToEngine.EXPECT, seconds)))

    @property
    def expecting(self) -> bool:
        """Whether `expect` announced a request that may still arrive."""
        return self._clock() < self._expected_until

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        """Run ``function`` on a thread, where it may `ask`: each question is answered between two steps."""
        return self._calls.submit(function)

    def ask(self, name: str, *arguments: Plain) -> Plain:
        """In a `call`: the answer of the engine's process to a question, by the name of its function.

        Raises:
            RuntimeError: the function raised an exception, or the engine has failed.
        """
        answer: Future[Plain] = Future()
        number = next(self._numbers)
        message = frame((ToEngine.ASK, number, name, arguments))
        self._asked[number] = answer
        if self._failure or self._halted is not None:
            self._fail_asked()
        else:
            self._running_loop().call_soon_threadsafe(self._send, message)
        return answer.result()

    def tell(self, event: Event) -> None:
        """In a `call`: deliver an event before the call's result."""
        self._running_loop().call_soon_threadsafe(self._deliver, [event], self._clock())

    def progress(self) -> Progress:
        """The progress of the engine."""
        since = self._pending_since
        stalled = 0.0 if since is None else max(0.0, self._clock() - max(since, self._last_progress))
        alive = not self._ended and self._halted is None and self._loop is not None
        return Progress(alive, self._steps, len(self._open), stalled, self._failure)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            raise RuntimeError("the engine process has not been started")
        return self._loop

    # -- messages to the process -----------------------------------------------------------------------

    def _send(self, message: bytes) -> None:
        if not self._ended:
            self._unsent += message
            if not self._writing:
                self._write()

    def _write(self) -> None:
        """Send what the socket takes; the loop calls this again when it takes more."""
        try:
            sent = self._connection.send(self._unsent)
        except BlockingIOError:
            sent = 0
        except OSError:  # the process has ended: reading says so, too
            self._unsent.clear()
            sent = 0
        del self._unsent[:sent]
        if bool(self._unsent) != self._writing:
            self._writing = not self._writing
            loop = self._running_loop()
            if self._writing:
                loop.add_writer(self._connection, self._write)
            else:
                loop.remove_writer(self._connection)

    # -- messages of the process -----------------------------------------------------------------------

    def _read(self) -> None:
        try:
            received = self._connection.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if not received:
            self._lose()
            return
        for message in self._frames.feed(received):
            self._take(message)

    def _take(self, message: Plain) -> None:
        match message:
            case (FromEngine.EVENTS, now, steps, failure, counts, events):
                self._steps, self.counts = steps, counts
                self._failed(failure)
                self._publish(unpack_events(events), now)
            case (FromEngine.COUNTS, failure, counts):
                self.counts = counts
                self._failed(failure)
            case (FromEngine.ANSWER, number, error, value):
                answer = self._asked.pop(number, None)
                if answer is None:  # the server has stopped waiting
                    return
                if error is None:
                    answer.set_result(value)
                else:
                    answer.set_exception(RuntimeError(error))
            case (FromEngine.HALTED, halted):
                self._halted = halted
            case (FromEngine.CLOSED, saved):
                self._saved = saved

    def _publish(self, events: list[Event], now: float) -> None:
        self._last_progress = now
        # After a failure, a request may have ended here before the process says so.
        events = [
            event
            for event in events
            if type(event) is not Finished or self._open.pop(event.request_id, None) is not None
        ]
        if not self._open:
            self._pending_since = None
        self._deliver(events, now)

    def _failed(self, failure: str) -> None:
        if failure and not self._failure:
            self._failure = failure
            self._fail_asked()
            logger.error("the engine failed; no further request can run until a restart: %s", failure)

    def _lose(self) -> None:
        """The process has closed its socket without being asked to."""
        self._ended = True
        self._leave_loop()
        try:
            code = self._child.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._child.kill()
            code = self._child.wait()
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit status {code}"
        self._failed(f"its process ended {how}")
        self._fail_open()

    def _fail_asked(self) -> None:
        while self._asked:
            _, answer = self._asked.popitem()
            answer.set_exception(RuntimeError(ENGINE_FAILED))

    def _fail_open(self) -> None:
        if self._open:
            ended: list[Event] = [
                Finished(each.id, FinishReason.FAILED, len(each.tokens), 0, 0, ENGINE_FAILED)
                for each in self._open.values()
            ]
            self._publish(ended, self._clock())

    def _leave_loop(self) -> None:
        loop = self._loop
        if loop is not None and not loop.is_closed() and self._connection.fileno() >= 0:
            loop.remove_reader(self._connection)
            loop.remove_writer(self._connection)
        self._writing = False

    def _wait_until(self, done: Callable[[], bool]) -> None:
        """Read messages until ``done``. Events have no listener any more, so they are dropped."""
        while not done():
            received = self._connection.recv(READ_BYTES)
            if not received:
                raise ConnectionError("the engine process has ended")
            for message in self._frames.feed(received):
                if message[0] != FromEngine.EVENTS:
                    self._take(message)
