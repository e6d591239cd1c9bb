"""What a workload asks of a fleet, in a few numbers: rates, lengths, and how much of the prompts is new.

A workload is a list of `Call`s, made up or read from a trace. Next on the road: `capacity` sets these numbers against a
replica, the simulator takes the calls themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.lab.workload.call import Call


class BadDemand(ValueError):
    """A workload that cannot be planned for; the message says what it lacks."""


@dataclass(frozen=True, slots=True)
class Demand:
    """A workload in numbers; all lengths in tokens.

    ``fresh_tokens`` is the mean of what a prompt shares with no earlier call of its tenant: an endless prefix cache
    computes that much. ``context`` is the mean context of a token that is drawn. ``prompts`` are all prompt lengths,
    shortest first.
    """

    requests_per_second: float
    prompt_tokens: float
    fresh_tokens: float
    output_tokens: float
    context: float
    longest: int
    prompts: tuple[int, ...]

    @property
    def shares_prefixes(self) -> bool:
        """Whether a prompt may be answered sooner than all of it could be computed."""
        return self.fresh_tokens < self.prompt_tokens

    def prompt_at(self, share: float) -> int:
        """The prompt length that ``share`` of the requests do not exceed."""
        return self.prompts[max(0, math.ceil(share * len(self.prompts)) - 1)]


def demand(calls: Sequence[Call]) -> Demand:
    """The demand of a workload, whose rate is its calls over the time in which they come.

    Raises:
        BadDemand: no calls, or all at once.
    """
    if not calls:
        raise BadDemand("the workload is empty")
    until = max(call.arrival for call in calls)
    if until <= 0:
        raise BadDemand("all calls come at once: planning needs a rate")
    count = len(calls)
    drawn = sum(call.output_tokens for call in calls)
    contexts = sum(call.output_tokens * (call.prompt_tokens + call.output_tokens / 2) for call in calls)
    return Demand(
        requests_per_second=count / until,
        prompt_tokens=sum(call.prompt_tokens for call in calls) / count,
        fresh_tokens=_fresh(calls) / count,
        output_tokens=drawn / count,
        context=contexts / drawn,
        longest=max(call.prompt_tokens + call.output_tokens for call in calls),
        prompts=tuple(sorted(call.prompt_tokens for call in calls)),
    )


def _fresh(calls: Sequence[Call]) -> int:
    """Prompt tokens that no earlier call of the tenant has brought, answers counted as brought too."""
    known: dict[tuple[object, ...], int] = {}  # the spans before one, and its stream: how far it is known
    fresh = 0
    for call in sorted(calls, key=lambda each: each.arrival):
        before: tuple[object, ...] = (call.tenant,)
        shared, unbroken = 0, True
        for span in call.content:
            place = (before, span.stream, span.start)
            if unbroken:
                shared += min(known.get(place, 0), span.length)
                unbroken = known.get(place, 0) >= span.length
            known[place] = max(known.get(place, 0), span.length)
            before = (hash(before), span)
        if call.content and call.answer is not None:
            last = call.content[-1]
            if (call.answer.stream, call.answer.start) == (last.stream, last.start + last.length):
                known[place] = max(known[place], last.length + call.answer.length)
        fresh += call.prompt_tokens - shared
    return fresh
