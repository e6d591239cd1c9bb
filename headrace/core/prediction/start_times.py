"""Predicts when a waiting request starts and ends, from step costs and answer lengths.

```
 now ──── start ──────────── first token ──────────────────── finish
     its turn, and a slot    its prompt, chunk by chunk,      a step per token, each
                             in steps that also decode        lengthened by prompts of others
```
The prediction is reported to clients: when a request is likely to start, when to retry. It ignores waiting for
memory, preemption, and better-placed requests that have yet to arrive. All of these only delay, so the prediction is
optimistic and is no reason to reject a request. Deadlines are rejected by a bound, see
`core.prediction.latest_start`.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from heapq import heapreplace
from typing import NamedTuple

from headrace.core.prediction.output_lengths import LengthPredictor
from headrace.core.prediction.step_times import StepTimes
from headrace.core.request import Request


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
