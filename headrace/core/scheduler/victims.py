"""Who gives its blocks back when a running sequence cannot grow."""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Many
from typing import Protocol

from headrace.core.prediction.step_cost import TOKENS_ONLY, StepCost
from headrace.core.sequence import Sequence
from headrace.core.tenancy.classes import CLASSES, ServiceClass

HURRY_SECONDS = 1.0
"""The slack at which a sequence's work counts twice: about what being preempted and resumed may cost it."""


class VictimPolicy(Protocol):
    """Chooses one of the candidates; they come in the order of their place and none has been planned in this step."""

    def choose(self, candidates: Many[Sequence], now: float) -> Sequence: ...


class LastRanked:
    """The one that would be served last: whoever ranks first always makes progress."""

    def choose(self, candidates: Many[Sequence], now: float) -> Sequence:
        return candidates[-1]


class LeastLoss:
    """Of the lowest class the one whose work is least and matters least soon; never the first of several.

    What counts is the work to compute again, at ``cost``: all but what it found in the cache when it began and would
    find again. It weighs more the less slack there is until a promise is broken that can still be kept, and once more
    for each time that the sequence has been preempted before.
    """

    def __init__(self, cost: StepCost = TOKENS_ONLY, classes: Iterable[ServiceClass] = CLASSES) -> None:
        self._cost = cost
        self._levels = {each.name: each.level for each in classes}

    def choose(self, candidates: Many[Sequence], now: float) -> Sequence:
        others = candidates[1:] or candidates
        lowest = max(self._levels.get(each.request.service_class, 0) for each in others)
        # Of equals the last in place, as `min` takes the first that it meets.
        return min(
            (each for each in reversed(others) if self._levels.get(each.request.service_class, 0) == lowest),
            key=lambda each: self._loss(each, now),
        )

    def _loss(self, sequence: Sequence, now: float) -> float:
        kept = min(sequence.cached_tokens, sequence.computed)
        tokens = sequence.computed - kept
        work = self._cost.rows(tokens, tokens * kept + tokens * tokens // 2)
        return work * (1 + HURRY_SECONDS / slack_seconds(sequence, now)) * (1 + sequence.preemptions)


def slack_seconds(sequence: Sequence, now: float) -> float:
    """How long a sequence may stand still before it breaks its next promise; infinite if there is none to keep.

    Its promises are the deadline, the start that its first token needs, and after that the mean time per token: a token
    that is not due yet is slack. One that is broken already cannot be broken again.
    """
    due = sequence.latest_start
    if sequence.output_tokens:
        due = sequence.started + sequence.output_tokens * sequence.tpot_seconds
    deadline = math.inf if sequence.request.deadline is None else sequence.request.deadline
    return min((each - now for each in (due, deadline) if each > now), default=math.inf)
