"""Blocks of window layers: found by the block of the same positions, and given back when they are behind the window.

```
 table of a sequence       7   2   9   4   5        its blocks: full layers, all positions
 window groups of each     -   -  11  13  16        one block of each group, of the same pool and size
                                  12  14  17
                                   └── window of the next position ──┘
```
A layer with a window reads the last positions only. So such layers form groups, each with as many layers as there are
without a window: then a block of any group takes the same memory, and all come from one pool. What belongs to the block
of a sequence is its *part*: one block for each group. A part is in use by the sequences whose windows reach it. After
that it stays in the prefix cache with its block, until its memory is needed.

A part that a window has passed is evicted before any cached block, because a later prompt finds it only if it leaves
the cached one there. A part at the end of a sequence, from which the next prompt continues, is evicted with its block.
So is one that was found twice: the end of a prefix that many prompts share.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from headrace.core.capacity import WindowGroups

FOUND_OFTEN = 2
"""Times that a part must have been found before it is evicted with its block, although a window has passed it."""


class _Use:
    """A part, the sequences whose windows reach it, and how often it was found."""

    __slots__ = ("blocks", "found", "users")

    def __init__(self, blocks: tuple[int, ...]) -> None:
        self.blocks = blocks
        self.users = 1
        self.found = 0


class WindowBlocks:
    """The parts of all blocks of a pool, by the number of the block."""

    def __init__(self, groups: WindowGroups) -> None:
        self.groups = groups
        self._parts: dict[int, _Use] = {}
        self._passed: dict[int, None] = {}  # idle, in the order in which they are evicted
        self._ended: dict[int, None] = {}  # idle, and evicted with their blocks

    def __contains__(self, block: int) -> bool:
        return block in self._parts

    @property
    def num_idle(self) -> int:
        """Blocks of all parts that no window reaches."""
        return self.groups.groups * (len(self._passed) + len(self._ended))

    def of(self, block: int) -> tuple[int, ...]:
        """The blocks of the part of a block."""
        return self._parts[block].blocks

    def idle(self, blocks: Iterable[int]) -> int:
        """How many blocks of the parts of these ones no window reaches."""
        parts = self._parts
        return self.groups.groups * sum(not parts[block].users for block in blocks)

    def add(self, block: int, part: tuple[int, ...]) -> None:
        """A sequence begins to fill the part of a block that has none."""
        assert block not in self._parts, "a block has two parts"
        self._parts[block] = _Use(part)

    def share(self, block: int) -> bool:
        """The window of one more sequence reaches a part; returns whether none did before."""
        use = self._parts[block]
        was_idle = not use.users
        if was_idle:
            self._passed.pop(block, None)
            self._ended.pop(block, None)
        use.users += 1
        use.found += 1
        return was_idle

    def release(self, block: int, *, ended: bool) -> bool:
        """A window has passed a part, or its sequence has ``ended``; returns whether no window reaches it now."""
        use = self._parts[block]
        use.users -= 1
        if use.users:
            return False
        (self._ended if ended or use.found >= FOUND_OFTEN else self._passed)[block] = None
        return True

    def drop(self, block: int) -> tuple[int, ...]:
        """The content of a block is forgotten: the blocks of its part, if it has one that no window reaches."""
        use = self._parts.get(block)
        if use is None or use.users:
            return ()
        del self._parts[block]
        self._passed.pop(block, None)
        self._ended.pop(block, None)
        return use.blocks

    def evict(self, *, passed: bool) -> tuple[int, ...]:
        """Give up the oldest part that a window has ``passed``, or else the oldest of the others; its blocks."""
        order = self._passed if passed else self._ended
        return self.drop(next(iter(order))) if order else ()

    def usable(self, blocks: list[int], block_size: int) -> int:
        """How many of these first blocks of a sequence are a prefix whose next position finds all that it reads."""
        end = len(blocks)
        while end:
            first = self.groups.first(end * block_size, block_size)
            missing = next(
                (at for at in range(end - 1, first - 1, -1) if blocks[at] not in self._parts), None
            )
            if missing is None:
                return end
            end = missing  # a prefix that ends behind it may need it
        return 0

    def check(self, held: Mapping[int, int]) -> set[int]:
        """Raise AssertionError unless windows reach as many parts as ``held`` says; returns the blocks of all parts."""
        used = {block: use.users for block, use in self._parts.items() if use.users}
        assert used == dict(held), "the users of parts are counted wrongly"
        idle = self._parts.keys() - used.keys()
        assert idle == self._passed.keys() | self._ended.keys(), "an idle part is in no order"
        assert not self._passed.keys() & self._ended.keys(), "an idle part is in two orders"
        taken = [block for use in self._parts.values() for block in use.blocks]
        assert len(taken) == len(set(taken)), "two parts have the same block"
        return set(taken)
