"""An engine in a process of its own, as the service sees it, and the messages between the two.

```
 service ── SUBMIT, CANCEL, EXPECT, ASK, STOP ──> socket ──> `engine_host` ── mailbox ──> engine thread
         <── EVENTS of a step, COUNTS, ANSWER ──                           <── batches of events ──
```
There is one message a step, however many requests run. The event loop reads the socket itself, so no other thread of
this process wakes up for a step. If the process ends, whatever the cause, another one is started and gets all open
requests, as `open_requests` has them. After too many losses (`core.recovery`) these and all later ones fail.
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
from typing import Any, NamedTuple, Protocol

from headrace.core.events import Event
from headrace.core.recovery import Recovery
from headrace.core.request import FinishReason, Request
from headrace.service.open_requests import OpenRequests
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

    A process that has loaded its model describes itself (``DESCRIBED``), or it ``REFUSED`` an option. ``FAILED`` says
    why the engine failed, before the process ends. ``HALTED`` says whether the engine thread stopped in time,
    ``CLOSED`` what is saved for the next process.
    """

    EVENTS = 0
    COUNTS = 1
    ANSWER = 2
    HALTED = 3
    CLOSED = 4
    DESCRIBED = 5
    REFUSED = 6
    FAILED = 7


class Child(Protocol):
    """What is used of a `subprocess.Popen`."""

    def poll(self) -> int | None: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...


class ProcessLost(RuntimeError):
    """The process that was asked has ended without an answer, and another one is started."""


class Asked(NamedTuple):
    """A question without an answer yet; another process is asked it too if it ``repeats``."""

    answer: Future[Plain]
    message: bytes
    repeats: bool
    sent: bool


class Successors(Protocol):
    """Starts an engine process in place of one that was lost.

    ``lasting`` are the questions that change settings: the last of each is asked again.
    """

    lasting: frozenset[str]

    def start(self) -> tuple[socket.socket, Child]:
        """Start a process; its first message describes it.

        Raises:
            OSError: it cannot be started.
        """
        ...

    def accept(self, description: Plain) -> Plain:
        """The first counts of a described process.

        Raises:
            ValueError: it has another model than the first one.
        """
        ...


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

    def call(self, function: Callable[[], Any], last: bool = False) -> Future[Any]: ...

    def tell(self, event: Event) -> None: ...

    def progress(self) -> Progress: ...


def as_it_is(request: Request) -> Request:
    """A request that crosses as it is."""
    return request


class EngineProcess:
    """A `Mailbox` of an engine that ``child`` runs behind ``connection``.

    Its methods belong to the event loop, except those that a `call` uses. ``counts`` is the last message of counts,
    ``past_counts`` are the last ones of the processes before. Without ``successors``, the first loss is the end.
    ``sent`` makes of a request what crosses; `EngineHost` has the other direction.
    """

    def __init__(
        self,
        connection: socket.socket,
        child: Child,
        clock: Callable[[], float] = time.monotonic,
        sent: Callable[[Request], Request] = as_it_is,
    ) -> None:
        self.counts: Plain = None
        self.past_counts: tuple[Plain, ...] = ()
        self.successors: Successors | None = None
        self._connection = connection
        self._child = child
        self._clock = clock
        self._sent = sent
        self._deliver: Callable[[list[Event], float], None] = lambda events, now: None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._frames = Frames()
        self._unsent = bytearray()
        self._writing = False
        self._open = OpenRequests()
        self._recovery = Recovery()
        self._restarting = ""  # why, while another process loads
        self._lost_at = 0.0
        self._cause = ""  # what the process said before it ended
        self._pending_since: float | None = None
        self._last_progress = clock()
        self._steps = self._past_steps = 0
        self._failure = ""
        self._ended = False
        self._halted: bool | None = None
        self._saved: str | None = None
        self._expected_until = -math.inf
        self._numbers = itertools.count()
        self._asked: dict[int, Asked] = {}
        self._lasting: dict[str, bytes] = {}
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
            if not self._restarting:
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
        message = self._submission(request)
        if self._pending_since is None:
            self._pending_since = self._clock()
        self._open.add(request, sent=not self._restarting)
        if self._failure:
            self._running_loop().call_soon(self._fail_open)
        else:
            self._send(message)

    def cancel(self, request_id: str, why: FinishReason) -> None:
        """End a request before the next step. Unknown ids are ignored."""
        self._open.cancel(request_id, why)
        if self._restarting:
            self._running_loop().call_soon(self._end_cancelled)
        self._send(frame((ToEngine.CANCEL, request_id, why.value)))

    def expect(self, seconds: float) -> None:
        """Announce a request within ``seconds``: until then, no step with only background work begins."""
        self._expected_until = self._clock() + seconds
        self._send(frame((ToEngine.EXPECT, seconds)))

    @property
    def expecting(self) -> bool:
        """Whether `expect` announced a request that may still arrive."""
        return self._clock() < self._expected_until

    def call(self, function: Callable[[], Any], last: bool = False) -> Future[Any]:
        """Run ``function`` on a thread, where it may `ask`: questions are answered in turn, each between two steps."""
        return self._calls.submit(function)

    def ask(self, name: str, *arguments: Plain) -> Plain:
        """In a `call`: the answer of the engine's process to a question, by the name of its function.

        If the process is lost, the next one is asked again: an answer may be late, and a question must bear repeating.

        Raises:
            RuntimeError: the function raised an exception, or the engine has failed.
        """
        answer: Future[Plain] = Future()
        number = next(self._numbers)
        message = frame((ToEngine.ASK, number, name, arguments))
        if self.successors is not None and name in self.successors.lasting:
            self._lasting[name] = message
        self._asked[number] = Asked(answer, message, repeats=True, sent=True)
        if self._failure or self._halted is not None:
            self._fail_asked()
        elif self._loop is None:  # nothing else uses the connection yet
            with suppress(OSError):
                self._connection.sendall(message)
                self._wait_until(answer.done)
            self._fail_asked()
        else:
            self._loop.call_soon_threadsafe(self._send, message)
        return answer.result()

    def post(self, name: str, *arguments: Plain) -> Future[Plain]:
        """On the event loop: ask a question beside others. A cancelled one is forgotten.

        If the process is lost before it answers, the future raises `ProcessLost`. While another one is being started,
        the question waits for it.
        """
        answer: Future[Plain] = Future()
        number = next(self._numbers)
        message = frame((ToEngine.ASK, number, name, arguments))
        self._asked[number] = Asked(answer, message, repeats=False, sent=not self._restarting)
        answer.add_done_callback(lambda _: self._asked.pop(number, None))
        if self._failure or self._halted is not None:
            self._fail_asked()
        else:
            self._send(message)
        return answer

    def remember(self, key: str, name: str, *arguments: Plain) -> None:
        """Ask another process this question too, before it gets requests; in place of an earlier one with this key."""
        self._lasting[key] = frame((ToEngine.ASK, next(self._numbers), name, arguments))

    def forget(self, key: str) -> None:
        """Another process is not asked the question with this key."""
        self._lasting.pop(key, None)

    def tell(self, event: Event) -> None:
        """Deliver an event soon; in a `call`: before the call's result."""
        self._running_loop().call_soon_threadsafe(self._deliver, [event], self._clock())

    def now(self) -> float:
        """The time by the clock of events."""
        return self._clock()

    def progress(self) -> Progress:
        """The progress of the engine."""
        since = None if self._restarting else self._pending_since
        stalled = 0.0 if since is None else max(0.0, self._clock() - max(since, self._last_progress))
        alive = not self._ended and self._halted is None and self._loop is not None
        steps = self._past_steps + self._steps
        return Progress(alive, steps, len(self._open), stalled, self._failure, self._restarting)

    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            raise RuntimeError("the engine process has not been started")
        return self._loop

    # -- messages to the process -----------------------------------------------------------------------

    def _submission(self, request: Request) -> bytes:
        return frame((ToEngine.SUBMIT, packed(Request, self._sent(request))))

    def _send(self, message: bytes) -> None:
        if not self._ended and not self._restarting:
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
            case (FromEngine.EVENTS, now, steps, counts, events):
                self._steps, self.counts = steps, counts
                self._publish(self._open.take(unpack_events(events)), now)
            case (FromEngine.COUNTS, counts):
                self.counts = counts
            case (FromEngine.DESCRIBED, description):
                self._continue(description)
            case (FromEngine.REFUSED | FromEngine.FAILED, why):
                self._cause = why
            case (FromEngine.ANSWER, number, error, value):
                asked = self._asked.pop(number, None)
                if asked is None:  # the server has stopped waiting
                    return
                if error is None:
                    asked.answer.set_result(value)
                else:
                    asked.answer.set_exception(RuntimeError(error))
            case (FromEngine.HALTED, halted):
                self._halted = halted
            case (FromEngine.CLOSED, saved):
                self._saved = saved

    def _publish(self, events: list[Event], now: float) -> None:
        self._last_progress = now
        if not self._open:
            self._pending_since = None
        if events:
            self._deliver(events, now)

    # -- when the process is lost ----------------------------------------------------------------------

    def _lose(self) -> None:
        """The process has closed its socket without being asked to."""
        self._leave_loop()
        try:
            code = self._child.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._child.kill()
            code = self._child.wait()
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit status {code}"
        why = self._cause or f"its process ended {how}"
        now, self._cause = self._clock(), ""
        again = self.successors is not None and self._recovery.lost(now)
        if again:
            try:
                self._start_again(why)
            except OSError as error:
                why, again = f"{why}, and no other one can be started: {error}", False
        self._lose_asked(why)
        lost = self._open.lose(why, again, ENGINE_FAILED)
        if not again:
            self._end_failed(why)
        self._publish(lost, now)

    def _start_again(self, why: str) -> None:
        """Start another process, which sends a description when it has loaded the model."""
        assert self.successors is not None
        if not self._restarting:
            self._lost_at = self._clock()
        self._connection.close()
        self._connection, self._child = self.successors.start()
        self._frames, self._unsent, self._restarting = Frames(), bytearray(), why
        self._connection.setblocking(False)
        self._running_loop().add_reader(self._connection, self._read)
        logger.warning("the engine is started again, because %s", why)

    def _continue(self, description: Plain) -> None:
        """Another process has loaded the model: give it the settings, the questions and the requests of the last."""
        assert self.successors is not None
        try:
            counts = self.successors.accept(description)
        except ValueError as error:
            self.end()
            self._end_failed(str(error))
            self._fail_open()
            return
        self._end_cancelled()
        self.past_counts, self.counts = (*self.past_counts, self.counts), counts
        self._past_steps, self._steps = self._past_steps + self._steps, 0
        self._restarting, self._last_progress = "", self._clock()
        asked = [each.message for each in self._asked.values()]
        self._asked |= {number: each._replace(sent=True) for number, each in self._asked.items()}
        submitted = [self._submission(each) for each in self._open.send()]
        for message in (*self._lasting.values(), *asked, *submitted):
            self._send(message)
        seconds = self._clock() - self._lost_at
        logger.warning("the engine runs again after %.1f s, with %d open requests", seconds, len(submitted))

    def _end_cancelled(self) -> None:
        """End the cancelled requests, while there is no engine to do it."""
        if self._restarting:
            self._publish(self._open.end_cancelled(), self._clock())

    def _end_failed(self, why: str) -> None:
        """No further engine is started."""
        self._ended, self._failure, self._restarting = True, why, ""
        self._fail_asked()
        logger.error("the engine failed; no further request can run until a restart: %s", why)

    def _fail_asked(self) -> None:
        while self._asked:
            _, asked = self._asked.popitem()
            asked.answer.set_exception(RuntimeError(ENGINE_FAILED))

    def _lose_asked(self, why: str) -> None:
        """The questions that the process had, and that another one is not asked by itself."""
        for number, each in tuple(self._asked.items()):
            if each.sent and not each.repeats:
                del self._asked[number]
                each.answer.set_exception(ProcessLost(why))

    def _fail_open(self) -> None:
        self._publish(self._open.fail(ENGINE_FAILED), self._clock())

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
