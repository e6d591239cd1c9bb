"""The latest start at which a request still meets its latency target, from predicted step times and output lengths.

It learns from first tokens, finished requests and step durations, and makes no decisions. Until enough steps have been
observed, no request counts as late and none is rejected.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from headrace.core.prediction.output_lengths import LengthPredictor
from headrace.core.prediction.step_times import StepTimes
from headrace.core.request import Request, Slo
from headrace.core.tenancy.tenants import ServiceClass

NEW_WEIGHT = 0.05
"""Weight of the newest first token in the mean slowdown of prefill."""

TTFT_SHARE = 0.9  # see docs/decisions/scheduling.md#margin-of-the-latest-start
"""Share of a TTFT target that planning uses; the rest covers prediction errors. Under overload every request starts
at the last moment, and with a share of 1, one request in six was just too late."""

OPTIMISTIC_QUANTILE = 0.25
"""A deadline counts as unreachable only when even an answer as short as this quantile would miss it."""


class LatestStarts:
    """Predictions for requests of the given ``classes``, whose latency targets are the defaults of their requests."""

    def __init__(
        self, times: StepTimes, lengths: LengthPredictor, classes: Mapping[str, ServiceClass]
    ) -> None:
        self.times = times
        self.lengths = lengths
        self._classes = classes
        self._slowdown = 1.0  # time from admission to first token, over that of the prompt alone

    def slo(self, request: Request) -> Slo:
        """The latency targets of the request; those of its class where it has none."""
        usual = self._classes[request.service_class].slo
        ttft, tpot = request.slo
        return Slo(
            usual.ttft_seconds if ttft is None else ttft,
            usual.tpot_seconds if tpot is None else tpot,
        )

    def prefill_seconds(self, tokens: int, cached: int = 0) -> float:
        """Seconds of a prompt's prefill when it runs alone, with ``cached`` of its tokens already computed."""
        fresh = tokens - cached
        return self.times.curve.seconds(fresh, fresh * cached + fresh * fresh // 2)

    def work_seconds(self, request: Request) -> float:
        """Seconds of a request when it runs alone, with an answer of expected length."""
        prompt = len(request.tokens)
        output = self.lengths.expected(request)
        decode = self.times.curve.seconds(1, prompt + int(output) // 2)
        return self.prefill_seconds(prompt) + output * decode

    def latest_start(self, request: Request, slo: Slo) -> float:
        """The latest start at which the first token meets its target; inf without a target."""
        if slo.ttft_seconds is None or not self.times.ready:
            return math.inf
        return (
            request.arrived
            + TTFT_SHARE * slo.ttft_seconds
            - self._slowdown * self.prefill_seconds(len(request.tokens))
        )

    def unreachable(self, request: Request, now: float, cached: int = 0) -> str:
        """Why a request that starts now would miss its deadline even with a short answer; empty if it may meet it.

        ``cached`` of its tokens need no computation.
        """
        if request.deadline is None or not self.times.ready:
            return ""
        answered = len(request.answered)
        tokens = self.lengths.quantile(request, OPTIMISTIC_QUANTILE, given=answered) - answered
        if tokens < 1:
            return ""
        known = len(request.tokens) + answered
        needed = self.prefill_seconds(known, cached) + (tokens - 1) * self.times.curve.seconds(1, known)
        left = request.deadline - now
        if needed <= left:
            return ""
        return f"its deadline is in {max(0.0, left):.3f} s, but it needs at least {needed:.3f} s alone"

    def observe_first_token(self, tokens: int, seconds: float) -> None:
        """Observe that a prompt with ``tokens`` computed tokens had its first token ``seconds`` after admission."""
        alone = self.prefill_seconds(tokens)
        if alone > 0:
            self._slowdown += NEW_WEIGHT * (min(seconds / alone, 10 * self._slowdown) - self._slowdown)

    def observe_finish(self, request: Request, output_tokens: int) -> None:
        """Observe the length of an answer that finished by itself."""
        self.lengths.observe(request, output_tokens)
