"""What is foreseen: how long steps take, how long answers get, and by when a request must start to be in time.

It learns from what the scheduler tells it (a first token, an end) and its times (a step's length), and decides nothing
itself. Before it has seen anything its times are guesses in the right ratios, so it makes nobody late and turns nobody
away.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from headrace.core.prediction.output_lengths import LengthPredictor
from headrace.core.prediction.step_times import StepTimes
from headrace.core.request import Request, Slo
from headrace.core.tenancy.classes import ServiceClass

NEWS = 0.05
"""What the newest first token counts in how much prompts are stretched."""

TTFT_SHARE = 0.9
"""What is planned with of the time until a first token that somebody hopes for: the rest is for what was not foreseen.
Under overload everybody starts at the last moment, and planned with all of it one in six was just too late."""

HOPEFUL_QUANTILE = 0.25
"""A deadline counts as unreachable only when even an answer as short as this quantile would miss it."""


class LatestStarts:
    """Predictions for requests of the given ``classes``, whose SLOs stand in for wishes that a request leaves open."""

    def __init__(
        self, times: StepTimes, lengths: LengthPredictor, classes: Mapping[str, ServiceClass]
    ) -> None:
        self.times = times
        self.lengths = lengths
        self._classes = classes
        self._stretch = 1.0  # a prompt's seconds from admission to first token, over what it takes alone

    def slo(self, request: Request) -> Slo:
        """The request's wishes, and its class's for what it leaves open."""
        usual = self._classes[request.service_class].slo
        ttft, tpot = request.slo
        return Slo(
            usual.ttft_seconds if ttft is None else ttft,
            usual.tpot_seconds if tpot is None else tpot,
        )

    def prefill_seconds(self, tokens: int, cached: int = 0) -> float:
        """The seconds of a prompt's computing alone, ``cached`` tokens of which are there."""
        fresh = tokens - cached
        return self.times.predict(1, fresh, fresh * cached + fresh * fresh // 2)

    def work_seconds(self, request: Request) -> float:
        """The seconds of a request alone, its answer as long as is usual."""
        prompt = len(request.tokens)
        output = self.lengths.expected(request)
        decode = self.times.predict(1, 1, prompt + int(output) // 2)
        return self.prefill_seconds(prompt) + output * decode

    def latest_start(self, request: Request, slo: Slo) -> float:
        """When a request must start for its first token to be in time; inf where nobody waits for it."""
        if slo.ttft_seconds is None or not self.times.ready:
            return math.inf
        return (
            request.arrived
            + TTFT_SHARE * slo.ttft_seconds
            - self._stretch * self.prefill_seconds(len(request.tokens))
        )

    def unreachable(self, request: Request, now: float, cached: int = 0) -> str:
        """Why a request that starts now would miss its deadline even with a short answer; empty when it may not.

        ``cached`` of its tokens need no computing.
        """
        if request.deadline is None or not self.times.ready:
            return ""
        answered = len(request.answered)
        tokens = self.lengths.quantile(request, HOPEFUL_QUANTILE, given=answered) - answered
        if tokens < 1:
            return ""
        known = len(request.tokens) + answered
        needed = self.prefill_seconds(known, cached) + (tokens - 1) * self.times.predict(1, 1, known)
        left = request.deadline - now
        if needed <= left:
            return ""
        return f"its deadline is in {max(0.0, left):.3f} s; alone it would take {needed:.3f} s at least"

    def saw_first_token(self, tokens: int, seconds: float) -> None:
        """A prompt of which ``tokens`` were computed had its first token ``seconds`` after it was admitted."""
        alone = self.prefill_seconds(tokens)
        if alone > 0:
            self._stretch += NEWS * (min(seconds / alone, 10 * self._stretch) - self._stretch)

    def saw_end(self, request: Request, output_tokens: int) -> None:
        """An answer has ended by itself."""
        self.lengths.observe(request, output_tokens)
