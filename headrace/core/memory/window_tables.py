"""Which blocks of window groups each running sequence holds.

A sequence holds the parts (`window_blocks`) of the blocks that the window of its next row reaches, and of those that
its planned rows fill. Before it gets new parts, it releases the ones that its window has passed. A row in flight may
still read these, but plans run in order: whatever a later plan writes to them comes after it. Drafts change nothing,
because a sequence is planned up to its last known token only.
"""

from __future__ import annotations

from collections.abc import Iterable

from headrace.core.capacity import blocks_needed
from headrace.core.images import unsplit
from headrace.core.memory.block_pool import BlockPool
from headrace.core.memory.fence import Fence
from headrace.core.memory.prefix_hit import PrefixHit
from headrace.core.memory.window_blocks import WindowBlocks
from headrace.core.plan import Placement
from headrace.core.sequence import Sequence


def add_part(pool: BlockPool, windows: WindowBlocks, block: int) -> tuple[int, ...]:
    """Allocate the part of a held block, for one sequence; returns its blocks."""
    part = tuple(pool.allocate(windows.groups.groups))
    windows.add(block, part)
    return part


def share_parts(pool: BlockPool, windows: WindowBlocks, blocks: Iterable[int]) -> None:
    """The window of one more sequence reaches these blocks."""
    pool.num_free -= windows.groups.groups * sum(windows.share(block) for block in blocks)


def release_parts(pool: BlockPool, windows: WindowBlocks, blocks: Iterable[int], *, ended: bool) -> None:
    """The window of a sequence has passed these blocks, or the sequence has ``ended``."""
    idle = sum(windows.release(block, ended=ended) for block in blocks)
    pool.num_free += windows.groups.groups * idle


class WindowTables:
    """The parts that sequences over ``pool`` hold. What a runner has to know of them collects until `take_placed`."""

    def __init__(self, pool: BlockPool, windows: WindowBlocks) -> None:
        self._pool, self._windows = pool, windows
        self.groups = windows.groups
        self._fence = Fence()
        self._placed: list[Placement] = []

    def take_placed(self) -> list[Placement]:
        """The placements since the last call, in their order."""
        placed, self._placed = self._placed, []
        return placed

    # -- what a sequence needs ---------------------------------------------------------------------

    def shared(self, hit: PrefixHit) -> tuple[int, ...]:
        """The blocks of a prefix whose parts a sequence needs that continues from it."""
        size = self._pool.block_size
        return hit.blocks[self.groups.first(hit.tokens(size), size) :]

    def fresh(self, sequence: Sequence, hit: PrefixHit) -> int:
        """The most blocks that a sequence has in all groups before it decodes, in addition to shared ones."""
        shared = self.groups.groups * len(self.shared(hit))
        missing = self.groups.groups * (blocks_needed(sequence.known, self._pool.block_size) - hit.full)
        return min(missing, self.groups.most_blocks(sequence.known, self._pool.block_size) - shared)

    def _end(self, position: int, table: int) -> int:
        """The end of the parts of rows up to ``position``; the next position has one, too, if it has a block."""
        return min(table, position // self._pool.block_size + 1)

    # -- while it runs -----------------------------------------------------------------------------

    def start(self, sequence: Sequence, hit: PrefixHit) -> None:
        """A sequence starts in its slot with a table of which ``hit`` is shared; before any block is allocated."""
        shared = self.shared(hit)
        share_parts(self._pool, self._windows, shared)
        sequence.window_first, sequence.window_end = hit.full - len(shared), hit.full
        if shared:
            parts = tuple([self._windows.of(block) for block in shared])
            self._placed.append(Placement(sequence.slot, sequence.window_first, parts))

    def room(self, sequence: Sequence, length: int) -> int:
        """How many of the next ``length`` positions have parts, or get them without a preemption."""
        self.passed(sequence)
        end = sequence.window_end + self._pool.num_free // self.groups.groups
        if end >= len(sequence.table):
            return length
        return max(0, min(length, end * self._pool.block_size - 1 - sequence.planned))

    def least(self, sequence: Sequence) -> int:
        """Number of blocks without which a sequence cannot compute its next position, and those joint with it."""
        next_end = sequence.planned + unsplit(sequence.request.images, sequence.planned, 1, sequence.known)
        end = self._end(next_end, len(sequence.table))
        return self.groups.groups * max(0, end - sequence.window_end)

    def add(self, sequence: Sequence, length: int) -> None:
        """A row of the next ``length`` positions is about to be planned: `room` for them is there."""
        self._add(sequence, self._end(sequence.planned + length, len(sequence.table)))

    def fill(self, sequence: Sequence) -> None:
        """The table of a sequence that decodes has grown."""
        self._add(sequence, len(sequence.table))

    def _add(self, sequence: Sequence, end: int) -> None:
        begin = sequence.window_end
        if end > begin:
            added = [add_part(self._pool, self._windows, block) for block in sequence.table[begin:end]]
            sequence.window_end = end
            self._placed.append(Placement(sequence.slot, begin, tuple(added)))

    def passed(self, sequence: Sequence) -> None:
        """Release the parts that no further row of a sequence reads."""
        begin = sequence.window_first
        first = min(self.groups.first(sequence.planned, self._pool.block_size), sequence.window_end)
        if first > begin:
            release_parts(self._pool, self._windows, sequence.table[begin:first], ended=False)
            sequence.window_first = first

    def end(self, sequence: Sequence, committed: int) -> None:
        """A sequence leaves its slot: release its parts, after the commit of its last row, before its blocks."""
        held = sequence.table[sequence.window_first : sequence.window_end]
        sequence.window_first = sequence.window_end = 0
        if sequence.last_step > committed:
            self._fence.hold(held, until_step=sequence.last_step)
        else:
            self._release(held)

    def committed(self, step: int) -> None:
        """Release the parts that waited for the commit of this step."""
        for held in self._fence.lift(step):
            self._release(held)

    def _release(self, blocks: list[int]) -> None:
        release_parts(self._pool, self._windows, reversed(blocks), ended=True)

    def check(self, running: list[Sequence]) -> set[int]:
        """Raise AssertionError unless the parts are those of the sequences; returns the blocks of all parts."""
        held: dict[int, int] = {}
        fenced = [blocks for _, blocks in self._fence.tables]
        for blocks in [s.table[s.window_first : s.window_end] for s in running] + fenced:
            for block in blocks:
                held[block] = held.get(block, 0) + 1
        return self._windows.check(held)
