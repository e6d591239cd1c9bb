"""The memory of running sequences: which blocks each holds, what of them can be found again, when they are free.

The scheduler decides who runs; this file keeps the tables. A sequence may be preempted or finished while rows of it
are in flight, so its blocks stay fenced until the last of them has been committed. Where a tier below the device keeps
evicted blocks, this is the place that asks it.
"""

from __future__ import annotations

from headrace.core.blocks import NO_HIT, BlockPool, PrefixHit
from headrace.core.capacity import blocks_needed
from headrace.core.plan import Move
from headrace.core.scheduler.fence import Fence
from headrace.core.sequence import Sequence


class Pages:
    """Block tables over a pool; ``caching`` says whether computed blocks are shared between equal prefixes."""

    def __init__(self, pool: BlockPool, caching: bool) -> None:
        self.pool = pool
        self.caching = caching
        self._fence = Fence()

    @property
    def fenced(self) -> bool:
        """Whether blocks come back once what is in flight has been committed."""
        return self._fence.num_blocks > 0

    @property
    def fenced_tables(self) -> list[list[int]]:
        return [table for _, table in self._fence.tables]

    def look_up(self, sequence: Sequence) -> PrefixHit | None:
        """What the cache holds of a sequence; None while a running one computes its next block."""
        if not self.caching or sequence.request.params.prompt_logprobs is not None:
            return NO_HIT
        keys = sequence.full_keys(self.pool.block_size)
        hit = self.pool.match(sequence.root, keys, sequence.tokens, limit=sequence.known - 1)
        following = len(hit.blocks)
        if following < len(keys) and self.pool.promised(keys[following]):
            return None
        return hit

    def fresh_blocks(self, sequence: Sequence, hit: PrefixHit) -> int:
        """Blocks to allocate for all that a sequence knows, beside those that it shares."""
        return blocks_needed(sequence.known, self.pool.block_size) - len(hit.blocks)

    def take(self, sequence: Sequence, hit: PrefixHit) -> list[Move]:
        """Make the table of a sequence that starts; the moves must run before its first row."""
        self.pool.share(hit.blocks)
        sequence.table = [*hit.blocks, *self.pool.allocate(self.fresh_blocks(sequence, hit))]
        sequence.told = len(sequence.table)
        sequence.registered = len(hit.blocks)
        sequence.planned = sequence.computed = hit.tokens(self.pool.block_size)
        if self.caching:
            sequence.promised = len(sequence.full_keys(self.pool.block_size))
            self.pool.promise(sequence.keys[sequence.registered :])
        return [Move(hit.source, sequence.table[len(hit.blocks)])] if hit.copied else []

    def has_room(self, sequence: Sequence) -> bool:
        """Whether the next position has a block."""
        return sequence.planned < len(sequence.table) * self.pool.block_size

    def grow(self, sequence: Sequence) -> None:
        """One block more; `BlockPool.num_free` must not be 0."""
        sequence.table += self.pool.allocate(1)

    def register(self, sequence: Sequence, *, tail: bool) -> None:
        """Make computed blocks findable: full ones always, the partly filled last one when ``tail``."""
        if not self.caching:
            return
        size = self.pool.block_size
        full = sequence.computed // size
        if full > sequence.registered:
            keys = sequence.full_keys(size)
            for i in range(sequence.registered, full):
                parent = keys[i - 1] if i else sequence.root
                tokens = sequence.tokens[i * size : (i + 1) * size]
                self.pool.register(sequence.table[i], parent, tokens, keys[i])
            sequence.registered = full
        if tail and sequence.computed % size:
            parent = sequence.full_keys(size)[full - 1] if full else sequence.root
            self.pool.register(sequence.table[full], parent, sequence.tokens[full * size : sequence.computed])

    def give_back(self, sequence: Sequence, committed: int) -> None:
        """Release the table of a sequence that leaves; its computed content stays findable.

        ``committed`` is the last committed step: a later one of this sequence may still write to the blocks.
        """
        if self.caching:
            self.register(sequence, tail=True)
            self.pool.withdraw(sequence.keys[sequence.registered : sequence.promised])
        if sequence.last_step > committed:
            self._fence.hold(sequence.table, until_step=sequence.last_step)
        else:
            self.pool.release(sequence.table)
        sequence.table = []
        sequence.computed = sequence.planned = sequence.pending = 0
        sequence.registered = sequence.promised = 0

    def lift(self, committed: int) -> None:
        """Free what waited for the commit of this step."""
        for table in self._fence.lift(committed):
            self.pool.release(table)

    def check(self, running: list[Sequence]) -> None:
        """Raise AssertionError unless the pool's references are those of the tables."""
        self.pool.check()
        expected = [0] * self.pool.num_blocks
        for table in [s.table for s in running] + self.fenced_tables:
            for block in table:
                expected[block] += 1
        assert expected == self.pool.references(), "references differ from the tables"
