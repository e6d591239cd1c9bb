"""The cache warmer: computes probable requests into the caches in idle time.

```
 POST /v1/cache/warm ──> jobs ──┐         idle? allowance left?
 history, best first ───────────┴──> up to ``batch`` at once ──> caches
                                      pause: jobs go back; what they computed is resumed next time
```
Its requests have the background class: the scheduler runs them only while no other class has work, and stops them at
the next arrival. To keep the event loop free, none begins while a request is being read or answered, and each begins
only when the one before has been parsed and rendered. ``compute``, which is passed in, handles the request format.
Pairs of requests that the semantic cache wants compared come first, since each is one token.

`BackgroundRequests` computes them. It has the interface of `lookup.CacheLookup`, so that a request computed ahead is
parsed, rendered and keyed by the same code as the later request that is served from the cache.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from enum import StrEnum
from functools import partial
from typing import NamedTuple

from headrace.core.events import Arrived, Event, Finished
from headrace.core.request import FinishReason
from headrace.core.tenancy.tenants import is_awaited
from headrace.response_cache.history import MOST_PREFIXES, History, Recorded
from headrace.response_cache.lookup import CacheLookup
from headrace.response_cache.query import CacheQuery, LookupRequest
from headrace.response_cache.rules.pairs import Pair
from headrace.response_cache.rules.warming import IdleDetector, choose
from headrace.response_cache.single_flight import Computation
from headrace.service.answer import Answer

logger = logging.getLogger(__name__)

ID_PREFIX = "warm-"
"""Prefix of the ids of background requests."""


class NotCacheable(Exception):
    """The response could not be cached; the message says why."""


class _PendingAnswer(Answer):
    """An answer without tokens, which ends once all ``computations`` (of what is not cached yet) have ended."""

    def __init__(self, queries: Sequence[CacheQuery]) -> None:
        super().__init__([query.request for query in queries], interval=0)
        self.computations: list[Computation] = []


class BackgroundRequests:
    """Computes requests into the caches of ``lookup``."""

    def __init__(self, lookup: CacheLookup) -> None:
        self._lookup = lookup
        self._opened = 0

    def now(self) -> float:
        """The time of arrivals and deadlines."""
        return self._lookup.now()

    async def open(self, lookups: Sequence[LookupRequest], interval: int = 1, paced: bool = False) -> Answer:
        """Begin to compute what is not cached yet.

        Raises:
            NotCacheable: a response could not be cached.
            Refused: as `CacheLookup.open`.
        """
        queries = [self._lookup.query(self._rename(each)) for each in lookups]
        for query in queries:
            if not query.allowed.exact or query.allowed.pool:
                raise NotCacheable(query.allowed.why or "a pool of samples is filled by its own requests")
        pending = _PendingAnswer(queries)
        try:
            for index, query in enumerate(queries):
                await self._begin(pending, index, query)
        except BaseException:
            self.close(pending)
            raise
        pending.note = "computed" if pending.computations else "kept"
        return pending

    def close(self, answer: Answer, why: FinishReason = FinishReason.CANCELLED) -> None:
        """Cancel unfinished computations; their tokens so far are stored and resumed later."""
        if isinstance(answer, _PendingAnswer):
            for computation in answer.computations:
                self._lookup.give_up(computation, why)

    def stop_sequence(self, answer: Answer, index: int) -> None:
        """A computation finds its stop strings itself."""

    async def _begin(self, pending: _PendingAnswer, index: int, query: CacheQuery) -> None:
        computation = None if await self._lookup.is_cached(query) else self._lookup.renew(query)
        if computation is None:  # cached, or being computed for another request
            pending.tell(index, Finished(query.request.id, FinishReason.STOP, 0, 0, 0))
        else:
            pending.computations.append(computation)
            computation.when_over(partial(self._end, pending, index, computation))

    def _end(self, pending: _PendingAnswer, index: int, computation: Computation) -> None:
        assert computation.end is not None
        pending.tell(index, computation.end)

    def _rename(self, lookup: LookupRequest) -> LookupRequest:
        self._opened += 1
        return lookup._replace(request=replace(lookup.request, id=f"{ID_PREFIX}{self._opened}"))


TICK_SECONDS = 0.1
"""Interval of the checks whether the server is idle."""

PREFIX_SECONDS = 120.0
"""Interval at which a registered prefix is computed again, so that it is not evicted."""

REFILL_SECONDS = 60.0
"""Interval at which the history is read again after all its candidates have been processed."""

HOUR = 3600.0
MAX_JOBS = 100_000
MAX_PROCESSED = 100_000


Job = Recorded | Pair
"""A request to compute, or two to compare."""

Begun = Callable[[], None]
"""Called when a request has been parsed and only waits for its response."""


class Outcome(StrEnum):
    """The result of a job."""

    COMPUTED = "computed"
    KEPT = "kept"
    REFUSED = "refused"


class WarmState(NamedTuple):
    """The warmer's progress; ``spent_seconds`` and ``left_seconds`` are the current hour's device time."""

    quiet: bool
    arrivals_per_second: float
    prefixes: int
    waiting: int
    running: int
    computed: int
    kept: int
    refused: int
    spent_seconds: float
    left_seconds: float


class _Job(NamedTuple):
    work: Job
    key: bytes | None  # in the history


class _Allowance:
    """Seconds of device time per hour."""

    def __init__(self, seconds: float, now: float) -> None:
        self._seconds = seconds
        self._hour = now
        self.spent = 0.0

    def spend(self, seconds: float, now: float) -> None:
        self.left(now)
        self.spent += seconds

    def left(self, now: float) -> float:
        if now - self._hour >= HOUR:
            self._hour, self.spent = now, 0.0
        return max(0.0, self._seconds - self.spent)


class Warmer:
    """A `core.ports.Watcher` that counts arrivals and works while they are few.

    Args:
        compute: computes one request into the caches; cancelled when other requests arrive.
        busy: whether a request is being read or answered.
        window: decides whether traffic is low.
        clock, wall: seconds, and Unix time.
        batch: requests computed at once.
        seconds_per_hour: device time that warming may use per hour.
        horizon_seconds: how far ahead demand is predicted: the time until a response expires.
        history: the source of candidates.
        pairs: takes the next pair of requests to compare, if there is one.
    """

    fold_tokens = None

    def __init__(
        self,
        compute: Callable[[Job, Begun], Awaitable[Outcome]],
        busy: Callable[[], bool],
        window: IdleDetector,
        clock: Callable[[], float],
        wall: Callable[[], float],
        *,
        batch: int,
        seconds_per_hour: float,
        horizon_seconds: float,
        history: History | None = None,
        pairs: Callable[[], Pair | None] = lambda: None,
    ) -> None:
        self._compute = compute
        self._pairs = pairs
        self._busy = busy
        self._window = window
        self._clock = clock
        self._wall = wall
        self._batch = batch
        self._allowance = _Allowance(seconds_per_hour, clock())
        self._horizon_seconds = horizon_seconds
        self._history = history
        self._waiting: deque[_Job] = deque()
        self._running: dict[asyncio.Task[Outcome], _Job] = {}
        self._counts = dict.fromkeys(Outcome, 0)
        self._processed: set[bytes] = set()
        self._prefixes: dict[Recorded, float] = {}  # with the time when each is due
        self._refill_at = clock()
        self._ticked = clock()
        self._loop_task: asyncio.Task[None] | None = None
        self.settled = history is None
        """Whether the history's candidates at start have been processed, or the allowance is used up."""

    def start(self) -> None:
        """Start on the running loop."""
        self._loop_task = asyncio.get_running_loop().create_task(self._work())

    async def stop(self) -> None:
        """Stop all jobs."""
        if self._loop_task is not None:
            self._loop_task.cancel()
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def fold(self, event: Event, now: float) -> None:
        """Count an arrival, which may end the idle time."""
        if type(event) is Arrived and is_awaited(event.service_class):
            self._window.arrived(now)

    def add(self, requests: Iterable[Recorded]) -> int:
        """Queue requests to compute in idle time; returns how many were accepted."""
        taken = 0
        for request in requests:
            if len(self._waiting) >= MAX_JOBS:
                break
            self._waiting.append(_Job(request, None))
            taken += 1
        return taken

    async def keep_warm(self, tenant: str, prefix: Recorded) -> None:
        """Compute a prompt prefix regularly; with a history, also after a restart.

        It takes the place of the one registered first if there are `MOST_PREFIXES`.
        """
        if prefix in self._prefixes:
            return
        self._prefixes[prefix] = self._clock() + PREFIX_SECONDS
        if len(self._prefixes) > MOST_PREFIXES:
            del self._prefixes[next(iter(self._prefixes))]
        self._compute_first(prefix)
        if self._history is not None:
            await self._history.register(tenant, prefix)

    async def refill(self) -> int:
        """Queue the history's best candidates; returns their number."""
        if self._history is None:
            return 0
        wall, left = self._wall(), self._allowance.left(self._clock())
        candidates = await self._history.candidates(wall)
        waiting = {job.key for job in (*self._waiting, *self._running.values())}
        fresh = [c for c in candidates if c.key not in self._processed and c.key not in waiting]
        chosen = choose(fresh, wall, self._horizon_seconds, left)
        found = [(choice.key, await self._history.recorded(choice.key)) for choice in chosen]
        self._waiting.extend(_Job(request, key) for key, request in found if request is not None)
        return len(found)

    def state(self) -> WarmState:
        """The current progress."""
        now = self._clock()
        return WarmState(
            quiet=self._window.open(now),
            arrivals_per_second=self._window.rate(now),
            prefixes=len(self._prefixes),
            waiting=len(self._waiting),
            running=len(self._running),
            computed=self._counts[Outcome.COMPUTED],
            kept=self._counts[Outcome.KEPT],
            refused=self._counts[Outcome.REFUSED],
            left_seconds=self._allowance.left(now),
            spent_seconds=self._allowance.spent,
        )

    async def _work(self) -> None:
        if self._history is not None:
            now = self._clock()
            self._prefixes.update(dict.fromkeys(await self._history.prefixes(), now))
        while True:
            try:
                await self._tick()
            except Exception:  # a fault in warming must not stop the task
                logger.exception("cache warming failed; it continues")
            await asyncio.sleep(TICK_SECONDS)

    async def _tick(self) -> None:
        now = self._clock()
        if self._running:
            self._allowance.spend(now - self._ticked, now)
        self._ticked = now
        if not self._window.open(now) or not self._allowance.left(now):
            self._pause()
            self.settled = self.settled or not self._allowance.left(now)
            return
        if not self._waiting and not self._running and now >= self._refill_at and not await self.refill():
            self._refill_at = now + REFILL_SECONDS
            self.settled = True
        self._renew_prefixes(now)
        while len(self._running) < self._batch and not self._busy() and (job := self._next()):
            await self._begin(job)

    def _next(self) -> _Job | None:
        if (pair := self._pairs()) is not None:
            return _Job(pair, None)
        return self._waiting.popleft() if self._waiting else None

    def _renew_prefixes(self, now: float) -> None:
        due = [prefix for prefix, at in self._prefixes.items() if now >= at]
        if not due:
            return
        waiting = {job.work for job in (*self._waiting, *self._running.values())}
        for prefix in due:
            self._prefixes[prefix] = now + PREFIX_SECONDS
            if prefix not in waiting:
                self._compute_first(prefix)

    def _compute_first(self, prefix: Recorded) -> None:
        if len(self._waiting) < MAX_JOBS:  # otherwise when it is due again
            self._waiting.appendleft(_Job(prefix, None))

    async def _begin(self, job: _Job) -> None:
        begun = asyncio.Event()
        task = asyncio.get_running_loop().create_task(self._run(job, begun.set))
        self._running[task] = job
        task.add_done_callback(self._ended)
        task.add_done_callback(lambda _: begun.set())
        await begun.wait()

    async def _run(self, job: _Job, begun: Begun) -> Outcome:
        return await self._compute(job.work, begun)

    def _ended(self, task: asyncio.Task[Outcome]) -> None:
        job = self._running.pop(task, None)
        if job is None or task.cancelled():
            return
        error = task.exception()
        if error is not None:
            logger.error("a request could not be computed ahead", exc_info=error)
        self._counts[Outcome.REFUSED if error is not None else task.result()] += 1
        if job.key is not None:
            if len(self._processed) >= MAX_PROCESSED:
                self._processed.clear()
            self._processed.add(job.key)

    def _pause(self) -> None:
        """Cancel running jobs and put them back at the front of the queue."""
        jobs: Sequence[_Job] = tuple(self._running.values())
        running, self._running = self._running, {}
        for task in running:
            task.cancel()
        self._waiting.extendleft(reversed(jobs))
