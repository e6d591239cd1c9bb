"""Eviction order of a full tier: an order over its idle blocks, and the policies that rank them.

```
 release -> add ──> a run: blocks of ascending priority ──> heap of runs by their first ──pop──> the lowest of all
              use again -> discard                       the stamp tells a block that has left its run
              wanted, retention ends -> update ──> a run of its own
```
Blocks that are released together were used together and are mostly evicted together. So the heap has about one run per
request, not one entry per block. Deletion is lazy: a block that changes gets a new stamp in a new run, and its entry in
the old run is dropped when it is reached or swept. A sweep moves the runs one by one into a new heap, a few with each
block that becomes idle, so that no step waits for the whole sweep. Meanwhile the lowest block is the lower of the first
ones of both heaps. Time is an argument; only retention with a duration depends on it.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from headrace.core.request import DEFAULT_RETENTION

STALE = 64
"""A sweep starts when stale entries exceed the idle blocks by this number."""

SWEEP_FACTOR = 4  # see docs/decisions/memory.md#work-of-the-eviction-heap
"""Entries that a sweep examines per block that becomes idle, so that it ends before as many are stale again."""

HIT_TURNOVERS = 1.0  # see docs/decisions/memory.md#eviction-order
"""Number of turnovers of the tier by which a block that was hit is retained longer."""

COST_TURNOVERS = 0.05
"""The same, per unit of attention cost at the end of the block's chain (in first-token costs), up to one turnover."""

PART_TURNOVERS = -1.0
"""A partly filled block is evicted earlier: it saves little, and few prompts continue exactly where it ends."""


AGE_SPAN = 1e13
"""More than the number of blocks that are ever released, so retention and waiting requests outweigh age. One number
compares quickly."""


class Block:
    """A block of one tier. ``tokens`` is the computed content, empty while the block is not cached.

    ``used`` is the tick of its last release, ``hits`` how often the content was found and used again, ``chain`` the
    length in blocks of the longest sequence that held it. ``retention`` lasts until ``seconds`` after the last use
    (None: as long as the content). ``wanted`` says that a waiting request needs it. ``rank`` is its priority among
    idle blocks at the time of ``stamp``.
    """

    __slots__ = (
        "chain",
        "due",
        "hits",
        "id",
        "key",
        "newer",
        "older",
        "parent",
        "rank",
        "refs",
        "retention",
        "seconds",
        "stamp",
        "tokens",
        "used",
        "wanted",
    )

    def __init__(self, block_id: int) -> None:
        self.id = block_id
        self.refs = 0
        self.stamp = 0  # 0: not in the eviction order
        self.rank = 0.0
        self.older: Block | None = None  # links of the pool: blocks with equal parent and first token
        self.newer: Block | None = None
        self.used = 0
        self.due: float | None = None  # when the retention ends while the block is idle
        self.forget()

    def forget(self) -> None:
        """Make the block blank."""
        self.key: bytes | None = None
        self.parent = b""
        self.tokens: tuple[int, ...] = ()
        self.hits = 0
        self.chain = 0
        self.retention = DEFAULT_RETENTION
        self.seconds: float | None = None
        self.wanted = False

    def keep(self, retention: int, seconds: float | None) -> None:
        """Apply a requested retention: it replaces the default; of several, the higher and longer one counts."""
        if self.retention == DEFAULT_RETENTION or retention > self.retention:
            self.retention, self.seconds = retention, seconds
        elif retention == self.retention and self.seconds is not None:
            self.seconds = None if seconds is None else max(seconds, self.seconds)


UNRANKED = -math.inf
"""The priority of a block for which the policy fails: it is evicted first, because cached content may be lost at any
time."""


class EvictionPolicy(Protocol):
    """Ranks an idle block: the lowest priority is evicted first. It is called again whenever the block changes."""

    def priority(self, block: Block) -> float: ...


class LeastRecentlyUsed:
    """Evicts the block released longest ago; a sequence's last block before its first."""

    def priority(self, block: Block) -> float:
        return block.used


class CostAwareEviction:
    """Evicts by retention, then blocks that no waiting request needs, then by age against the cost of recomputation.

    Age is counted in released blocks, so that nothing depends on how quickly time passes; one turnover of the tier is
    ``num_blocks``. ``context_blocks`` is the context at which a token's attention costs as much as the rest of it.
    The cost is that of the last block of the chain, not of the block itself: a chain is only useful from its head on,
    so a head must never be evicted before its tail. The weights are those with most hits on recorded conversations.
    """

    def __init__(self, num_blocks: int, context_blocks: float = math.inf) -> None:
        self._turnover = num_blocks
        self._block_turnovers = COST_TURNOVERS / context_blocks

    def priority(self, block: Block) -> float:
        cost = self._block_turnovers * block.chain
        turnovers = cost if cost < 1.0 else 1.0
        if block.hits:
            turnovers += HIT_TURNOVERS
        if block.key is None:
            turnovers += PART_TURNOVERS
        return (2 * block.retention + block.wanted) * AGE_SPAN + block.used + turnovers * self._turnover


_Run = tuple[float, int, list[Block]]
"""Blocks that became idle together, lowest last: the priority of the lowest, their common stamp, the blocks."""

_NO_RUN: _Run = (math.inf, 0, [])


class EvictionOrder:
    """The idle blocks of one tier, by a policy's priority."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self._policy = policy
        self._runs: list[_Run] = []  # a heap
        self._unswept: list[_Run] = []  # a heap of runs that the current sweep has not examined
        self._entries = 0  # entries of all runs, including stale ones
        self._ends: list[tuple[float, int, Block]] = []  # when retention ends
        self._length = 0
        self._stamp = 0
        self._used = 0
        self._now = 0.0

    def __len__(self) -> int:
        return self._length

    def __contains__(self, block: Block) -> bool:
        return block.stamp > 0

    def add(self, block: Block, due: float | None = None) -> None:
        """A block becomes idle; ``due`` is when its retention ends, if that is already known."""
        self._length += 1
        self._used += 1
        block.used = self._used
        self._set_due(block, due)
        self._add_runs((block,))

    def add_all(self, blocks: Sequence[Block]) -> None:
        """Blocks become idle, each released after those before it."""
        self._length += len(blocks)
        used = self._used
        for block in blocks:
            used += 1
            block.used = used
            if block.seconds is not None or block.due is not None:
                self._set_due(block, None)
        self._used = used
        self._add_runs(blocks)

    def discard(self, block: Block) -> None:
        """A block is in use again, or has lost its content."""
        self._length -= 1
        block.stamp = 0

    def update(self, blocks: Iterable[Block]) -> None:
        """The rank of these blocks may have changed; blocks that are not idle are ignored. Ascending rank is
        fastest.
        """
        self._add_runs([block for block in blocks if block.stamp])

    def pop(self, count: int) -> list[Block]:
        """Remove and return the ``count`` blocks of lowest priority, lowest first.

        The current run is left only when another run's first block is lower, because blocks released together are
        mostly evicted together.

        Raises:
            IndexError: there are fewer.
        """
        if count > self._length:
            raise IndexError(f"{count} blocks requested, {self._length} idle")
        popped: list[Block] = []
        while True:
            # 1. The run with the lowest block, of both heaps: a sweep has examined only one of them.
            runs, others = self._runs, self._unswept
            if others and (not runs or others[0] < runs[0]):
                runs, others = others, runs
            _, stamp, run = runs[0]
            following = min([*runs[1:3], *others[:1]], default=_NO_RUN)  # the second lowest of a heap
            entries = len(run)
            # 2. Take from it as long as no other run has a lower block. A block whose stamp differs is stale: it is
            #    in use again, or has a newer entry. That is cheaper than to remove entries from the middle of a heap.
            while run:
                block = run[-1]
                if block.stamp == stamp:
                    if len(popped) == count or (block.rank, stamp, run) > following:
                        break
                    block.stamp = 0
                    popped.append(block)
                run.pop()
            # 3. Put the rest of the run back by its new lowest block.
            self._entries -= entries - len(run)
            if run:
                heapq.heapreplace(runs, (run[-1].rank, stamp, run))
            else:
                heapq.heappop(runs)
            if len(popped) == count:
                self._length -= count
                return popped

    def advance(self, now: float) -> None:
        """Set the time: retention that has expired falls back to the default."""
        self._now = now
        while self._ends and self._ends[0][0] <= now:
            due, _, block = heapq.heappop(self._ends)
            if block.stamp and block.due == due:
                block.retention, block.seconds, block.due = DEFAULT_RETENTION, None, None
                self.update((block,))

    def _set_due(self, block: Block, due: float | None) -> None:
        """Record when a block's retention ends, if it does."""
        block.due = self._now + block.seconds if due is None and block.seconds is not None else due
        if block.due is not None:
            heapq.heappush(self._ends, (block.due, block.used, block))

    def _rank(self, block: Block) -> float:
        try:
            rank = self._policy.priority(block)
            return rank if rank > UNRANKED else UNRANKED  # NaN is not greater either
        except Exception:  # the requests of idle blocks have ended: none is left to fail
            return UNRANKED

    def _add_runs(self, blocks: Sequence[Block]) -> None:
        """Build runs of idle blocks; a new run starts where a block ranks lower than the one before it."""
        rank_of, stamp = self._rank, self._stamp + 1
        run: list[Block] = []
        last = math.inf
        for block in blocks:
            rank = block.rank = rank_of(block)
            if rank < last and run:
                self._add_run(run, stamp)
                run = []
                stamp += 1
            block.stamp = stamp
            run.append(block)
            last = rank
        if run:
            self._add_run(run, stamp)
        self._stamp = stamp
        self._sweep(SWEEP_FACTOR * len(blocks))

    def _add_run(self, run: list[Block], stamp: int) -> None:
        """Add a run of blocks, lowest first."""
        run.reverse()
        self._entries += len(run)
        heapq.heappush(self._runs, (run[-1].rank, stamp, run))

    def _sweep(self, entries: int) -> None:
        """Examine about ``entries`` entries and drop stale ones; a sweep starts when stale entries outnumber idle
        blocks.
        """
        if not self._unswept and self._entries > 2 * self._length + STALE:
            self._runs, self._unswept = self._unswept, self._runs
        while self._unswept and entries > 0:
            _, stamp, run = self._unswept.pop()  # removing the last entry keeps the heap valid
            left = [block for block in run if block.stamp == stamp]
            entries -= len(run)
            self._entries -= len(run) - len(left)
            if left:
                heapq.heappush(self._runs, (left[-1].rank, stamp, left))
        if len(self._ends) > 2 * self._length + STALE:
            ends = {id(entry[2]): entry for entry in self._ends if entry[2].due == entry[0]}
            self._ends = list(ends.values())
            heapq.heapify(self._ends)


def mark(by_key: Mapping[bytes, Block], order: EvictionOrder, keys: Sequence[bytes], *, wanted: bool) -> None:
    """Record that a waiting request needs these keys of a chain, or no longer does."""
    # From the tail: a chain was released in that order, and ranks in it.
    blocks = [block for key in reversed(keys) if (block := by_key.get(key))]
    for block in blocks:
        block.wanted = wanted
    order.update(blocks)
