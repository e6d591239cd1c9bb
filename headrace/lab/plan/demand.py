"""Demand of a workload in a few numbers: rate, lengths, and the uncached share of prompts.

A workload is a list of `Call`s, synthetic or from a trace. `capacity` compares these numbers with a replica; the
simulator uses the calls themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.lab.workload.call import Call


class BadDemand(ValueError):
    """A workload that is empty or has no request rate."""


@dataclass(frozen=True, slots=True)
class Demand:
    """A workload in numbers; all lengths in tokens.

    ``fresh_tokens`` is the mean number of prompt tokens that are computed with an unlimited prefix cache per tenant.
    ``context`` is the mean context of a generated token. ``prompts`` are all prompt lengths, ascending.
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
        """Whether some prompts hit the prefix cache."""
        return self.fresh_tokens < self.prompt_tokens

    def prompt_at(self, share: float) -> int:
        """The quantile of the prompt lengths at ``share`` (0 to 1)."""
        return self.prompts[max(0, math.ceil(share * len(self.prompts)) - 1)]


def demand(calls: Sequence[Call]) -> Demand:
    """The demand of a workload. Its rate is the number of calls over the time in which they arrive.

    Raises:
        BadDemand: there are no calls, or all arrive at once.
    """
    if not calls:
        raise BadDemand("the workload is empty")
    until = max(call.arrival for call in calls)
    if until <= 0:
        raise BadDemand("all requests arrive at once: planning needs a request rate")
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
    """Prompt tokens that are in no earlier prompt or output of the tenant."""
    known: dict[tuple[object, ...], int] = {}  # cached tokens of a stream, by the spans before it
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
