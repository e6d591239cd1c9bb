"""The engine thread: commands go in through a mailbox, and batches of events come out.

`submit`, `cancel` and `call` put a command into the mailbox and wake the thread. The events of each step leave in one
batch through ``deliver``. The thread sleeps while the engine has nothing to do. `service.service` receives the events.
"""

from __future__ import annotations

import atexit
import logging
import math
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

from headrace.core.events import Event, Finished
from headrace.core.request import FinishReason, Request
from headrace.core.tenancy.tenants import is_awaited

logger = logging.getLogger(__name__)

SWITCH_INTERVAL_SECONDS = 0.0002
"""Maximum time that another thread holds the interpreter lock while the engine thread waits for it.

Every torch operation releases the lock and acquires it again. With Python's default, another thread that runs Python in
between may hold it for 5 ms, hundreds of times in one forward pass. Shorter intervals gain nothing and cost switches.
"""

EXIT_SECONDS = 60.0
"""How long the end of the interpreter waits for a step: a thread that then comes back from torch aborts the process."""

ENGINE_FAILED = "the engine failed"


class Steps(Protocol):
    """The part of `core.engine.Engine` that this thread uses."""

    def submit(self, request: Request, now: float) -> None: ...

    def cancel(self, request_id: str, why: FinishReason, now: float) -> None: ...

    def step(self, now: float) -> list[Event]: ...

    def wake_at(self, now: float) -> float | None: ...


class StepInterrupt(Protocol):
    """A flag; while it is set, steps that contain only background work are interrupted."""

    def set(self) -> None: ...

    def clear(self) -> None: ...


class Progress(NamedTuple):
    """Progress of the engine; ``stalled_seconds`` is 0 while no request is open.

    ``restarting`` says why the engine's process is being started again (empty: it is not).
    """

    alive: bool
    steps: int
    open_requests: int
    stalled_seconds: float
    failure: str
    restarting: str = ""


class _Cancel(NamedTuple):
    request_id: str
    why: FinishReason


class _Call(NamedTuple):
    function: Callable[[], Any]
    result: Future[Any]
    last: bool


class EngineThread:
    """Owns the loop of one engine.

    ``deliver(events, now)`` is called on this thread, once per step that has events. If it or the engine raises, every
    open request ends with ``Finished(FAILED)``, and so does every later one; `progress` reports the failure.
    ``interrupt`` is set when a foreground request arrives.
    """

    def __init__(
        self,
        engine: Steps,
        deliver: Callable[[list[Event], float], None],
        clock: Callable[[], float] = time.monotonic,
        interrupt: StepInterrupt | None = None,
    ) -> None:
        self._engine = engine
        self._deliver = deliver
        self._clock = clock
        self._interrupt = interrupt or threading.Event()
        self._mailbox = threading.Condition()
        self._mail: list[Request | _Cancel | _Call] = []
        self._stopping = False
        # Submitted and not yet finished. Other threads read only its length.
        self._open: dict[str, Request] = {}
        self._pending_since: float | None = None  # when the current period with open requests began
        self._last_progress = clock()
        self._steps = 0
        self._failure = ""
        self._expected_until = -math.inf
        self._thread = threading.Thread(target=self._run, name="headrace-engine", daemon=True)

    def start(self) -> None:
        """Start the thread; also sets the interpreter's switch interval for the whole process."""
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_SECONDS))
        self._thread.start()
        atexit.register(self.stop, EXIT_SECONDS)

    def stop(self, timeout: float = 5.0) -> bool:
        """Stop after the current step; returns whether it stopped in time. Open requests stay open."""
        with self._mailbox:
            self._stopping = True
            self._mailbox.notify()
        if self._thread.ident is not None:  # the server may stop before it has started
            self._thread.join(timeout)
        if ended := not self._thread.is_alive():
            atexit.unregister(self.stop)
        return ended

    def submit(self, request: Request) -> None:
        """Submit a request; it ends in exactly one `Finished`."""
        with self._mailbox:
            if self._pending_since is None:
                self._pending_since = self._clock()
            self._mail.append(request)
            self._mailbox.notify()
        if is_awaited(request.service_class):
            self._interrupt.set()

    def expect(self, seconds: float) -> None:
        """Announce a request within ``seconds``: until then, no step with only background work begins."""
        self._expected_until = self._clock() + seconds
        self._interrupt.set()

    @property
    def expecting(self) -> bool:
        """Whether `expect` announced a request that may still arrive."""
        return self._clock() < self._expected_until

    def cancel(self, request_id: str, why: FinishReason) -> None:
        """End a request before the next step. Unknown ids are ignored."""
        self._post(_Cancel(request_id, why))

    def call(self, function: Callable[[], Any], last: bool = False) -> Future[Any]:
        """Run ``function`` on the engine thread between two steps; ``last``: after all commands that wait then."""
        result: Future[Any] = Future()
        self._post(_Call(function, result, last))
        return result

    def tell(self, event: Event) -> None:
        """In a `call`, on the engine thread: deliver an event before the call's result and before the next step."""
        self._deliver([event], self._clock())

    def progress(self) -> Progress:
        """The progress of the loop; may be called on any thread."""
        since = self._pending_since
        stalled = 0.0 if since is None else max(0.0, self._clock() - max(since, self._last_progress))
        return Progress(self._thread.is_alive(), self._steps, len(self._open), stalled, self._failure)

    def _post(self, command: _Cancel | _Call) -> None:
        with self._mailbox:
            self._mail.append(command)
            self._mailbox.notify()

    def _run(self) -> None:
        while True:
            mail: list[Request | _Cancel | _Call] | None = []
            try:
                mail = self._wait_for_work()
                if mail is None:
                    return
                self._publish(self._refuse(mail) if self._failure else self._step(mail))
            except Exception as error:
                logger.exception("the engine failed; no further request can run until a restart")
                self._failure = f"{type(error).__name__}: {error}"
                try:
                    self._publish(self._refuse(mail or []))
                except Exception:
                    logger.exception("open requests cannot be failed now; the next command tries again")

    def _publish(self, events: list[Event]) -> None:
        """Deliver the events of a step; requests that end in them are open no longer, unless ``deliver`` raises."""
        now = self._clock()
        ended = [self._open.pop(event.request_id, None) for event in events if type(event) is Finished]
        if events:
            self._last_progress = now
        with self._mailbox:
            if not self._open and not self._mail:
                self._pending_since = None
        if events:
            try:
                self._deliver(events, now)
            except Exception:
                self._open.update({request.id: request for request in ended if request is not None})
                raise

    def _wait_for_work(self) -> list[Request | _Cancel | _Call] | None:
        """Sleep until there is a command or a step is due; returns the commands, or None when the thread must end."""
        with self._mailbox:
            self._interrupt.clear()  # a request that sets it from now on is not in the mailbox yet
            while not self._mail and not self._stopping:
                now = self._clock()
                due = None if self._failure else self._engine.wake_at(now)
                if due is not None:
                    if self._expected_until > now and not any(
                        is_awaited(request.service_class) for request in self._open.values()
                    ):
                        due = max(due, self._expected_until)
                    if due <= now:
                        break
                self._mailbox.wait(None if due is None else due - now)
            mail, self._mail = self._mail, []
            return None if self._stopping else mail

    def _step(self, mail: list[Request | _Cancel | _Call]) -> list[Event]:
        now = self._clock()
        for command in mail:
            if isinstance(command, Request):
                self._open[command.id] = command
        for command in sorted(mail, key=lambda each: isinstance(each, _Call) and each.last):
            match command:
                case Request():
                    self._engine.submit(command, now)
                case _Cancel(request_id, why):
                    self._engine.cancel(request_id, why, now)
                case _Call():
                    _answer(command)
                    now = self._clock()  # the call may have taken milliseconds
        events = self._engine.step(now)
        self._steps += 1
        return events

    def _refuse(self, mail: list[Request | _Cancel | _Call]) -> list[Event]:
        """Fail every request that is open or in ``mail``, after the engine has failed."""
        for command in mail:
            if isinstance(command, Request):
                self._open[command.id] = command
            elif isinstance(command, _Call) and not command.result.done():
                command.result.set_exception(RuntimeError(ENGINE_FAILED))
        return [
            Finished(request.id, FinishReason.FAILED, len(request.tokens), 0, 0, ENGINE_FAILED)
            for request in self._open.values()
        ]


def _answer(call: _Call) -> None:
    if call.result.set_running_or_notify_cancel():
        try:
            call.result.set_result(call.function())
        except Exception as error:
            call.result.set_exception(error)
