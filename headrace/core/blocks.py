"""Pages of keys and values: who holds them, what they contain, which one goes next.

```
 root ──sha256──> key0 ──sha256──> key1 ──> …        a full block's key covers all tokens before it
        block 4          block 9        ├─ block 12  (tokens p q r)      children of key1: full blocks
                                        └─ block 31  (tokens p q s t)    and partly filled tails
```
A block with references belongs to running sequences. When the last reference goes, its content stays findable
until the block is needed for something else; which cached block goes first is the eviction policy's word.
The pool knows ids and tokens, never tensors: copying content is a `Move` that the runner carries out.
"""

from __future__ import annotations

import hashlib
import heapq
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from headrace.core.events import Event, Evicted, EvictReason

CANDIDATES = 8
"""How many partly matching blocks are compared at most: bounds the cost of a look-up."""

STALE = 64
"""Entries of blocks in use again that the order of eviction may hold beside as many as are current."""


class Block:
    """A page of the cache. ``tokens`` is the content known to be computed, empty while it is not findable."""

    __slots__ = ("id", "key", "parent", "refs", "stamp", "tokens", "used")

    def __init__(self, block_id: int) -> None:
        self.id = block_id
        self.refs = 0
        self.key: bytes | None = None
        self.parent = b""
        self.tokens: tuple[int, ...] = ()
        self.used = 0
        self.stamp = 0


class EvictionPolicy(Protocol):
    """Which cached block loses its content first: the one of lowest priority."""

    def priority(self, block: Block) -> float: ...


class LeastRecentlyUsed:
    """Evict what was released longest ago; a sequence's last block goes before its first."""

    def priority(self, block: Block) -> float:
        return block.used


class PrefixHit(NamedTuple):
    """What the cache holds of a sequence: whole blocks to share, then one of which ``copied`` tokens fit."""

    blocks: tuple[int, ...]
    source: int
    copied: int

    def tokens(self, block_size: int) -> int:
        return len(self.blocks) * block_size + self.copied


NO_HIT = PrefixHit((), 0, 0)


def root_key(salt: str, adapter: str) -> bytes:
    """The key before the first block: requests of different salt or adapter never meet below it."""
    parts = (salt.encode(), adapter.encode())
    return hashlib.sha256(b"".join(len(part).to_bytes(8, "little") + part for part in parts)).digest()


def chained_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a full block: SHA-256 over the parent's key and the block's tokens."""
    return hashlib.sha256(parent + array("q", tokens).tobytes()).digest()


class BlockPool:
    """All blocks of one tier, with references, content keys and the order of eviction.

    Raises:
        ValueError: fewer than one block, or a block size below one.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        eviction: EvictionPolicy,
        tell: Callable[[Event], None],
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs blocks and a block size, got {num_blocks} and {block_size}")
        self.block_size = block_size
        self._blocks = [Block(i) for i in range(num_blocks)]
        self._eviction = eviction
        self._tell = tell
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._cached: list[tuple[float, int, int]] = []  # heap of (priority, stamp, id)
        self._num_cached = 0
        self._clock = 0
        self._by_key: dict[bytes, Block] = {}
        self._children: dict[tuple[bytes, int], dict[int, Block]] = {}
        self._promised: dict[bytes, int] = {}

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    @property
    def num_free(self) -> int:
        """Blocks without references, cached or blank: all of them can be allocated."""
        return len(self._blank) + self._num_cached

    @property
    def num_cached(self) -> int:
        """Blocks without references whose content can still be found."""
        return self._num_cached

    def references(self) -> list[int]:
        """The reference count of every block, by id."""
        return [block.refs for block in self._blocks]

    # -- taking and giving back --------------------------------------------------------------------

    def allocate(self, count: int) -> list[int]:
        """``count`` blocks with one reference each; their old content is forgotten.

        Raises:
            IndexError: fewer are free; ask `num_free` first.
        """
        if count > self.num_free:
            raise IndexError(f"{count} blocks asked for, {self.num_free} free")
        taken = []
        for _ in range(count):
            block = self._blocks[self._blank.pop()] if self._blank else self._evict()
            block.refs = 1
            taken.append(block.id)
        return taken

    def can_allocate(self, count: int, shared: Sequence[int], reserve: int) -> bool:
        """Whether ``count`` blocks and ``reserve`` more are free once ``shared`` have been taken too."""
        revived = sum(self._blocks[block_id].refs == 0 for block_id in shared)
        return count + reserve <= self.num_free - revived

    def share(self, block_ids: Iterable[int]) -> None:
        """Take one more reference to each block."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            if block.refs == 0:
                self._num_cached -= 1
                block.stamp = self._tick()
            block.refs += 1

    def release(self, table: Sequence[int]) -> None:
        """Give back one reference to each block of a table, the tail first, so that it is evicted first."""
        for block_id in reversed(table):
            block = self._blocks[block_id]
            if block.refs <= 0:
                raise ValueError(f"block {block_id} is released but nobody holds it")
            block.refs -= 1
            if block.refs == 0:
                if block.tokens:
                    block.used = block.stamp = self._tick()
                    self._num_cached += 1
                    heapq.heappush(self._cached, (self._eviction.priority(block), block.stamp, block.id))
                else:
                    self._blank.append(block.id)
        if len(self._cached) > 2 * self._num_cached + STALE:
            self._cached = [entry for entry in self._cached if self._is_current(entry)]
            heapq.heapify(self._cached)

    def _is_current(self, entry: tuple[float, int, int]) -> bool:
        """Whether a block lies in the cache as it did when the entry was made."""
        _, stamp, block_id = entry
        block = self._blocks[block_id]
        return block.refs == 0 and block.stamp == stamp and bool(block.tokens)

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _evict(self) -> Block:
        while True:
            entry = heapq.heappop(self._cached)
            if self._is_current(entry):
                block = self._blocks[entry[2]]
                self._forget(block)
                self._num_cached -= 1
                self._tell(Evicted(block.id, EvictReason.ALLOCATION))
                return block

    # -- content -----------------------------------------------------------------------------------

    def register(self, block_id: int, parent: bytes, tokens: Sequence[int]) -> bytes:
        """Make a held block's computed content findable; a full block's chained key comes back.

        A part of a block may be registered first and the whole later. When an equal full block is known
        already, that one stays the one that is found.
        """
        block = self._blocks[block_id]
        full = len(tokens) == self.block_size
        key = chained_key(parent, tokens) if full else parent
        if full:
            self._promised.pop(key, None)
            if key in self._by_key:
                return key
        if block.tokens:
            self._forget(block)
        block.parent = parent
        block.tokens = tuple(tokens)
        self._children.setdefault((parent, tokens[0]), {})[block_id] = block
        if full:
            block.key = key
            self._by_key[key] = block
        return key

    def _forget(self, block: Block) -> None:
        siblings = self._children[block.parent, block.tokens[0]]
        del siblings[block.id]
        if not siblings:
            del self._children[block.parent, block.tokens[0]]
        if block.key is not None:
            del self._by_key[block.key]
            block.key = None
        block.tokens = ()

    def match(self, root: bytes, keys: Sequence[bytes], tokens: Sequence[int], limit: int) -> PrefixHit:
        """The longest computed prefix of ``tokens[:limit]``, token-exact.

        Args:
            root: the key before the first block.
            keys: chained keys of the full blocks of ``tokens``.
            tokens: what the sequence knows.
            limit: tokens that may come from the cache (one less than known: the last one must be computed).
        """
        size = self.block_size
        shared: list[int] = []
        parent = root
        for key in keys[: limit // size]:
            block = self._by_key.get(key)
            if block is None:
                break
            shared.append(block.id)
            parent = key
        start = len(shared) * size
        rest = tuple(tokens[start : min(start + size, limit)])
        best, copied = 0, 0
        if rest:
            siblings = self._children.get((parent, rest[0]), {})
            for _, block in zip(range(CANDIDATES), reversed(siblings.values()), strict=False):
                common = _common_length(block.tokens, rest)
                if common > copied:
                    best, copied = block.id, common
        return PrefixHit(tuple(shared), best, copied)

    def promise(self, keys: Iterable[bytes]) -> None:
        """Somebody is about to compute the full blocks of these keys."""
        for key in keys:
            if key not in self._by_key:
                self._promised[key] = self._promised.get(key, 0) + 1

    def withdraw(self, keys: Iterable[bytes]) -> None:
        """Undo `promise` for what was not computed after all."""
        for key in keys:
            count = self._promised.pop(key, 0)
            if count > 1:
                self._promised[key] = count - 1

    def promised(self, key: bytes) -> bool:
        """Whether a running sequence is computing the block of this key right now."""
        return key in self._promised

    def reset(self) -> None:
        """Forget all content; held blocks stay held and are not found again."""
        for block in self._blocks:
            if block.tokens:
                self._forget(block)
                if block.refs == 0:
                    self._blank.append(block.id)
                    self._tell(Evicted(block.id, EvictReason.RESET))
        self._cached.clear()
        self._num_cached = 0

    def check(self) -> None:
        """Raise AssertionError when the pool's own books disagree."""
        free = sum(block.refs == 0 for block in self._blocks)
        cached = sum(block.refs == 0 and bool(block.tokens) for block in self._blocks)
        assert free == self.num_free, f"{free} blocks without references, {self.num_free} counted free"
        assert cached == self._num_cached, f"{cached} blocks cached, {self._num_cached} counted"
        blank = [self._blocks[i] for i in self._blank]
        assert len({block.id for block in blank}) == len(blank), "a block is blank twice"
        assert all(block.refs == 0 and not block.tokens for block in blank), "a blank block is in use"
        assert all(block.key == key for key, block in self._by_key.items()), "a key finds another block"


def _common_length(left: Sequence[int], right: Sequence[int]) -> int:
    for i, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return i
    return min(len(left), len(right))
