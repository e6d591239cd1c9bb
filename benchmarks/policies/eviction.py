"""Hits of eviction policies: a trace replayed through the block pool alone, one request after the other.

Every block of the trace is one block of the pool. Hits are counted in blocks, as a share of the hits in a pool that
never evicts. Two bounds are shown with the policies:

- Belady's rule, which knows the whole trace: the bound of every policy that serves requests in order of arrival.
- The best policy that knows mean reuse rates by age and number of uses, but not the future of a single block.

A second table puts lower tiers below a small pool: hits by tier, and copied blocks.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.stage import plain_parser
from headrace.core.block_keys import chained_key, root_key
from headrace.core.events import Event, Moved
from headrace.core.memory.block_pool import BlockPool
from headrace.core.memory.eviction import CostAwareEviction, EvictionPolicy, LeastRecentlyUsed
from headrace.core.memory.lower_tier import LowerTier
from headrace.core.memory.prefix_hit import PrefixHit
from headrace.core.memory.restore import AlwaysRestore
from headrace.core.memory.tiers import LowerTiers
from headrace.core.plan import Arrival, Tier
from headrace.lab.workload.traces import MOONCAKE_BLOCK, read_trace
from headrace.lab.workload.work import Call

CONTEXT_TOKENS = 13_000
"""The context at which a token's attention costs as much as its linear layers, for a dense model of 8 billion
parameters."""

SIZE = 2
"""Tokens that represent a block of the trace; a partly filled last block has one of them."""

TIERS = ((5, 20, 0), (5, 10, 50), (16, 25, 0), (25, 25, 0))
"""Sizes of device, host and disk, in % of the trace's unique blocks."""

AGES = (0, 5, 10, 20, 40, 60, 90, 120, 180, 240, 300, 400, 500, 700, 900, 1200, 1800)
"""Lower bounds of groups of blocks by seconds since the last use."""

USES = (1, 2, 3, 6, 21)
"""Lower bounds of groups by number of uses. Full and partly filled blocks have separate groups."""

Prompt = tuple[int, ...]
ROOT = root_key("", "")


def prompts(calls: Iterable[Call]) -> list[Prompt]:
    """The prompts of a trace, each block by its id, twice where it is full."""
    return [
        tuple(
            span.stream for span in call.content for _ in range(SIZE if span.length == MOONCAKE_BLOCK else 1)
        )
        for call in calls
    ]


def keys_of(tokens: Prompt) -> list[bytes]:
    """Chained keys of the full blocks."""
    keys = [ROOT]
    for i in range(len(tokens) // SIZE):
        keys.append(chained_key(keys[-1], tokens[i * SIZE : (i + 1) * SIZE]))
    return keys[1:]


def replay(trace: Iterable[Prompt], num_blocks: int, policy: EvictionPolicy) -> int:
    """Blocks found in a pool, completely or in part."""
    pool = BlockPool(num_blocks, SIZE, policy, lambda event: None)
    hits = 0
    for tokens in trace:
        keys = keys_of(tokens)
        hit = pool.match(ROOT, keys, tokens, len(tokens))
        hits += len(hit.blocks) + (hit.copied > 0)
        _release(pool, _allocate(pool, hit, tokens), len(hit.blocks), keys, tokens)
    return hits


class TierCounts(NamedTuple):
    """Blocks found on the device and below it, and blocks copied to the host and to the disk."""

    device: int
    below: int
    to_host: int
    to_disk: int


def replay_tiers(trace: Iterable[Prompt], device: int, host: int, disk: int) -> TierCounts:
    """As `replay`, with lower tiers from which every block is fetched at once."""
    moved = Counter[Tier]()

    def count_moves(event: Event) -> None:
        if isinstance(event, Moved):
            moved[event.target] += (
                event.blocks if event.target is not Tier.HOST or event.source is Tier.DEVICE else 0
            )

    def tier(which: Tier, size: int) -> LowerTier:
        return LowerTier(which, size, cost_aware(size))

    lower = LowerTiers(
        tier(Tier.HOST, host),
        tier(Tier.DISK, disk) if disk else None,
        AlwaysRestore(),
        block_size=SIZE,
        block_bytes=0,
        emit=count_moves,
    )
    pool = BlockPool(device, SIZE, cost_aware(device), count_moves, lower)
    found = below = 0
    for tokens in trace:
        keys = keys_of(tokens)
        hit = pool.match(ROOT, keys, tokens, len(tokens))
        while not hit.is_ready and lower.fetch(hit.below):
            _finish_copies(lower)
            hit = pool.match(ROOT, keys, tokens, len(tokens))
        if not hit.is_ready:
            hit = pool.match(ROOT, keys, tokens, len(tokens), may_wait=False)
        found += len(hit.blocks) + (hit.copied > 0)
        below += len(hit.below)
        lower.hold(hit.below)
        table = _allocate(pool, hit, tokens)
        pool.promote(hit, table[len(hit.blocks) : hit.full])
        _release(pool, table, hit.full, keys, tokens)
        _finish_copies(lower)
    return TierCounts(found, below, moved[Tier.HOST], moved[Tier.DISK])


def _finish_copies(lower: LowerTiers) -> None:
    """Complete all copies to and from the disk at once."""
    lower.arrived(Arrival(move, True) for move in lower.take_moves() if Tier.DISK in move[2:])


def _allocate(pool: BlockPool, hit: PrefixHit, tokens: Prompt) -> list[int]:
    pool.share(hit.blocks)
    return [*hit.blocks, *pool.allocate(-(-len(tokens) // SIZE) - len(hit.blocks))]


def _release(pool: BlockPool, table: list[int], done: int, keys: list[bytes], tokens: Prompt) -> None:
    """Register the blocks from ``done`` on, and release all to the prefix cache."""
    for i in range(done, len(table)):
        pool.register(table[i], keys[i - 1] if i else ROOT, tokens[i * SIZE : (i + 1) * SIZE])
    pool.release(table)


def cost_aware(size: int) -> CostAwareEviction:
    """The server's policy for a tier of ``size`` blocks."""
    return CostAwareEviction(size, CONTEXT_TOKENS / MOONCAKE_BLOCK)


def belady_hits(trace: list[Prompt], num_blocks: int) -> int:
    """Hits if the block whose next use is the latest is evicted (Belady)."""
    chains = [tuple(dict.fromkeys(tokens)) for tokens in trace]
    following: list[dict[int, float]] = []
    next_use: dict[int, float] = {}
    for number in range(len(chains) - 1, -1, -1):
        following.append({block: next_use.get(block, math.inf) for block in chains[number]})
        next_use.update(dict.fromkeys(chains[number], number))
    following.reverse()
    held: dict[int, float] = {}
    order: list[tuple[float, int]] = []
    hits = 0
    for number, chain in enumerate(chains):
        hits += next((i for i, block in enumerate(chain) if block not in held), len(chain))
        for block in chain:
            held[block] = following[number][block]
            heapq.heappush(order, (-held[block], block))
        while len(held) > num_blocks:
            use, block = heapq.heappop(order)
            if held.get(block) == -use:
                del held[block]
    return hits


def best_causal_hits(calls: list[Call], num_blocks: int) -> int:
    """Hits if the pool always holds the blocks with the highest mean reuse rate of their group.

    Rates are means over the whole trace, and evicted blocks may come back without cost. No policy that knows age and
    number of uses, but not the future, has more hits (Panigrahy et al., A New Upper Bound on Cache Hit
    Probability for Non-Anticipative Caching Policies, 2022).
    """
    blocks = np.array([span.stream for call in calls for span in call.content])
    times = np.array([call.arrival for call in calls for _ in call.content])
    part = np.array([span.length < MOONCAKE_BLOCK for call in calls for span in call.content])
    uses, gone = Counter[int](), np.full(len(blocks), np.inf)
    last: dict[int, int] = {}
    group = np.zeros(len(blocks), int)
    for i, block in enumerate(blocks.tolist()):
        uses[block] += 1
        group[i] = 2 * bisect_right(USES, uses[block]) + part[i]
        if block in last:
            gone[last[block]] = times[i] - times[last[block]]
        last[block] = i
    asked, idle = np.zeros((2, 2 * len(USES) + 2, len(AGES)))
    ends = (*AGES[1:], math.inf)
    seen = np.minimum(gone, times[-1] - times)
    for k, (begin, end) in enumerate(zip(AGES, ends, strict=True)):
        np.add.at(idle[:, k], group, np.clip(np.minimum(seen, end) - begin, 0, None))
        np.add.at(asked[:, k], group, (gone >= begin) & (gone < end))
    rates = asked / np.maximum(idle, 1e-9)
    used, groups = np.full(blocks.max() + 1, -1.0), np.zeros(blocks.max() + 1, int)
    hits = start = 0
    for call in calls:
        mine = blocks[start : start + len(call.content)]
        rate = np.where(
            used < 0, -1.0, rates[groups, np.searchsorted(AGES, call.arrival - used, "right") - 1]
        )
        least = np.partition(rate, len(rate) - num_blocks)[-num_blocks]
        new = np.flatnonzero(used[mine] < 0)
        known = mine[: new[0]] if len(new) else mine
        hits += int((rate[known] >= least).sum())
        used[mine], groups[mine] = call.arrival, group[start : start + len(mine)]
        start += len(mine)
    return hits


def main() -> None:
    """Replay, print a table."""
    parser = plain_parser(__doc__)
    parser.add_argument("trace", type=Path, help="a trace with block ids (Mooncake's format)")
    parser.add_argument(
        "--shares", default="5,10,16,25", help="pool sizes, in %% of the trace's unique blocks"
    )
    args = parser.parse_args()
    calls = list(read_trace(args.trace))
    trace = prompts(calls)
    unique = len({block for tokens in trace for block in tokens})
    everything = replay(trace, 2 * unique, LeastRecentlyUsed())
    print(f"{len(trace)} requests, {unique} unique blocks, {everything} hits in a pool that never evicts")
    print(
        f"{'pool':>6} {'blocks':>8} {'LRU':>8} {'cost':>8} {'causal':>8} {'Belady':>8}   share of those hits"
    )
    for percent in args.shares.split(","):
        size = int(unique * float(percent) / 100)
        found = [
            replay(trace, size, LeastRecentlyUsed()),
            replay(trace, size, cost_aware(size)),
            best_causal_hits(calls, size),
            belady_hits(trace, size),
        ]
        shown = " ".join(f"{hits / everything:>8.3f}" for hits in found)
        print(f"{percent + ' %':>6} {size:>8} {shown}", flush=True)
    print(
        f"\n{'device':>6} {'host':>6} {'disk':>6} {'found':>8} {'below':>8} {'to host':>8} {'to disk':>8}   blocks"
    )
    for shares in TIERS:
        sizes = [int(unique * share / 100) for share in shares]
        carried = replay_tiers(trace, *sizes)
        named = " ".join(f"{share:>4} %" for share in shares)
        found_all = (carried.device + carried.below) / everything
        print(
            f"{named} {found_all:>8.3f} {carried.below / everything:>8.3f} {carried.to_host:>8} {carried.to_disk:>8}",
            flush=True,
        )
