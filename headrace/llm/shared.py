"""One engine for the calls of several threads: their requests run in the same steps.

```
 call 1 ─ submit ┐                      ┌ events of call 1 ─ its job
 call 2 ─ submit ┴─ inbox ─ engine.step ┴ events of call 2 ─ its job
```
There is no engine thread. Of the threads that wait for their jobs one runs the steps, for the requests of all. When its
own job has news it returns to its caller, and another waiting thread goes on.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from headrace.core.events import Admitted, Emitted, Event, Finished, PromptScored
from headrace.core.request import FinishReason, Request
from headrace.llm.job import Job
from headrace.llm.turns import Turns
from headrace.observe.cost.ledger import CostLedger
from headrace.wiring.model import Loaded


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
