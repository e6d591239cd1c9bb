"""When a request will start and end, from what steps cost and how long answers are.

```
 now ──── start ──────────── first token ──────────────────── finish
     its turn, and a slot    its prompt, chunk by chunk,      a step per token,
                             beside those that decode         each stretched by others' prompts
```
Two answers, for two questions. `expected` is told to people: when a request is likely to start, when to come again.
`earliest` is a bound: with nobody ahead, the whole device, and a short answer. What misses its deadline even so is
turned away at once; what `expected` says may be late for many reasons and is no ground to refuse anybody.

Left out of both: waiting for memory, being preempted, and requests of greater right that have yet to come. All three
only delay, so `earliest` stays a bound.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import NamedTuple

from headrace.core.cost import StepTimes
from headrace.core.lengths import LengthPredictor
from headrace.core.request import Request

SHORT = 0.1
"""The quantile of its output that an answer is taken to reach at least: of those just refused, one in ten was short."""


class Batch(NamedTuple):
    """Those that decode meanwhile: rows, and the sum of their contexts."""

    rows: int
    contexts: int


ALONE = Batch(0, 0)


class Ahead(NamedTuple):
    """What must happen before a request may start.

    ``work_seconds``: of the prompts that go before it in its line, on the whole device. ``share``: of the device that
    its line gets, above 0 and up to 1. ``requests``: those that take a slot before it does. ``steps_left``: of those
    that run, which give a slot back.
    """

    work_seconds: float
    share: float
    requests: int
    free_slots: int
    steps_left: Many[float]


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

    def earliest(self, request: Request, cached: int = 0) -> Forecast:
        """What is not undercut unless the answer is among the shortest (`SHORT`), or steps get faster."""
        first = self.prefill_seconds(cached, len(request.tokens) - cached, ALONE)
        further = self._lengths.quantile(request, SHORT) - 1
        return Forecast(0.0, first, first + further * self._step_seconds(request, ALONE))

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
        """Until there is a slot: those that run end one after the other, and so do those that take their places."""
        place = ahead.requests - ahead.free_slots
        if place < 0 or not ahead.steps_left:
            return 0.0
        ends = sorted(ahead.steps_left)
        rounds, turn = divmod(place, len(ends))
        life = 2 * sum(ends) / len(ends)  # those that run are halfway through, one with another
        step = self._times.predict(beside.rows, beside.rows, beside.contexts)
        return (ends[turn] + rounds * life) * step * stretch
