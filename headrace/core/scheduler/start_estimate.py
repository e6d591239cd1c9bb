"""Position in the queue and predicted start of a waiting request.

It is computed on demand for one request, between two steps. It reads the queue and the running set, and changes
nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from headrace.core.prediction.latest_start import LatestStarts
from headrace.core.prediction.start_times import Batch, Forecast, Forecaster, WorkAhead
from headrace.core.queueing.fair_queue import FairQueue
from headrace.core.scheduler.running_set import RunningSet
from headrace.core.sequence import Sequence
from headrace.core.tenancy.fair_share import TenantAccount

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
