"""One engine for the calls of several threads: their requests run in the same steps.

```
 call 1 ─ submit ┐                      ┌ events of call 1 ─ its job
 call 2 ─ submit ┴─ inbox ─ engine.step ┴ events of call 2 ─ its job
```
There is no engine thread. Of the threads that wait for their jobs one runs the steps, for the requests of all. When its
own job has news it returns to its caller, and another waiting thread goes on.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from headrace.core.events import Admitted, Emitted, Event, Finished, PromptScored
from headrace.core.request import FinishReason, Request
from headrace.llm.job import Job
from headrace.observe.cost.ledger import CostLedger
from headrace.wiring.model import Loaded

POLL_SECONDS = 0.1
"""How often a waiting thread looks for a deferred Ctrl-C."""


class Turns:
    """Lets one thread compute at a time.

    A turn belongs to a thread until `release`. A thread that waits for one gives a ``key``, by which `notify` finds it.
    Nothing here allocates while the lock is held but in a consistent state: the garbage collector may call `when_free`
    from any allocation, so the lock can be taken again by its own thread.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._owner: int | None = None
        self._waiting: dict[object, threading.Condition] = {}
        self._once = 0  # of them, those that want a single turn
        self._arrived = threading.Condition(self._lock)
        self._process = os.getpid()

    @property
    def wanted(self) -> bool:
        """Whether a thread waits for a single turn, for which a thread of many turns should release its own."""
        return self._once > 0

    def is_own_process(self) -> bool:
        """Whether this is not a forked child, where the threads that compute do not exist."""
        return self._process == os.getpid()

    def require_caller(self) -> None:
        """Raise RuntimeError in a forked child, and on the thread whose turn it is: a call from inside a step."""
        if not self.is_own_process():
            raise RuntimeError(
                "this LLM was made by another process and does not work after a fork; make one in each process,"
                " or start processes with the method 'spawn'"
            )
        if self._owner == threading.get_ident():
            raise RuntimeError("an LLM cannot be called from inside one of its own steps")

    def take(self, key: object, done: Callable[[], bool], check: Callable[[], None]) -> bool:
        """Wait for a turn; False if ``done()`` became true before. ``check`` may end the waiting by an exception.

        Raises:
            RuntimeError: see `require_caller`.
        """
        self.require_caller()
        with self._lock:
            mine = self._waiting[key] = threading.Condition(self._lock)
            try:
                while not done():
                    if self._owner is None and next(iter(self._waiting)) is key:
                        self._owner = threading.get_ident()
                        return True
                    mine.wait(POLL_SECONDS)
                    check()
                return False
            finally:
                del self._waiting[key]
                if self._owner is None:
                    self._wake_next()

    def release(self, finish: Callable[[], None] = lambda: None) -> None:
        """End this thread's turn, after a last ``finish()``; no `when_free` comes between the two."""
        with self._lock:
            try:
                finish()
            finally:
                self._owner = None
                self._wake_next()

    @contextmanager
    def once(self) -> Iterator[None]:
        """A single turn for the block."""
        with self._lock:
            self._once += 1
        try:
            self.take(object(), lambda: False, lambda: None)
        finally:
            with self._lock:
                self._once -= 1
        try:
            yield
        finally:
            self.release()

    def when_free(self, action: Callable[[], None]) -> None:
        """Call ``action`` as a turn of its own if no thread has one now; otherwise its owner must do it."""
        with self._lock:
            if self._owner is None:
                self._owner = threading.get_ident()
                self.release(action)

    def notify(self, keys: Iterable[object]) -> None:
        """Let the threads that wait with these keys call their ``done``."""
        with self._lock:
            for key in keys:
                if key in self._waiting:
                    self._waiting[key].notify()

    def arrived(self) -> None:
        """End the `rest` of the thread whose turn it is."""
        with self._lock:
            self._arrived.notify()

    def rest(self, seconds: float, idle: Callable[[], bool]) -> None:
        """Wait during this thread's turn, until something has `arrived` or it is no longer ``idle``."""
        with self._lock:
            if idle():
                self._arrived.wait(seconds)

    def _wake_next(self) -> None:
        if self._waiting:
            next(iter(self._waiting.values())).notify()


class SharedEngine:
    """The engine of ``loaded`` until it is ``closed``; the threads that wait for their jobs step it in ``turns``."""

    def __init__(self, loaded: Loaded, ledger: CostLedger, turns: Turns, closed: Callable[[], bool]) -> None:
        self.jobs: dict[str, Job] = {}
        """The job of each open request, by the request's id."""
        self._loaded = loaded
        self._ledger = ledger
        self._turns = turns
        self._closed = closed
        self._inbox: deque[Request | str] = deque()  # requests to submit, and ids of requests to cancel

    def submit(self, job: Job) -> None:
        """Let the requests of a job run from the next step on."""
        for request in job.requests:
            self.jobs[request.id] = job
        self._inbox.extend(job.requests)
        self._turns.arrived()

    def abandon(self, job: Job) -> None:
        """Cancel the open requests of a job; their later events are ignored."""
        for request_id in list(job.open):
            if self.jobs.pop(request_id, None) is not None:
                self._inbox.append(request_id)
        self._turns.when_free(self._empty_inbox)

    def run_until_news(self, job: Job, check: Callable[[], None]) -> None:
        """Return as soon as a job has news, or the engine is closed; run steps meanwhile if no other thread does.

        ``check`` is called between steps, and may end the waiting by an exception.
        """
        while not job.has_news() and self._turns.take(job, lambda: job.has_news() or self._closed(), check):
            try:
                while not (job.has_news() or self._turns.wanted):
                    self._step()
                    check()
            finally:
                self._turns.release(self._empty_inbox)

    def _empty_inbox(self) -> None:
        """Submit and cancel what has arrived; during a turn."""
        engine = self._loaded.engine
        while self._inbox and not self._closed():
            arrival = self._inbox.popleft()
            if isinstance(arrival, Request):
                engine.submit(arrival, arrival.arrived)
            else:
                engine.cancel(arrival, FinishReason.CANCELLED, time.monotonic())

    def _step(self) -> None:
        engine, now = self._loaded.engine, time.monotonic()
        self._empty_inbox()
        due = engine.wake_at(now)
        if due is not None and due > now:
            self._turns.rest(due - now, lambda: not self._inbox)
            self._empty_inbox()
        events = engine.step(time.monotonic())
        now = time.monotonic()
        for event in events:
            self._ledger.fold(event, now)
        changed = {job for event in events if (job := self._take(event)) is not None}
        self._turns.notify(job for job in changed if job.has_news())

    def _take(self, event: Event) -> Job | None:
        """The job that an event has changed."""
        if not isinstance(event, Emitted | Finished | Admitted | PromptScored):
            return None
        job = self.jobs.get(event.request_id)
        if job is None:
            return None
        now = time.monotonic()
        if isinstance(event, Finished):
            self.jobs.pop(event.request_id, None)
            job.charge(event.request_id, self._ledger.cost(event.request_id))
        if job.take(event, now):
            self._loaded.engine.cancel(event.request_id, FinishReason.STOP, now)
        return job
