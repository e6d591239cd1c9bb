"""When a request will start and end, from what steps cost and how long answers are.

```
 now ──── start ──────────── first token ──────────────────── finish
     its turn, and a slot    its prompt, chunk by chunk,      a step per token,
                             beside those that decode         each stretched by others' prompts
```
It is told to people: when a request is likely to start, when to come again. Left out are waiting for memory, being
preempted, and requests of greater right that have yet to come, all of which only delay: it leans to the early side, and
is no ground to refuse anybody. Deadlines are refused on a bound, see `core.prediction.latest_start`.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from heapq import heapreplace
from typing import NamedTuple

from headrace.core.prediction.output_lengths import LengthPredictor
from headrace.core.prediction.step_times import StepTimes
from headrace.core.request import Request


class Batch(NamedTuple):
    """Those that decode meanwhile: rows, and the sum of their contexts."""

    rows: int
    contexts: int


class Ahead(NamedTuple):
    """What must happen before a request may start.

    ``work_seconds``: of the prompts that go before it in its line, on the whole device. ``share``: of the device that
    its line gets, above 0 and up to 1. ``steps_left``: of those that run, until each gives its slot back. ``lives``:
    the steps of those that take a slot before it does, in the order in which they do.
    """

    work_seconds: float
    share: float
    free_slots: int
    steps_left: Many[float]
    lives: Many[float]


class Forecast(NamedTuple):
    """Seconds from now until a request starts, shows its first token, and ends."""

    start: float
    first_token: float
    finish: float


class Forecaster:
    """Forecasts from one model of steps and one of answers; ``chunk_tokens`` of a prompt are computed in a step."""

    def __init__(self, times: StepTimes, lengths: LengthPredictor, chunk_tokens: int) -> None:
        self._times = times
        self._lengths = lengths
        self._chunk_tokens = chunk_tokens

    def expected(
        self, request: Request, ahead: Ahead, beside: Batch, cached: int = 0, stretch: float = 1.0
    ) -> Forecast:
        """What is likely, as things are.

        Args:
            request: that waits.
            ahead: what must happen before it may start.
            beside: those that decode now, taken to stay as many.
            cached: tokens of its prompt that need no computing.
            stretch: how much longer steps last for the prompts of others: at most 1 + `Knobs.mixed_prefill_ratio`.
        """
        start = max(ahead.work_seconds / ahead.share, self._slot_seconds(ahead, beside, stretch))
        first = start + self.prefill_seconds(cached, len(request.tokens) - cached, beside)
        further = self._lengths.expected(request) - 1
        return Forecast(start, first, first + further * self._step_seconds(request, beside) * stretch)

    def prefill_seconds(self, start: int, tokens: int, beside: Batch) -> float:
        """Until positions ``[start, start + tokens)`` have been computed, in chunks beside those that decode."""
        steps = -(-tokens // self._chunk_tokens)
        decoding = self._times.predict(beside.rows + 1, beside.rows, beside.contexts)
        contexts = tokens * start + tokens * tokens // 2
        return steps * decoding + self._times.predict(0, tokens, contexts) - self._times.predict(0, 0, 0)

    def _step_seconds(self, request: Request, beside: Batch) -> float:
        """A step that decodes this request, at the context of its prompt, beside the others."""
        rows = beside.rows + 1
        return self._times.predict(rows, rows, beside.contexts + len(request.tokens))

    def _slot_seconds(self, ahead: Ahead, beside: Batch, stretch: float) -> float:
        """Until there is a slot: whoever goes before takes the one that is free soonest, for all of its life."""
        free = [0.0] * ahead.free_slots + sorted(ahead.steps_left)
        for life in ahead.lives:
            heapreplace(free, free[0] + life)
        return free[0] * self._times.predict(beside.rows, beside.rows, beside.contexts) * stretch
