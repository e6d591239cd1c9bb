"""Position in the queue and predicted start of a waiting request.

It is computed on demand for one request, between two steps. It reads the queue and the running set, and changes
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from heapq import heapreplace
from typing import NamedTuple

from headrace.core.prediction.latest_start import LatestStarts
from headrace.core.prediction.output_lengths import LengthPredictor
from headrace.core.prediction.step_times import StepTimes
from headrace.core.queueing.fair_queue import FairQueue
from headrace.core.request import Request
from headrace.core.scheduler.running_set import RunningSet
from headrace.core.sequence import Sequence
from headrace.core.tenancy.fair_share import TenantAccount

# Predicts when a waiting request starts and ends, from step costs and answer lengths.
#
#  now ──── start ──────────── first token ──────────────────── finish
#      its turn, and a slot    its prompt, chunk by chunk,      a step per token, each
#                              in steps that also decode        lengthened by prompts of others
# The prediction is reported to clients: when a request is likely to start, when to retry. It ignores waiting for
# memory, preemption, and better-placed requests that have yet to arrive. All of these only delay, so the prediction is
# optimistic and is no reason to reject a request. Deadlines are rejected by a bound, see
# `core.prediction.latest_start`.


class Batch(NamedTuple):
    """The decoding batch: its rows, and the sum of their contexts."""

    rows: int
    contexts: int


class WorkAhead(NamedTuple):
    """The work that must be done before a request may start.

    ``work_seconds``: prefill time of the requests ahead in its queue, on the whole device. ``share``: the share of the
    device that its queue gets, above 0 and up to 1. ``steps_left``: steps of each running request until it releases
    its slot. ``waiting_steps``: steps of the requests that get a slot before, in that order.
    """

    work_seconds: float
    share: float
    free_slots: int
    steps_left: Many[float]
    waiting_steps: Many[float]


class Forecast(NamedTuple):
    """Seconds from now until a request starts, emits its first token, and finishes."""

    start: float
    first_token: float
    finish: float


class Forecaster:
    """Predicts from one model of steps and one of lengths; a step computes ``chunk_tokens`` of a prompt."""

    def __init__(self, times: StepTimes, lengths: LengthPredictor, chunk_tokens: int) -> None:
        self._times = times
        self._lengths = lengths
        self._chunk_tokens = chunk_tokens

    def expected(
        self, request: Request, ahead: WorkAhead, batch: Batch, cached: int = 0, slowdown: float = 1.0
    ) -> Forecast:
        """The expected times, if conditions stay as they are.

        Args:
            request: the waiting request.
            ahead: what must happen before it may start.
            batch: the decoding batch, assumed to stay as it is.
            cached: tokens of its prompt that need no computation.
            slowdown: factor by which the prompts of other requests lengthen steps, at most
                1 + `Knobs.mixed_prefill_ratio`.
        """
        start = max(ahead.work_seconds / ahead.share, self._slot_seconds(ahead, batch, slowdown))
        first = start + self.prefill_seconds(cached, len(request.tokens) - cached, batch)
        further = self._lengths.expected(request) - 1
        return Forecast(start, first, first + further * self._step_seconds(request, batch) * slowdown)

    def prefill_seconds(self, start: int, tokens: int, batch: Batch) -> float:
        """Seconds until positions ``[start, start + tokens)`` have been computed, in chunks and in the same
        steps as the decoding batch.
        """
        steps = -(-tokens // self._chunk_tokens)
        curve = self._times.curve
        decoding = curve.seconds(batch.rows, batch.contexts)
        contexts = tokens * start + tokens * tokens // 2
        return steps * decoding + curve.seconds(tokens, contexts) - curve.seconds(0)

    def _step_seconds(self, request: Request, batch: Batch) -> float:
        """Seconds of a step that decodes this request, at the context of its prompt, with the others."""
        rows = batch.rows + 1
        return self._times.curve.seconds(rows, batch.contexts + len(request.tokens))

    def _slot_seconds(self, ahead: WorkAhead, batch: Batch, slowdown: float) -> float:
        """Seconds until a slot is free: each request ahead takes the slot that is free soonest, until it ends."""
        free = [0.0] * ahead.free_slots + sorted(ahead.steps_left)
        for steps in ahead.waiting_steps:
            heapreplace(free, free[0] + steps)
        return free[0] * self._times.curve.seconds(batch.rows, batch.contexts) * slowdown


TOLERANCE = 1e-9
"""Tolerance for shares whose ratios are whole numbers but not exact in floats."""


class StartEstimate(NamedTuple):
    """About ``position`` requests are served before this one; ``forecast`` is None while too few steps have been
    observed.
    """

    position: int
    forecast: Forecast | None


def estimate_start(
    sequence: Sequence,
    waiting: FairQueue,
    running: RunningSet,
    predictions: LatestStarts | None,
    chunk_tokens: int,
) -> StartEstimate:
    """Estimate the start of a waiting request if no further request arrives; a step computes ``chunk_tokens`` of
    prompts.

    Tenant queues move in proportion to their shares: while this queue advances by one, a queue with twice the share
    advances by two.
    """
    account = sequence.account
    share = _share(account)
    before = next(line.ahead_of(sequence) for other, line in waiting.tenant_queues() if other is account)
    others = sum(
        min(len(line), int((len(before) + 1) * _share(other) / share + TOLERANCE) if share else len(line))
        for other, line in waiting.tenant_queues()
        if line and other is not account
    )
    position = len(before) + others
    if predictions is None or not predictions.times.ready or not share:
        return StartEstimate(position, None)
    lengths = predictions.lengths

    def steps_left(each: Sequence) -> float:
        return lengths.expected(each.request, each.output_tokens) - each.output_tokens

    waiting_steps = [steps_left(each) for each in before]
    mean_steps = (sum(waiting_steps) + steps_left(sequence)) / (len(waiting_steps) + 1)
    ahead = WorkAhead(
        work_seconds=sum(predictions.prefill_seconds(each.known, each.cached_tokens) for each in before),
        share=share,
        free_slots=running.free_slots,
        steps_left=[steps_left(each) for each in running],
        waiting_steps=[mean_steps] * others + waiting_steps,
    )
    batch = Batch(len(running), sum(each.known for each in running))
    forecaster = Forecaster(predictions.times, lengths, chunk_tokens)
    return StartEstimate(position, forecaster.expected(sequence.request, ahead, batch))


def _share(account: TenantAccount) -> float:
    """Share of the device that a tenant gets while all classes and tenants are busy; 0: only what others leave."""
    owner = account.owner
    if not owner.rate:
        return 0.0
    return min(1.0, 1 / owner.rate) / max(1.0, account.rate * owner.weight)


def estimate_fields(estimate: StartEstimate | None) -> dict[str, float] | None:
    """The estimate as plain values for JSON, in seconds from now; None if the request does not wait."""
    if estimate is None:
        return None
    plain: dict[str, float] = {"position": estimate.position}
    if estimate.forecast is not None:
        start, first_token, finish = estimate.forecast
        plain["predicted_start_seconds"] = start
        plain["predicted_first_token_seconds"] = first_token
        plain["predicted_finish_seconds"] = finish
    return plain
