"""What a workload asks of a fleet, in a few numbers: rates, lengths, and how much of the prompts is new.

A workload is a list of `Work` with token ids and arrival times, drawn from distributions or read from a trace. Next on
the road: `capacity` sets these numbers against a replica, the simulator takes the workload itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.core.blocks import chained_key, root_key
from headrace.lab.workload import Work


class BadDemand(ValueError):
    """A workload that cannot be planned for; the message says what it lacks."""


@dataclass(frozen=True, slots=True)
class Demand:
    """A workload in numbers; all lengths in tokens.

    ``fresh_tokens`` is the mean of what a prompt shares with no earlier one, in whole blocks: an endless prefix cache
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
    def output_tokens_per_second(self) -> float:
        return self.requests_per_second * self.output_tokens

    @property
    def shares_prefixes(self) -> bool:
        """Whether a prompt may be answered sooner than all of it could be computed."""
        return self.fresh_tokens < self.prompt_tokens

    def prompt_at(self, share: float) -> int:
        """The prompt length that ``share`` of the requests do not exceed."""
        return self.prompts[max(0, math.ceil(share * len(self.prompts)) - 1)]


def demand(work: Sequence[Work], block_size: int) -> Demand:
    """The demand of a workload, whose rate is its requests over the time in which they arrive.

    Raises:
        BadDemand: no requests, all at once, or prompts that are not token ids.
    """
    if not work:
        raise BadDemand("the workload is empty")
    until = max(each.arrival for each in work)
    if until <= 0:
        raise BadDemand("all requests come at once: planning needs a rate (requests per second)")
    lengths = [(len(_tokens(each)), each.max_tokens) for each in work]
    drawn = sum(output for _, output in lengths)
    count = len(work)
    return Demand(
        requests_per_second=count / until,
        prompt_tokens=sum(prompt for prompt, _ in lengths) / count,
        fresh_tokens=_fresh(work, block_size) / count,
        output_tokens=drawn / count,
        context=sum(output * (prompt + output / 2) for prompt, output in lengths) / drawn,
        longest=max(prompt + output for prompt, output in lengths),
        prompts=tuple(sorted(prompt for prompt, _ in lengths)),
    )


def _tokens(work: Work) -> tuple[int, ...]:
    if isinstance(work.prompt, str) or not all(isinstance(token, int) for token in work.prompt[:1]):
        raise BadDemand(f"request {work.id}: planning needs prompts as token ids, this one is text")
    return work.prompt  # type: ignore[return-value]


def _fresh(work: Sequence[Work], block_size: int) -> int:
    """Prompt tokens that no earlier request has brought, as an endless cache of whole blocks would count them."""
    seen: set[bytes] = set()
    fresh = 0
    root = root_key("", "")
    for each in sorted(work, key=lambda one: one.arrival):
        tokens, key, found = _tokens(each), root, 0
        for start in range(0, len(tokens) - block_size + 1, block_size):
            key = chained_key(key, tokens[start : start + block_size])
            found += key in seen
            seen.add(key)
        fresh += len(tokens) - found * block_size
    return fresh
