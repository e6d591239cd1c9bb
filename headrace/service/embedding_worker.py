"""Computes embeddings and scores between steps, and the calls that wait for them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np

from headrace.core.embedding import Embedded, EmbeddingSlice, InputQueue, SlicedCall, TokenRow
from headrace.core.ports import LOST_PREFIX
from headrace.core.recovery import MOST_LOSSES_OF_REQUEST
from headrace.core.request import FinishReason, RejectReason
from headrace.core.tenancy.gate import Limits, Load, Reject, decide
from headrace.core.tenancy.quota import Charge
from headrace.service.embedding_models import PoolingModel, Values
from headrace.service.service import AdmissionRate, Refused, Service


class EmbeddingFailed(RuntimeError):
    """The model raised while it computed the call's inputs."""


class BatchLost(RuntimeError):
    """What computed a batch has ended before it was complete, and is started again."""

    def __init__(self, why: str) -> None:
        super().__init__(LOST_PREFIX + why)


class EmbeddingJob:
    """The inputs ``rows`` of one call, computed by ``model``. Create it on the event loop that awaits `result`."""

    def __init__(
        self, id: str, tenant: str, task: str, model: PoolingModel, rows: Sequence[TokenRow], arrived: float
    ) -> None:
        self.id = id
        self.tenant = tenant
        self.task = task
        self.model = model
        self.rows = tuple(rows)
        self.tokens = sum(len(row.tokens) for row in rows)
        self.computed_tokens = 0
        self.losses = 0
        self.arrived = arrived
        self.hold: Charge | None = None
        self.result: asyncio.Future[Values] = asyncio.get_running_loop().create_future()
        self._values: list[Values | None] = [None] * len(self.rows)
        self._missing = len(self.rows)

    @property
    def open(self) -> bool:
        """Whether its result is still awaited."""
        return not self.result.done()

    def put(self, index: int, values: Values) -> None:
        """Store the result of one input."""
        self._values[index] = values
        self._missing -= 1
        self.computed_tokens += len(self.rows[index].tokens)

    @property
    def complete(self) -> bool:
        """Whether all inputs have been computed."""
        return not self._missing

    def finish(self) -> None:
        """Deliver the results [inputs, numbers]."""
        self.result.set_result(np.stack([each for each in self._values if each is not None]))


# Computes embeddings on the engine thread, between its steps, in slices of limited time.

logger = logging.getLogger("headrace.embedding")

SHORT_SECONDS = 0.004  # see docs/decisions/background-work.md#embeddings-on-the-engine-thread
"""Target time of a slice while a foreground request is open."""

LONG_SECONDS = 0.02
"""Target time of a slice while no foreground request is open; a request that arrives waits for its end."""

MIN_TOKENS = 64
"""Minimum tokens of a batch: below, the overhead of a layer's calls is as large as its arithmetic."""

_MEMORY = 0.3
"""Weight of the newest measurement of a layer's time."""


class Slice(NamedTuple):
    """The result of a slice: the batch's ``values`` if it is complete, its time, and that of its longest part."""

    values: Values | None
    seconds: float
    longest_seconds: float


class Batch(Protocol):
    """Inputs that are computed together."""

    async def advance(self, seconds: float) -> Slice:
        """Compute for ``seconds`` between two steps, or until all is computed, and tell of it as `EmbeddingSlice`.

        Raises:
            BatchLost: see there.
            Exception: the model raised it.
        """
        ...

    def close(self) -> None:
        """Free what it holds."""
        ...


Begin: TypeAlias = Callable[[PoolingModel, Sequence[TokenRow], tuple[SlicedCall, ...]], Batch]
"""Begins a batch of a model, with the tokens that each call has in it."""


class _LocalBatch:
    """A batch that the engine thread of this process computes."""

    def __init__(
        self, service: Service, model: PoolingModel, rows: Sequence[TokenRow], calls: tuple[SlicedCall, ...]
    ) -> None:
        self._service = service
        self._computing = model.run(rows)
        self._calls = calls

    async def advance(self, seconds: float) -> Slice:
        """See `Batch.advance`."""
        return await self._service.between_steps(partial(self._slice, seconds))

    def close(self) -> None:
        """Stop the model between two parts."""
        with suppress(ValueError):  # stopped during a slice, which the engine thread still runs
            self._computing.close()

    def _slice(self, seconds: float) -> Slice:
        """On the engine thread: run `advance` and report its time."""
        began = self._service.now()
        try:
            return advance(self._computing, seconds)
        finally:
            self._service.thread.tell(EmbeddingSlice(began, self._service.now(), self._calls))


class EmbeddingWorker:
    """Admits calls, and computes the inputs of tenants in turn.

    ``limits`` bound the queue. ``ratio`` is the maximum time of slices, as a share of the time of the steps of
    foreground requests; 0: no limit. Batches ``begin`` on the engine thread, or where that is.
    """

    def __init__(self, service: Service, limits: Limits, ratio: float, begin: Begin | None = None) -> None:
        self._service = service
        self._limits = limits
        self._ratio = ratio
        self._begin = begin or partial(_LocalBatch, service)
        self._queues: dict[PoolingModel, InputQueue[EmbeddingJob]] = {}
        self._open: set[EmbeddingJob] = set()
        self._part_seconds: dict[PoolingModel, float] = {}  # per token, of one layer or part
        self._admissions = AdmissionRate()
        self._task: asyncio.Task[None] | None = None
        self._spent = self._spent_at = 0.0  # the last slice's time, and its end
        self.busy_seconds = 0.0
        """Time of all slices since the start."""

    @property
    def open_calls(self) -> int:
        """Number of calls that have not ended."""
        return len(self._open)

    @property
    def waiting_tokens(self) -> int:
        """Tokens of queued inputs."""
        return sum(queue.tokens for queue in self._queues.values())

    def submit(self, job: EmbeddingJob) -> None:
        """Queue the inputs of a call; its `result` is set later. Always call `end` afterwards.

        Raises:
            Refused: the queue is full, the tenant's quota is used up, or the server is draining.
        """
        service, now = self._service, self._service.now()
        load = Load(
            len(self._open),
            self.waiting_tokens,
            self._admissions.value(now),
            service.draining,
            service.paused,
        )
        shortage = service.meter.shortage_of(job.tenant, job.model.name, job.tokens, now)
        verdict = decide(load, 1, job.tokens, self._limits, shortage)
        if isinstance(verdict, Reject):
            self._report(job, FinishReason.REJECTED, verdict.reason)
            raise Refused(verdict, service.meter.rooms(job.tenant, now, job.model.name))
        job.hold = service.meter.hold(job.tenant, job.model.name, job.tokens, now)
        service.enter()
        self._admissions.count(now)
        self._open.add(job)
        unit = job.model.unit_tokens
        lengths = [-(-len(row.tokens) // unit) * unit for row in job.rows]
        self._queues.setdefault(job.model, InputQueue()).add(job, job.tenant, lengths)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._work())

    def end(self, job: EmbeddingJob, why: FinishReason) -> None:
        """End a call and drop its queued inputs. Ending it again does nothing."""
        if job not in self._open:
            return
        self._open.remove(job)
        self._queues[job.model].remove(job)
        if job.open:
            job.result.cancel()
        if job.hold is not None:
            self._service.meter.settle(job.hold, job.computed_tokens, self._service.now())
        self._report(job, why)
        self._service.leave()

    def start(self) -> None:
        """Do nothing: the worker starts with its first call."""

    async def stop(self) -> None:
        """End all calls."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        for job in tuple(self._open):
            self.end(job, FinishReason.CANCELLED)

    def _report(self, job: EmbeddingJob, why: FinishReason, rejected: RejectReason | None = None) -> None:
        seconds = self._service.now() - job.arrived
        self._service.note(
            Embedded(
                *(job.id, job.tenant, job.task, len(job.rows), job.tokens, job.computed_tokens, seconds),
                why,
                rejected,
            )
        )

    async def _work(self) -> None:
        """Compute all queued inputs, a batch of each model in turn."""
        try:
            while any(self._queues.values()):
                for model, queue in tuple(self._queues.items()):
                    if queue:
                        await self._compute(model, queue.take(self._batch_tokens(model)))
        finally:
            self._task = None

    async def _compute(self, model: PoolingModel, inputs: Sequence[tuple[EmbeddingJob, int]]) -> None:
        """Compute a batch; if it fails or is lost, compute the inputs of each of its calls separately."""
        try:
            values = await self._run(model, inputs)
        except Exception as error:
            jobs, lost = {job for job, _ in inputs}, isinstance(error, BatchLost)
            for job in jobs:
                job.losses += lost  # it may be the cause
                if (job.losses <= MOST_LOSSES_OF_REQUEST) if lost else len(jobs) > 1:
                    await self._compute(model, [each for each in inputs if each[0] is job])
                else:
                    logger.error("embedding failed", exc_info=error, extra={"fields": {"id": job.id}})
                    self._fail(job, error)
            return
        if values is None:
            return
        for (job, index), each in zip(inputs, values, strict=True):
            if job.open:
                job.put(index, each)
                if job.complete:
                    job.finish()

    def _fail(self, job: EmbeddingJob, error: Exception) -> None:
        if job.open:
            self._queues[job.model].remove(job)
            job.result.set_exception(EmbeddingFailed(str(error)))

    async def _run(self, model: PoolingModel, inputs: Sequence[tuple[EmbeddingJob, int]]) -> Values | None:
        """The values of a batch; None if all of its calls have ended."""
        rows = [job.rows[index] for job, index in inputs]
        batch = self._begin(model, rows, _calls(inputs))
        tokens, longest = sum(len(row.tokens) for row in rows), 0.0
        try:
            while any(job.open for job, _ in inputs):
                await self._rest()
                target = SHORT_SECONDS if self._service.awaited else LONG_SECONDS
                done = await batch.advance(target)
                self.busy_seconds += done.seconds
                self._spent, self._spent_at = done.seconds, self._service.now()
                longest = max(longest, done.longest_seconds)
                if done.values is not None:
                    self._learn(model, longest / tokens)
                    return done.values
            return None
        finally:
            batch.close()

    async def _rest(self) -> None:
        """Wait until the steps have had their share of time after the last slice."""
        if self._ratio > 0 and self._service.awaited:
            await asyncio.sleep(self._spent_at + self._spent / self._ratio - self._service.now())

    def _batch_tokens(self, model: PoolingModel) -> int:
        """Maximum tokens of a batch for which one layer fits into a slice."""
        each = self._part_seconds.get(model)
        target = SHORT_SECONDS if self._service.awaited else LONG_SECONDS
        wanted = MIN_TOKENS if each is None else int(target / each)
        return min(model.batch_tokens, max(MIN_TOKENS, wanted))

    def _learn(self, model: PoolingModel, seconds: float) -> None:
        known = self._part_seconds.get(model, seconds)
        self._part_seconds[model] = known + _MEMORY * (seconds - known)


def _calls(inputs: Sequence[tuple[EmbeddingJob, int]]) -> tuple[SlicedCall, ...]:
    """The calls of a batch, with their tokens in it."""
    tokens: dict[EmbeddingJob, int] = {}
    for job, index in inputs:
        tokens[job] = tokens.get(job, 0) + len(job.rows[index].tokens)
    return tuple(SlicedCall(job.id, job.tenant, count) for job, count in tokens.items())


def advance(computing: Generator[None, None, Values], seconds: float) -> Slice:
    """On the engine thread: continue a batch until its end, or for ``seconds``."""
    began = last = time.perf_counter()
    longest = 0.0
    while True:
        values: Values | None = None
        try:
            next(computing)
        except StopIteration as end:
            values = end.value
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
        if values is not None or now - began >= seconds:
            return Slice(values, now - began, longest)
