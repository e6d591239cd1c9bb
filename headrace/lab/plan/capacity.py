"""Request rate that one replica can sustain, by arithmetic alone; it prunes the search for a fleet.

In a steady state ``n`` sequences run. A step generates ``n`` tokens, so ``n / output`` requests end and as many prompts
begin per step. Its prefill is ``n / output`` times the uncached tokens of a prompt.

```
 requests per second = n / (output x seconds(step of n)),   with n bounded by
   memory   blocks of n mean contexts              TPOT   seconds(step of n) <= the TPOT target
```
With speculative decoding a step generates more than ``n`` tokens (`lab.plan.drafts`).
The estimate is optimistic: no queue, no bursts, an unlimited prefix cache. A fleet that fails here also fails in the
simulator.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from headrace.core.capacity import blocks_needed
from headrace.lab.forced_acceptance import Speculation
from headrace.lab.plan.demand import Demand
from headrace.lab.plan.drafts import best_drafts, drafted
from headrace.lab.plan.roofline import Load, Replica

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
