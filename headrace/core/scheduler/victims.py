"""Victim policies: which running sequence is preempted when another one needs blocks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Many
from typing import Protocol

from headrace.core.prediction.step_curve import TOKENS_ONLY, StepCost
from headrace.core.sequence import Sequence
from headrace.core.tenancy.tenants import CLASSES, ServiceClass

URGENT_SECONDS = 1.0
"""The slack at which a sequence's work counts twice: about the time that a preemption and its resumption may cost."""


class VictimPolicy(Protocol):
    """Chooses one of the candidates. They are ordered by place, and none has a row in the step being planned."""

    def choose(self, candidates: Many[Sequence], now: float) -> Sequence: ...


class LastRanked:
    """Preempts the candidate that is last in the batch, so the first one always makes progress."""

    def choose(self, candidates: Many[Sequence], now: float) -> Sequence:
        return candidates[-1]


class LowestRecomputeCost:
    """Preempts, in the lowest class, the sequence with the lowest recomputation cost and the least urgency.

    It never chooses the first of several candidates. The cost counts the tokens to compute again, without those found
    in the cache at admission, which would be found again. The weight rises as the slack before a deadline or latency
    target shrinks, and with each earlier preemption of the sequence.
    """

    def __init__(self, cost: StepCost = TOKENS_ONLY, classes: Iterable[ServiceClass] = CLASSES) -> None:
        self._cost = cost
        self._levels = {each.name: each.level for each in classes}

    def choose(self, candidates: Many[Sequence], now: float) -> Sequence:
        others = candidates[1:] or candidates
        lowest = max(self._levels.get(each.request.service_class, 0) for each in others)
        # Of equals the last in place: `min` takes the first one that it meets.
        return min(
            (each for each in reversed(others) if self._levels.get(each.request.service_class, 0) == lowest),
            key=lambda each: self._preemption_cost(each, now),
        )

    def _preemption_cost(self, sequence: Sequence, now: float) -> float:
        kept = min(sequence.cached_tokens, sequence.computed)
        tokens = sequence.computed - kept
        work = self._cost.rows(tokens, tokens * kept + tokens * tokens // 2)
        return work * (1 + URGENT_SECONDS / slack_seconds(sequence, now)) * (1 + sequence.preemptions)


def slack_seconds(sequence: Sequence, now: float) -> float:
    """Seconds that a sequence may pause before it misses its next target; infinite if it has none left to meet.

    Its targets are the deadline, the latest start for its TTFT target, and after that the mean time per token. A
    token that is not due yet is slack. A target that is missed already no longer counts.
    """
    due = sequence.latest_start
    if sequence.output_tokens:
        due = sequence.started + sequence.output_tokens * sequence.tpot_seconds
    deadline = math.inf if sequence.request.deadline is None else sequence.request.deadline
    return min((each - now for each in (due, deadline) if each > now), default=math.inf)
