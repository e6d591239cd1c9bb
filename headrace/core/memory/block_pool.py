"""The block pool: paged KV memory with reference counts, content keys, and the prefix cache over all blocks.

```
 root ──sha256──> key0 ──sha256──> key1 ──> …        a full block's key covers all tokens before it
        block 4          block 9        ├─ block 12  (tokens p q r)      children of key1: full blocks
                                        └─ block 31  (tokens p q s t)    and partly filled tails
```
A block with references belongs to running sequences. When the last reference is released, its content stays in the
prefix cache until the block is needed again. The eviction policy decides which cached block is evicted first. The
pool knows ids and tokens, not tensors: copying content is a `Move` that the runner carries out.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from headrace.core.block_keys import chained_key
from headrace.core.capacity import NO_WINDOWS, WindowGroups
from headrace.core.events import Checkpointed, Event, Evicted, EvictReason
from headrace.core.memory.checkpoints import Checkpoints
from headrace.core.memory.content import ContentNotifier
from headrace.core.memory.eviction import UNRANKED, Block, EvictionOrder, EvictionPolicy, mark
from headrace.core.memory.lower_tier import Held
from headrace.core.memory.prefix_hit import PrefixHit
from headrace.core.memory.tiers import LowerTiers
from headrace.core.memory.window_blocks import WindowBlocks

CANDIDATES = 8
"""The most partly matching blocks compared in a lookup, which bounds its cost."""


class BlockPool:
    """All blocks of the device, with references, content keys and eviction order.

    ``checkpoints`` are those of a model with recurrent states, ``windows`` the groups of window layers. For other
    models a prefix may end anywhere.

    Raises:
        ValueError: there are fewer than one block, the block size is below one, or ``windows`` come with lower tiers or
            checkpoints.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        eviction: EvictionPolicy,
        emit: Callable[[Event], None],
        lower: LowerTiers | None = None,
        checkpoints: Checkpoints | None = None,
        windows: WindowGroups = NO_WINDOWS,
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(
                f"num_blocks and block_size must be at least 1, got {num_blocks} and {block_size}"
            )
        if windows.groups and (lower is not None or checkpoints is not None):
            raise ValueError(
                "groups of window layers have neither lower tiers nor recurrent states beside them"
            )
        self.block_size = block_size
        self.num_blocks = num_blocks
        self._blocks: list[Block] = []  # created on first use: a large pool may never use all
        self._emit = emit
        self.lower = lower
        self.checkpoints = checkpoints
        self.windows = WindowBlocks(windows) if windows.groups else None
        self.num_free = num_blocks
        """Blocks without references, cached or blank, and those of idle parts: all of them can be allocated."""
        self._blank: list[int] = []  # used before, now free and without content
        self._cached = EvictionOrder(eviction)
        self._by_key: dict[bytes, Block] = {}
        self._children: dict[tuple[bytes, int], Block] = {}  # the newest of equal parent and first token
        self._announced: dict[bytes, int] = {}
        self._wanted: dict[bytes, int] = {}
        self.notifier = ContentNotifier()
        if lower is not None and checkpoints is not None:
            lower.tell_gone(self._gone)

    def full_blocks(self) -> list[Block]:
        """All full blocks in the prefix cache."""
        return list(self._by_key.values())

    @property
    def num_cached(self) -> int:
        """Blocks without references whose content is still cached."""
        return len(self._cached)

    def references(self) -> list[int]:
        """The reference count of every block, by id."""
        return [block.refs for block in self._blocks] + [0] * (self.num_blocks - len(self._blocks))

    def states(self, most: int) -> tuple[int, list[tuple[int, bool]]]:
        """Reference count, and whether its content is cached, of one in so many of the blocks used so far, by id.

        The first value is how many: the smallest number with which there are at most ``most``.
        """
        every = max(1, -(-len(self._blocks) // most))
        return every, [(block.refs, bool(block.tokens)) for block in self._blocks[::every]]

    # -- references --------------------------------------------------------------------------------

    def allocate(self, count: int) -> list[int]:
        """Allocate ``count`` blocks with one reference each; their old content is evicted.

        Raises:
            IndexError: fewer are free; check `num_free` first.
        """
        if count > self.num_free:
            raise IndexError(f"{count} blocks requested, {self.num_free} free")
        blocks, blank = self._blocks, self._blank
        # 1. Blocks without content, which cost nothing. 2. Blocks that were never used. 3. Only then evict content.
        taken = [blank.pop() for _ in range(min(count, len(blank)))]
        for block_id in range(len(blocks), min(self.num_blocks, len(blocks) + count - len(taken))):
            blocks.append(Block(block_id))
            taken.append(block_id)
        if len(taken) < count:
            missing = count - len(taken)
            taken += self._evict(missing) if self.windows is None else self._reclaim(self.windows, missing)
        for block_id in taken:
            blocks[block_id].refs = 1
        self.num_free -= count
        return taken

    def references_of(self, block_ids: Iterable[int]) -> list[int]:
        """The reference counts of these blocks; a free one that would come back into use has none."""
        return [self._blocks[block_id].refs for block_id in block_ids]

    def share(self, block_ids: Iterable[int]) -> None:
        """Add one reference to each block."""
        for block_id in block_ids:
            block = self._blocks[block_id]
            if block.refs == 0:
                self._cached.discard(block)
                self.num_free -= 1
            block.refs += 1
            block.hits += 1

    def release(self, table: Sequence[int]) -> None:
        """Release one reference to each block of a table, the tail first, so that the tail is evicted first."""
        blocks, chain = self._blocks, len(table)
        idle, blank, emptied = [], self._blank, 0
        for block_id in reversed(table):
            block = blocks[block_id]
            refs = block.refs - 1
            if refs < 0:
                raise ValueError(f"block {block_id} is released but has no reference")
            block.refs = refs
            # The longest chain that ends behind this block: what recomputation would cost if it were lost.
            if block.chain < chain:
                block.chain = chain
            if not refs:
                if block.tokens:
                    idle.append(block)
                else:
                    blank.append(block_id)
                    emptied += 1
                    if self.windows is not None:
                        self._blank_part(self.windows.drop(block_id))
        self.num_free += len(idle) + emptied
        self._cached.add_all(idle)

    def advance(self, now: float) -> None:
        """Set the time, in seconds: retention that has expired falls back to the default."""
        self._cached.advance(now)
        if self.lower:
            self.lower.advance(now)
        if self.checkpoints is not None:
            self.checkpoints.advance(now)

    # -- parts of window layers --------------------------------------------------------------------

    def _reclaim(self, windows: WindowBlocks, count: int) -> list[int]:
        """Blocks of parts that windows have passed, then cached blocks with their parts, then other parts."""
        taken: list[int] = []
        while len(taken) < count:
            if self._blank:
                taken.append(self._blank.pop())
            elif part := windows.evict(passed=True):
                self._blank_part(part)
            elif self._cached:
                taken += self._evict(1)
            elif part := windows.evict(passed=False):
                self._blank_part(part)
            else:
                raise IndexError(f"{count} blocks requested, {len(taken)} free")
        return taken

    def _blank_part(self, part: tuple[int, ...]) -> None:
        """Blocks of an idle part, which counted as free, have lost their content."""
        for block_id in part:
            self._blocks[block_id].refs = 0
        self._blank += part

    def _evict(self, count: int) -> list[int]:
        lower, forget, windows = self.lower, self._forget, self.windows
        evicted, unranked = [], 0
        for block in self._cached.pop(count):
            if lower:
                lower.demote(block)  # before its content is forgotten: the host tier copies it first
            forget(block)
            if windows is not None:
                self._blank_part(windows.drop(block.id))
            evicted.append(block.id)
            unranked += block.rank == UNRANKED
        if unranked:  # these come first
            self._emit(Evicted(tuple(evicted[:unranked]), EvictReason.UNRANKED))
        if unranked < count:
            self._emit(Evicted(tuple(evicted[unranked:]), EvictReason.ALLOCATION))
        return evicted

    # -- content -----------------------------------------------------------------------------------

    def register(
        self, block_id: int, parent: bytes, tokens: Sequence[int], key: bytes | None = None, *, start: int = 0
    ) -> bytes:
        """Add a held block's computed content to the prefix cache; returns a full block's chained key.

        A part of a block may be registered first and the whole later. If an equal full block is cached already,
        lookups keep finding that one. ``key`` is a full block's, if the calling code has it; ``start``, the blocks
        before it.
        """
        if len(tokens) == self.block_size:
            key = key or chained_key(parent, tokens)
            self.register_chain([block_id], parent, tokens, [key], start)
            return key
        self._link(self._blocks[block_id], parent, tuple(tokens))
        return parent

    def register_chain(
        self, table: Sequence[int], parent: bytes, tokens: Sequence[int], keys: Sequence[bytes], start: int
    ) -> None:
        """Register full blocks that follow each other, ``start`` blocks from the beginning of their sequence: one key
        for each, and the tokens of all of them.
        """
        size, by_key, announced, wanted = self.block_size, self._by_key, self._announced, self._wanted
        packed, windows = tuple(tokens), self.windows
        at = 0
        for block_id, key in zip(table, keys, strict=True):
            announced.pop(key, None)
            if windows is not None and key in by_key and block_id in windows:
                self._give_up_for(windows, by_key[key], self._blocks[block_id])
            if (
                key not in by_key
            ):  # an equal block stays the one that is found; this one is freed with its sequence
                block = self._blocks[block_id]
                self._link(block, parent, packed[at : at + size])
                block.key = key
                block.wanted = key in wanted
                by_key[key] = block
                self.notifier.stored(parent if start or at else None, key, block.tokens, block_id)
            parent = key
            at += size

    def _give_up_for(self, windows: WindowBlocks, found: Block, other: Block) -> None:
        """Forget a cached block that has lost its part: an equal one with a part is found in its place."""
        if found is other or found.id in windows:
            return
        other.hits, other.chain = found.hits, max(found.chain, other.chain)
        other.retention, other.seconds = found.retention, found.seconds
        if not found.refs:
            self._cached.discard(found)
            self._blank.append(found.id)
        self._forget(found)

    def _link(self, block: Block, parent: bytes, tokens: tuple[int, ...]) -> None:
        """Add a block's new content to the blocks of the same parent and first token, newest first."""
        if block.tokens:
            self._forget(block)
        block.parent, block.tokens = parent, tokens
        place = (parent, tokens[0])
        older = self._children.setdefault(place, block)
        if older is not block:
            block.older, older.newer = older, block
            self._children[place] = block

    def keep(self, block_id: int, retention: int, seconds: float | None) -> None:
        """Set a held block's retention priority, until ``seconds`` after its last use."""
        self._blocks[block_id].keep(retention, seconds)

    def retain(self, keys: Sequence[bytes], retention: int) -> None:
        """Set the retention priority of the cached full blocks of a chain, in place of what requests asked for."""
        blocks = [block for key in reversed(keys) if (block := self._by_key.get(key))]
        for block in blocks:
            block.retention, block.seconds, block.due = retention, None, None
        self._cached.update(blocks)
        if self.checkpoints is not None:
            self.checkpoints.retain(keys, retention)

    def _forget(self, block: Block) -> None:
        older, newer = block.older, block.newer
        if older is not None:
            older.newer = newer
        if newer is not None:
            newer.older = older
        elif older is not None:
            self._children[block.parent, block.tokens[0]] = older
        else:
            del self._children[block.parent, block.tokens[0]]
        block.older = block.newer = None
        if block.key is not None:
            del self._by_key[block.key]
            self.notifier.removed(block.key, block.id)
            self._gone(block.key)
        block.forget()

    def _gone(self, key: bytes) -> None:
        """A tier has lost the block of this key: if no other one has it, its checkpoint is forgotten, too."""
        if self.checkpoints is not None and not self._is_anywhere(key):
            self.checkpoints.forget(key)

    def _is_anywhere(self, key: bytes) -> bool:
        """Whether any tier has the full block of this key."""
        return key in self._by_key or (self.lower is not None and key in self.lower)

    def match(
        self,
        root: bytes,
        keys: Sequence[bytes],
        tokens: Sequence[int],
        limit: int,
        *,
        may_wait: bool = True,
    ) -> PrefixHit:
        """The longest cached prefix of ``tokens[:limit]``, token-exact.

        Args:
            root: the key before the first block.
            keys: chained keys of the full blocks of ``tokens``.
            tokens: the known tokens of the sequence.
            limit: tokens that may come from the cache (one less than known: the last one must be computed).
            may_wait: whether there is time to fetch content that is not in the host tier.
        """
        size = self.block_size
        # 1. Whole blocks on the device. The keys are SHA-256 chains, so a key stands for all tokens before it, too.
        shared: list[int] = []
        parent = root
        for key in keys[: limit // size]:
            block = self._by_key.get(key)
            if block is None:
                break
            shared.append(block.id)
            parent = key
        # 2. Whole blocks that follow them in lower tiers, if fetching is faster than computing.
        below: tuple[Held, ...] = ()
        declined = 0
        if self.lower:
            following = keys[len(shared) : limit // size]
            below, declined = self.lower.find(following, tokens, len(shared) * size, may_wait=may_wait)
            parent = following[len(below) - 1] if below else parent
        if self.checkpoints is not None:  # usable only as far as a state was saved
            found = len(shared) + len(below)
            usable, cell = self.checkpoints.find(keys[:found])
            below = below[: max(0, usable - len(shared))]
            return PrefixHit(tuple(shared[:usable]), 0, 0, below, declined, cell, found - usable)
        if self.windows is not None:
            usable = self.windows.usable(shared, size)
            return PrefixHit(tuple(shared[:usable]), 0, 0, beyond=len(shared) - usable)
        # 3. A part of one more block: the longest common beginning with a block that follows the same parent. It is
        #    copied, since the sequence will write behind it.
        start = (len(shared) + len(below)) * size
        rest = tuple(tokens[start : min(start + size, limit)])
        best, copied = 0, 0
        sibling = self._children.get((parent, rest[0])) if rest else None
        for _ in range(CANDIDATES):
            if sibling is None:
                break
            common = _common_length(sibling.tokens, rest)
            if common > copied:
                best, copied = sibling.id, common
            sibling = sibling.older
        return PrefixHit(tuple(shared), best, copied, below, declined)

    def promote(self, hit: PrefixHit, targets: Sequence[int]) -> None:
        """Fill held blocks, one for each of ``hit.below``, from the host tier; they are cached at once."""
        if self.lower is None:
            return
        with self.notifier.restoring():
            for start, (held, target) in enumerate(zip(hit.below, targets, strict=True), len(hit.blocks)):
                content = self.lower.promote(held, target)
                self.register(target, content.parent, content.tokens, content.key, start=start)
                block = self._blocks[target]
                block.hits, block.chain = content.hits, content.chain
                block.retention, block.seconds = content.retention, content.seconds

    def leading(self, keys: Sequence[bytes], *, below: bool = False) -> int:
        """Number of leading blocks of a chain that are cached or being computed, found by bisection; with ``below``,
        also of those that lower tiers have behind them.

        A chain is evicted from its end. If its first block is missing, no other is checked.
        """
        count = self._present(keys)
        if self.lower and below:
            count += self.lower.leading(keys[count:])
        return self.checkpoints.reach(keys[:count]) if self.checkpoints is not None else count

    def _present(self, keys: Sequence[bytes]) -> int:
        if not keys or (keys[0] not in self._by_key and keys[0] not in self._announced):
            return 0
        return bisect_left(keys, True, key=lambda key: key not in self._by_key and key not in self._announced)

    def departures(self, keys: Sequence[bytes]) -> set[int]:
        """Where a chain leaves others: after how many blocks it leaves what is cached or being computed, and after how
        many it leaves the chains of waiting requests.
        """
        wanted = [*(self._wanted.get(key, 0) for key in keys), 0]
        leaves = {count for count, (here, behind) in enumerate(pairwise(wanted), 1) if here > behind}
        return leaves | {self._present(keys)}

    def is_cached(self, key: bytes) -> bool:
        """Whether the full block of this key is in the prefix cache."""
        return key in self._by_key

    def is_wanted(self, key: bytes) -> bool:
        """Whether a waiting request needs the full block of this key."""
        return key in self._wanted

    def announce(self, keys: Iterable[bytes]) -> None:
        """A running sequence is about to compute the full blocks of these keys."""
        by_key, announced = self._by_key, self._announced
        for key in keys:
            if key not in by_key:
                announced[key] = announced.get(key, 0) + 1

    def withdraw(self, keys: Iterable[bytes]) -> None:
        """Undo `announce` for blocks that were not computed after all."""
        for key in keys:
            count = self._announced.pop(key, 0)
            if count > 1:
                self._announced[key] = count - 1

    def is_announced(self, key: bytes) -> bool:
        """Whether a running sequence is about to make this key findable: its block, or its checkpoint."""
        return key in self._announced if self.checkpoints is None else self.checkpoints.is_announced(key)

    def want(self, keys: Iterable[bytes]) -> None:
        """A waiting request needs the full blocks of these keys: they are evicted after blocks that no request waits
        for.
        """
        wanted, by_key, lower = self._wanted, self._by_key, self.lower
        changed = []
        for key in keys:
            count = wanted[key] = wanted.get(key, 0) + 1
            if count == 1 and (lower or key in by_key):
                changed.append(key)
        if changed:
            self._mark(changed, wanted=True)

    def unwant(self, keys: Iterable[bytes]) -> None:
        """Undo `want`: the request has started or ended."""
        wanted, by_key, lower = self._wanted, self._by_key, self.lower
        changed = []
        for key in keys:
            count = wanted.pop(key) - 1
            if count:
                wanted[key] = count
            elif lower or key in by_key:
                changed.append(key)
        if changed:
            self._mark(changed, wanted=False)

    def _mark(self, keys: Sequence[bytes], *, wanted: bool) -> None:
        mark(self._by_key, self._cached, keys, wanted=wanted)
        if self.checkpoints is not None:
            self.checkpoints.mark(keys, wanted=wanted)
        if self.lower:
            self.lower.mark(keys, wanted=wanted)

    def reset(self, *, lower: bool = True) -> None:
        """Clear the prefix cache, including lower tiers unless ``lower`` is false.

        Held blocks stay held and are no longer found.
        """
        if self.lower and lower:
            self.lower.reset()
        idle = [block for block in self._blocks if block.tokens and not block.refs]
        for block in idle:
            self._cached.discard(block)
            self._blank.append(block.id)
            if self.windows is not None:
                self._blank_part(self.windows.drop(block.id))
        for block in self._blocks:
            if block.tokens:
                self._forget(block)
        self.notifier.cleared()
        if idle:
            self._emit(Evicted(tuple(block.id for block in idle), EvictReason.RESET))

    def check(self) -> None:
        """Raise AssertionError if the counts of the pool, or those of the lower tiers, disagree."""
        if self.lower:
            self.lower.check()
        free = self.references().count(0) + (0 if self.windows is None else self.windows.num_idle)
        cached = sum(block.refs == 0 and bool(block.tokens) for block in self._blocks)
        assert free == self.num_free, f"{free} blocks without references, {self.num_free} counted free"
        assert cached == len(self._cached), f"{cached} blocks cached, {len(self._cached)} counted"
        assert all(
            (block in self._cached) == (block.refs == 0 and bool(block.tokens)) for block in self._blocks
        )
        assert all(block.wanted == (block.key in self._wanted) for block in self._by_key.values())
        blank = [self._blocks[i] for i in self._blank]
        assert len({block.id for block in blank}) == len(blank), "a block is blank twice"
        assert all(block.refs == 0 and not block.tokens for block in blank), "a blank block is in use"
        assert all(block.key == key for key, block in self._by_key.items()), "a key finds another block"

    def saved_checkpoints(self) -> list[tuple[bytes, int, int]]:
        """Key, number of blocks and cell of all checkpoints, least recently used first."""
        cells = self.checkpoints.saved() if self.checkpoints is not None else []
        return [(cell.key, cell.chain, cell.id) for cell in cells if cell.key is not None]

    def adopt_checkpoint(self, key: bytes, chain: int) -> int | None:
        """The cell for the checkpoint of an earlier process; None if no tier has its block, or there is no cell."""
        if self.checkpoints is None or not self._is_anywhere(key):
            return None
        cell = self.checkpoints.adopt(key, chain)
        if cell is not None:
            self._emit(Checkpointed("", chain * self.block_size))
        return cell

    def check_checkpoints(self, held: Iterable[int], announced: Iterable[bytes]) -> None:
        """Raise AssertionError unless checkpoints agree with blocks and with what running sequences hold."""
        if self.checkpoints is not None:
            self.checkpoints.check(self._is_anywhere, self.is_wanted, held, announced)


def _common_length(left: Sequence[int], right: Sequence[int]) -> int:
    for i, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return i
    return min(len(left), len(right))
