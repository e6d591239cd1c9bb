"""Request rate that one replica can sustain, by arithmetic alone; it prunes the search for a fleet.

In a steady state ``n`` sequences run. A step generates ``n`` tokens, so ``n / output`` requests end and as many prompts
begin per step. Its prefill is ``n / output`` times the uncached tokens of a prompt.

```
 requests per second = n / (output x seconds(step of n)),   with n bounded by
   memory   blocks of n mean contexts              TPOT   seconds(step of n) <= the TPOT target
```
With speculative decoding a step generates more than ``n`` tokens.
The estimate is optimistic: no queue, no bursts, an unlimited prefix cache. A fleet that fails here also fails in the
simulator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from headrace.core.capacity import blocks_needed
from headrace.lab.forced_acceptance import Speculation, expected_tokens
from headrace.lab.plan.roofline import Load, Replica, decoding
from headrace.lab.workload.work import Call

MOST_SEQUENCES = 1024
"""Maximum number of sequences of one replica in the search."""


@dataclass(frozen=True, slots=True)
class Slo:
    """Latency targets: TTFT and TPOT in seconds, and the share of requests that must meet both."""

    ttft: float
    tpot: float
    share: float = 0.95


class Settings(NamedTuple):
    """Engine settings; the search chooses them."""

    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int = 16


class Steady(NamedTuple):
    """A replica in its steady state: running sequences, seconds of a step, and requests per second.

    In a step, each sequence verifies ``drafts`` drafted tokens and gains ``tokens`` tokens in the mean.
    """

    sequences: int
    step_seconds: float
    requests_per_second: float
    drafts: int = 0
    tokens: float = 1.0

    @property
    def tpot(self) -> float:
        """Seconds per token of one sequence."""
        return self.step_seconds / self.tokens


class Impossible(ValueError):
    """A replica that cannot meet the latency targets at any load; the message says why."""


def steady(
    replica: Replica, demand: Demand, sequences: int, speculation: Speculation | None = None
) -> Steady:
    """The steady state with ``sequences`` running."""

    def load(drafts: int, tokens: float) -> Load:
        ending = sequences * tokens / demand.output_tokens
        prefill = ending * demand.fresh_tokens
        decode = drafted(sequences, demand.context, drafts)
        return Load(
            decodes=decode.decodes,
            prefill_tokens=round(prefill),
            contexts=decode.contexts + prefill * (demand.prompt_tokens - demand.fresh_tokens / 2),
            read_tokens=decode.read_tokens + ending * demand.prompt_tokens,
            samples=decode.samples + round(ending),
            sequences=decode.sequences + ending,
        )

    drafts, tokens, seconds = best_drafts(replica, load, sequences, demand.context, speculation)
    rate = sequences * tokens / demand.output_tokens / seconds
    return Steady(sequences, seconds, rate, drafts, tokens)


def best_steady(
    replica: Replica, demand: Demand, slo: Slo, settings: Settings, speculation: Speculation | None = None
) -> Steady:
    """The steady state with the most requests per second that meets the TPOT target and fits in memory.

    Raises:
        Impossible: the weights, the longest request, a single stream or a single prompt already exceeds a limit.
    """
    name = f"{replica.degree} x {replica.device.name}"
    blocks = replica.num_blocks(settings.block_size, settings.max_num_batched_tokens, settings.max_num_seqs)
    if not blocks:
        raise Impossible(
            f"{name}: weights of {replica.weight_bytes / 1e9:.1f} GB and workspace leave no memory for the KV cache"
        )
    if blocks_needed(demand.longest, settings.block_size) > blocks:
        raise Impossible(
            f"{name}: the longest request has {demand.longest} tokens; the KV cache holds"
            f" {blocks * settings.block_size}"
        )
    context = demand.context
    one = best_drafts(
        replica,
        lambda drafts, _: drafted(1, context, drafts),
        rows=1,
        context=context,
        speculation=speculation,
    )
    alone = one.seconds / one.tokens
    if alone > slo.tpot:
        raise Impossible(
            f"{name}: a single stream takes {1e3 * alone:.1f} ms per token; the target is {1e3 * slo.tpot:.1f} ms"
        )
    prompt = demand.prompt_at(slo.share)
    first = replica.prefill_seconds(prompt, settings.max_num_batched_tokens)
    if not demand.shares_prefixes and first > slo.ttft:
        raise Impossible(
            f"{name}: a prompt of {prompt} tokens alone takes {first:.2f} s; the TTFT target is {slo.ttft:.2f} s"
        )
    mean_context = max(1, round(demand.context))
    most = min(
        settings.max_num_seqs,
        max(1, replica.sequences_that_fit(mean_context, blocks, settings.block_size)),
    )
    return steady(replica, demand, _largest(replica, demand, slo.tpot, most, speculation), speculation)


def split_steady(
    replica: Replica, demand: Demand, slo: Slo, settings: Settings, speculation: Speculation | None = None
) -> tuple[Steady, float]:
    """The steady state of a fleet with prefill and decode replicas (P/D).

    The rate is the mean per replica of both kinds; sequences and step are those of a decode replica. Also returns the
    share of prefill replicas at which both kinds are equally busy.

    Raises:
        Impossible: as `best_steady`.
    """
    pulled = replace(
        demand, fresh_tokens=settings.block_size / 2
    )  # the last, partial block is computed again
    decode = best_steady(replica, pulled, slo, settings, speculation)
    fresh = max(1, round(demand.fresh_tokens))
    prefill = 1 / replica.prefill_seconds(fresh, settings.max_num_batched_tokens)
    share = decode.requests_per_second / (decode.requests_per_second + prefill)
    return decode._replace(requests_per_second=share * prefill), share


def _largest(
    replica: Replica, demand: Demand, pace: float, most: int, speculation: Speculation | None
) -> int:
    """The largest number of sequences, 1 to ``most``, with a TPOT within ``pace`` (bisection: TPOT is monotone)."""
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        if steady(replica, demand, middle, speculation).tpot <= pace:
            low = middle
        else:
            high = middle - 1
    return low


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


MOST = 16
"""The longest draft that is considered."""


class Verified(NamedTuple):
    """Steps that verify ``drafts`` tokens per row: the mean tokens that a row gains, and the seconds of a step."""

    drafts: int
    tokens: float
    seconds: float


def best_drafts(
    replica: Replica,
    load: Callable[[int, float], Load],
    rows: int,
    context: float,
    speculation: Speculation | None,
) -> Verified:
    """The drafts with the most tokens per second.

    ``load(drafts, tokens)`` is the work of a step of ``rows`` sequences with a mean ``context``, each with ``drafts``
    drafted tokens and a gain of ``tokens``.
    """
    best = Verified(0, 1.0, replica.step_seconds(load(0, 1.0)))
    if speculation is None:
        return best
    one = speculation.cost * replica.step_seconds(decoding(rows, context))
    for count in range(1, MOST + 1):
        tokens = expected_tokens(speculation.rates, count)
        seconds = replica.step_seconds(load(count, tokens)) + count * one
        if tokens / seconds > best.tokens / best.seconds:
            best = Verified(count, tokens, seconds)
    return best


def drafted(rows: int, context: float, drafts: int) -> Load:
    """A step in which ``rows`` sequences of a mean ``context`` verify ``drafts`` tokens each."""
    positions = rows * (1 + drafts)
    contexts = positions * (context + drafts / 2)
    return Load(positions, 0, contexts, rows * (context + drafts), positions, rows)
