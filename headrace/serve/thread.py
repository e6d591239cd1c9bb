"""The engine's own thread: mail goes in, batches of events come out, and nothing else is shared.

`submit`, `cancel` and `call` put a letter into the mailbox and wake the thread; each step's events leave in
one batch through ``deliver``. The thread sleeps on a condition when the engine has nothing to do. It must not
know who listens: no sockets, no asyncio, no text. Next on the road: `serve.service` carries the events over.
"""

from __future__ import annotations

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
from headrace.core.tenancy.classes import is_awaited

logger = logging.getLogger(__name__)

SWITCH_INTERVAL_SECONDS = 0.0002
"""How long the thread that serves sockets may keep the interpreter while the engine waits for it.

Every torch operation gives the interpreter lock back and asks for it again when it is done. If the other thread
runs Python at that moment, Python's default lets it go on for 5 ms, hundreds of times in one forward pass. A
short interval bounds each wait; shorter ones gain nothing more and cost switches.
"""

ENGINE_FAILED = "the engine failed"


class Steps(Protocol):
    """What this thread needs of `core.engine.Engine`."""

    def submit(self, request: Request, now: float) -> None: ...

    def cancel(self, request_id: str, why: FinishReason, now: float) -> None: ...

    def step(self, now: float) -> list[Event]: ...

    def wake_at(self, now: float) -> float | None: ...


class StepInterrupt(Protocol):
    """Breaks off, while it is set, the steps that nobody waits for."""

    def set(self) -> None: ...

    def clear(self) -> None: ...


class Progress(NamedTuple):
    """What the thread has done so far; ``stalled_seconds`` is 0 while no request is open."""

    alive: bool
    steps: int
    open_requests: int
    stalled_seconds: float
    failure: str


class _Cancel(NamedTuple):
    request_id: str
    why: FinishReason


class _Call(NamedTuple):
    function: Callable[[], Any]
    result: Future[Any]


class EngineThread:
    """Owns the loop of one engine.

    ``deliver(events, now)`` is called on this thread, once per step that has events. When the engine raises,
    every open request ends with one ``Finished(FAILED)``, later ones end so at once, and `progress` says why:
    the thread stays to answer. ``bell`` is rung when somebody comes who will wait.
    """

    def __init__(
        self,
        engine: Steps,
        deliver: Callable[[list[Event], float], None],
        clock: Callable[[], float] = time.monotonic,
        bell: StepInterrupt | None = None,
    ) -> None:
        self._engine = engine
        self._deliver = deliver
        self._clock = clock
        self._bell = bell or threading.Event()
        self._mailbox = threading.Condition()
        self._mail: list[Request | _Cancel | _Call] = []
        self._stopping = False
        self._open: dict[
            str, Request
        ] = {}  # submitted, not yet Finished; the thread's own but for its length
        self._pending_since: float | None = None  # when the oldest unanswered wait for a step began
        self._last_progress = clock()
        self._steps = 0
        self._failure = ""
        self._expected_until = -math.inf
        self._thread = threading.Thread(target=self._run, name="headrace-engine", daemon=True)

    def start(self) -> None:
        """Begin stepping; sets the interpreter's switch interval for the whole process."""
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_SECONDS))
        self._thread.start()

    def stop(self, timeout: float = 5.0) -> bool:
        """End the loop after the step that runs now; whether it ended in time. Open requests stay open."""
        with self._mailbox:
            self._stopping = True
            self._mailbox.notify()
        if self._thread.ident is not None:  # a server may end before it has begun
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def submit(self, request: Request) -> None:
        """Hand a request over; it ends in exactly one `Finished`."""
        with self._mailbox:
            if self._pending_since is None:
                self._pending_since = self._clock()
            self._mail.append(request)
            self._mailbox.notify()
        if is_awaited(request.service_class):
            self._bell.set()

    def expect(self, seconds: float) -> None:
        """Somebody's request may come within ``seconds``: until then no step begins that is for nobody, or one ends."""
        self._expected_until = self._clock() + seconds
        self._bell.set()

    @property
    def expecting(self) -> bool:
        """Whether a request may come soon."""
        return self._clock() < self._expected_until

    def cancel(self, request_id: str, why: FinishReason) -> None:
        """End a request before the next step; unknown ids are ignored."""
        self._post(_Cancel(request_id, why))

    def call(self, function: Callable[[], Any]) -> Future[Any]:
        """Run ``function`` between two steps on the engine's thread: for what must see the engine at rest."""
        result: Future[Any] = Future()
        self._post(_Call(function, result))
        return result

    def progress(self) -> Progress:
        """How the loop fares; may be asked from any thread."""
        since = self._pending_since
        stalled = 0.0 if since is None else max(0.0, self._clock() - max(since, self._last_progress))
        return Progress(self._thread.is_alive(), self._steps, len(self._open), stalled, self._failure)

    def _post(self, letter: _Cancel | _Call) -> None:
        with self._mailbox:
            self._mail.append(letter)
            self._mailbox.notify()

    def _run(self) -> None:
        while True:
            mail: list[Request | _Cancel | _Call] | None = []
            events: list[Event]
            try:
                mail = self._wait_for_work()
                if mail is None:
                    return
                events = self._refuse(mail) if self._failure else self._step(mail)
            except Exception as error:
                logger.exception("the engine failed; no further request can run until a restart")
                self._failure = f"{type(error).__name__}: {error}"
                events = self._refuse(mail or [])
            now = self._clock()
            for event in events:
                if type(event) is Finished:
                    self._open.pop(event.request_id, None)
            if events:
                self._last_progress = now
            with self._mailbox:
                if not self._open and not self._mail:
                    self._pending_since = None
            if events:
                self._deliver(events, now)

    def _wait_for_work(self) -> list[Request | _Cancel | _Call] | None:
        """Sleep until there is mail or a step is due; the mail, or None when the thread shall end."""
        with self._mailbox:
            self._bell.clear()  # who rings from now on is not in the mail yet that is looked for below
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
        for letter in mail:
            if isinstance(letter, Request):
                self._open[letter.id] = letter
        for letter in mail:
            match letter:
                case Request():
                    self._engine.submit(letter, now)
                case _Cancel(request_id, why):
                    self._engine.cancel(request_id, why, now)
                case _Call():
                    _answer(letter)
        events = self._engine.step(now)
        self._steps += 1
        return events

    def _refuse(self, mail: list[Request | _Cancel | _Call]) -> list[Event]:
        """End all that is open or in ``mail``, for the engine no longer can."""
        for letter in mail:
            if isinstance(letter, Request):
                self._open[letter.id] = letter
            elif isinstance(letter, _Call) and not letter.result.done():
                letter.result.set_exception(RuntimeError(ENGINE_FAILED))
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
