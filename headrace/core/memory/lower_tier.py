"""One tier below the device: which blocks it holds, by key, and in which order they are evicted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from headrace.core.memory.eviction import Block, EvictionOrder, EvictionPolicy, mark
from headrace.core.plan import Tier


class Held(NamedTuple):
    """A block that a lower tier holds; not ``ready`` while its copy is under way."""

    tier: Tier
    block: int
    ready: bool


class Saved(NamedTuple):
    """A full block on disk, as the index stores it at shutdown and reads it at the next start."""

    block: int
    parent: bytes
    key: bytes
    tokens: tuple[int, ...]


class LowerTier:
    """The blocks of one tier below the device, by key, with their eviction order.

    A block is blank or held. A held block may be pinned by transfers, and is filling until its content has arrived.
    ``gone`` is called with the key of each block that has lost its content.
    """

    def __init__(self, tier: Tier, num_blocks: int, eviction: EvictionPolicy) -> None:
        self.tier = tier
        self.num_blocks = num_blocks
        self.blocks: dict[int, Block] = {}  # blocks used so far: a disk may have room for millions
        self._untouched = 0  # ids from here on are unused, except adopted ones
        self._blank: list[Block] = []
        self._order = EvictionOrder(eviction)
        self._by_key: dict[bytes, Block] = {}
        self._filling: set[int] = set()
        self.gone: Callable[[bytes], None] = _nobody_asks

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Block]:
        """The blocks whose content is complete."""
        return (block for block in self._by_key.values() if block.id not in self._filling)

    def __contains__(self, key: bytes) -> bool:
        return key in self._by_key

    def find(self, key: bytes, tokens: Sequence[int]) -> Block | None:
        """The block of this key; equal keys with other tokens are a miss."""
        block = self._by_key.get(key)
        return block if block is not None and block.tokens == tuple(tokens) else None

    def is_ready(self, block: Block) -> bool:
        """Whether the content of a held block has arrived."""
        return block.id not in self._filling

    @property
    def has_room(self) -> bool:
        """Whether `make_room` would return a block."""
        return bool(self._blank or self._order) or len(self.blocks) < self.num_blocks

    def make_room(self) -> Block | None:
        """A blank block, after an eviction if necessary; None while all are pinned."""
        if self._blank:
            return self._blank.pop()
        while self._untouched in self.blocks:
            self._untouched += 1
        if self._untouched < self.num_blocks:
            return self._new(self._untouched)
        if not self._order:
            return None
        [block] = self._order.pop(1)
        key = self._key(block)
        del self._by_key[key]
        block.forget()
        self.gone(key)
        return block

    def _new(self, block_id: int) -> Block:
        block = self.blocks[block_id] = Block(block_id)
        return block

    def put(self, block: Block, content: Block, *, filling: bool) -> None:
        """Fill a blank block with the description of ``content``, of any tier; ``filling`` until `filled`."""
        block.key, block.parent, block.tokens = content.key, content.parent, content.tokens
        block.hits, block.chain, block.wanted = content.hits, content.chain, content.wanted
        block.retention, block.seconds = content.retention, content.seconds
        self._by_key[self._key(block)] = block
        if filling:
            self._filling.add(block.id)
            block.refs = 1
        else:
            self._order.add(block, content.due)

    def adopt(self, saved: Saved) -> None:
        """Register content that a blank or unused block already holds, here or at a peer."""
        block = self.blocks.get(saved.block) or self._new(saved.block)
        block.key, block.parent, block.tokens = saved.key, saved.parent, saved.tokens
        self._by_key[saved.key] = block
        self._order.add(block)

    def filled(self, block: Block) -> None:
        """The content of a filling block has arrived."""
        self._filling.discard(block.id)
        self.unpin(block)

    def touch(self, block: Block) -> None:
        """A held block was used again: it becomes the most recently used."""
        if not block.refs:
            self._order.discard(block)
            self._order.add(block)

    def pin(self, block: Block) -> None:
        """Protect a held block from eviction."""
        if not block.refs:
            self._order.discard(block)
        block.refs += 1

    def unpin(self, block: Block) -> None:
        """Undo one `pin`; a block that was forgotten meanwhile becomes blank."""
        self.unpin_all((block,))

    def unpin_all(self, blocks: Iterable[Block]) -> None:
        """Undo one `pin` of each block; the first ones are evicted first."""
        idle: list[Block] = []
        for block in blocks:
            block.refs -= 1
            if not block.refs:
                (self._blank if block.key is None else idle).append(block)
        self._order.add_all(idle)

    def forget(self, block: Block) -> None:
        """Drop the content of a held block."""
        key = self._key(block)
        del self._by_key[key]
        self._filling.discard(block.id)
        block.forget()
        if not block.refs:
            self._order.discard(block)
            self._blank.append(block)
        self.gone(key)

    def mark(self, keys: Sequence[bytes], *, wanted: bool) -> None:
        """A waiting request needs these keys of a chain, or no longer does."""
        mark(self._by_key, self._order, keys, wanted=wanted)

    def advance(self, now: float) -> None:
        self._order.advance(now)

    def reset(self) -> None:
        """Clear the tier; pinned blocks become blank when they are unpinned."""
        for block in list(self._by_key.values()):
            self.forget(block)

    def check(self) -> None:
        """Raise AssertionError unless every block is blank, idle or pinned, and found by its key alone."""
        used = self.blocks.values()
        idle = [block for block in used if block.key is not None and not block.refs]
        pinned = [block for block in used if block.refs]
        assert len(self._blank) + len(idle) + len(pinned) == len(used), f"{self.tier}: a block is lost"
        assert len({block.id for block in self._blank}) == len(self._blank), (
            f"{self.tier}: one is blank twice"
        )
        assert all(block.key is None for block in self._blank), f"{self.tier}: a blank block has a key"
        assert all(0 <= block_id < self.num_blocks for block_id in self.blocks), (
            f"{self.tier}: too many blocks"
        )
        assert len(self._order) == len(idle), f"{self.tier}: {len(idle)} idle, {len(self._order)} in order"
        assert all(block in self._order for block in idle), f"{self.tier}: an idle block cannot be evicted"
        assert all(block.key == key for key, block in self._by_key.items()), f"{self.tier}: a key is wrong"
        assert len(self._by_key) == sum(block.key is not None for block in used)
        assert all(self.blocks[i].refs for i in self._filling), (
            f"{self.tier}: filled, but still marked as filling"
        )

    @staticmethod
    def _key(block: Block) -> bytes:
        if block.key is None:
            raise ValueError(f"block {block.id} has no content")
        return block.key


def _nobody_asks(key: bytes) -> None:
    """Ignores that a block is gone."""
