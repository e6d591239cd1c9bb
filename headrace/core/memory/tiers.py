"""Tiers below the device: what evicted blocks are kept where, and how they come back.

```
 device ──evicted──> host ──worth it──> disk
   ^                  | ^                 |
   └──── restored ────┘ └──── fetched ────┘       down: one step at a time; up: disk only by way of the host
```
Copies between device and host are moves that run in order before a step's rows, so both ends may be used at once.
Copies to and from the disk take their time: they begin as moves too, and until their `Arrival` both ends are pinned
and the target is not ready. A block keeps its key in every tier, and its tokens are compared wherever it is found.

These books know keys and block ids; what carries bytes is the runner's. Without a disk the host is all there is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress

from headrace.core.events import Event, Moved, MoveReason, RestoreDeclined, TransferFailed
from headrace.core.memory.eviction import Block
from headrace.core.memory.lower_tier import Held, LowerTier, Saved
from headrace.core.memory.restore import RestoreFailed, RestorePolicy
from headrace.core.plan import Arrival, Move, Tier
from headrace.core.request import DEFAULT_RETENTION

MAX_TRANSFERS = 512
"""Copies to or from the disk under way at once: each pins two blocks."""

WRITE_SHARE = 4
"""One in so many of these, and of the host's blocks, may be writes; twice as many of what is worth more."""


class LowerTiers:
    """Host and disk together: takes evicted blocks in, finds them, brings them up.

    ``block_bytes`` is what a block's keys and values take. Moves collect until `take_moves`; they must run in their
    order.
    """

    def __init__(
        self,
        host: LowerTier,
        disk: LowerTier | None,
        restore: RestorePolicy,
        *,
        block_size: int,
        block_bytes: int,
        tell: Callable[[Event], None],
    ) -> None:
        self.host = host
        self.disk = disk
        self._tiers = (host,) if disk is None else (host, disk)
        self._restore = restore
        self._block_size = block_size
        self._block_bytes = block_bytes
        self._tell = tell
        self._moves: list[Move] = []
        self._under_way: set[Move] = set()
        self._claimed: list[Block] = []
        self._writable = disk is not None
        self._most_writes = max(1, min(MAX_TRANSFERS, host.num_blocks) // WRITE_SHARE)

    @property
    def under_way(self) -> int:
        """Copies to or from the disk that have begun and not ended."""
        return len(self._under_way)

    def take_moves(self) -> list[Move]:
        """The moves since the last call."""
        moves, self._moves = self._moves, []
        return moves

    # -- down --------------------------------------------------------------------------------------

    def take_down(self, block: Block) -> None:
        """A block of the device is about to lose its content: keep it in the host tier if it is worth it.

        It is if it is full, nobody asked for less than the usual retention, and fetching its chain would be quicker
        than computing it. Not only what was found again: most of what is found at all is found below for the first
        time (`benchmarks/cache_order.py`).
        """
        if block.key is None or block.retention < DEFAULT_RETENTION:
            return
        held = self.host.find(block.key, block.tokens)
        if held is not None:
            self.host.touch(held)
            return
        if not self._pays(Tier.DEVICE, Tier.HOST, block.chain):
            return
        target = self.host.make_room()
        if target is not None:
            self.host.put(target, block, filling=False)
            self._move(Move(block.id, target.id, Tier.DEVICE, Tier.HOST), MoveReason.EVICTED)
            self._write(target)

    def _write(self, source: Block) -> None:
        """Copy a block of the host to the disk if fetching its chain from there would be quicker than computing it.

        While the disk has much to write, only what was found again or was asked to be kept; the rest of what may be
        under way is for those who wait to read.
        """
        worth_more = source.hits or source.retention > DEFAULT_RETENTION
        if len(self._under_way) >= self._most_writes * (2 if worth_more else 1):
            return
        if self.disk is None or not self._writable or source.key is None:
            return
        if not self._pays(Tier.HOST, Tier.DISK, source.chain):
            return
        held = self.disk.find(source.key, source.tokens)
        if held is not None:
            if self.disk.is_ready(held):
                self.disk.touch(held)
            return
        target = self.disk.make_room()
        if target is not None:
            self.disk.put(target, source, filling=True)
            self.host.pin(source)
            self._begin(Move(source.id, target.id, Tier.HOST, Tier.DISK), MoveReason.KEPT)

    def save(self, device: Iterable[Block]) -> Iterator[list[Move]]:
        """Moves that bring what device and host hold to the disk, a few at a time, what is worth most last.

        Let each batch arrive before asking for the next. Where the disk has no room for all, it keeps the last.
        """
        if self.disk is None:
            return
        yield self.take_moves()  # what was under way before
        holders = {block.key: (Tier.HOST, block) for block in self.host}
        holders |= {block.key: (Tier.DEVICE, block) for block in device}
        todo = [each for key, each in holders.items() if key and self.disk.find(key, each[1].tokens) is None]
        todo.sort(
            key=lambda each: (each[1].retention, each[1].hits > 0, each[0] is Tier.DEVICE, each[1].used)
        )
        for tier, source in todo[-self.disk.num_blocks :]:
            target = self.disk.make_room() if self._writable else None
            if target is None:
                break
            self.disk.put(target, source, filling=True)
            if tier is Tier.HOST:
                self.host.pin(source)
            self._begin(Move(source.id, target.id, tier, Tier.DISK), MoveReason.SAVED)
            if len(self._under_way) >= MAX_TRANSFERS:
                yield self.take_moves()
        yield self.take_moves()

    def saved(self) -> list[Saved]:
        """What the disk holds, least worth first, for whoever writes it down."""
        if self.disk is None:
            return []
        blocks = sorted(self.disk, key=lambda block: block.used)
        return [Saved(block.id, block.parent, block.key or b"", block.tokens) for block in blocks]

    def adopt(self, saved: Iterable[Saved]) -> None:
        """Take over what an earlier run has left on the disk, in the order of `saved`."""
        for each in saved:
            if self.disk is not None:
                self.disk.adopt(each)

    def _pays(self, source: Tier, target: Tier, blocks: int) -> bool:
        """Whether a chain of so many blocks is worth bringing down; where the policy fails, it is not."""
        try:
            return bool(self._restore.pays(target, blocks))
        except Exception:
            self._tell(TransferFailed(source, target))
            return False

    # -- up ----------------------------------------------------------------------------------------

    def find(
        self, keys: Sequence[bytes], tokens: Sequence[int], start: int, *, from_disk: bool
    ) -> tuple[tuple[Held, ...], int]:
        """Where the blocks of ``keys`` lie as far as fetching them is quicker, and how many more lie somewhere.

        ``start`` is the position of the first of them in ``tokens``. Without ``from_disk`` what is not in the host
        tier yet counts as not there.

        Raises:
            RestoreFailed: the policy failed.
        """
        found: list[Held] = []
        for key in keys[: self.host.num_blocks]:
            held = self._held(key, tokens[start : start + self._block_size], from_disk)
            if held is None:
                break
            found.append(held)
            start += self._block_size
        if not found:
            return (), 0
        begin = start - len(found) * self._block_size
        try:
            count = self._restore.choose(begin, [held.tier for held in found])
            if not isinstance(count, int) or not 0 <= count <= len(found):
                raise ValueError(f"{count!r} of {len(found)} blocks")
        except Exception as error:
            raise RestoreFailed(error) from error
        return tuple(found[:count]), len(found) - count

    def leading(self, keys: Sequence[bytes]) -> int:
        """How many of the first blocks of a chain lie here, as far as one can tell by bisection."""
        return bisect_left(keys, True, key=lambda key: not any(key in tier for tier in self._tiers))

    def _held(self, key: bytes, tokens: Sequence[int], from_disk: bool) -> Held | None:
        block = self.host.find(key, tokens)
        if block is not None and (from_disk or self.host.is_ready(block)):
            return Held(Tier.HOST, block.id, self.host.is_ready(block))
        if self.disk is None or not from_disk:
            return None
        block = self.disk.find(key, tokens)
        if block is None or not self.disk.is_ready(block):
            return None
        return Held(Tier.DISK, block.id, ready=True)

    def claim(self, below: Iterable[Held]) -> None:
        """Keep in the host, while a step is planned, what somebody is to start with: else those behind him fetch theirs
        in its place, or he his chain's end in place of its beginning, and so on in each step."""
        for held in below:
            if held.tier is Tier.HOST:
                block = self.host.blocks[held.block]
                self.host.pin(block)
                self._claimed.append(block)

    def fetch(self, below: Iterable[Held]) -> bool:
        """Begin to bring what lies on disk to the host; whether anything is on its way there now."""
        coming = False
        for held in below:
            if held.tier is Tier.DISK and self.disk is not None and len(self._under_way) < MAX_TRANSFERS:
                source = self.disk.blocks[held.block]
                target = self.host.make_room()
                if target is None:
                    break
                self.host.put(target, source, filling=True)
                self.disk.pin(source)
                self._begin(Move(source.id, target.id, Tier.DISK, Tier.HOST), MoveReason.FETCHED)
            coming = coming or held.tier is Tier.DISK or not held.ready
        return coming and bool(self._under_way)

    def hold(self, below: Iterable[Held]) -> None:
        """Keep what is about to be restored in the host tier while room is made on the device."""
        for held in below:
            self.host.pin(self.host.blocks[held.block])

    def bring_up(self, held: Held, target: int) -> Block:
        """Copy a block of the host that was held to a block of the device; what its content is."""
        source = self.host.blocks[held.block]
        source.hits += 1
        self._moves.append(Move(source.id, target, Tier.HOST, Tier.DEVICE))
        self.host.unpin(source)
        self._write(source)
        return source

    def tell_restored(self, request_id: str, blocks: int, declined: int) -> None:
        """A request has started with so many blocks from the host; so many more it will rather compute."""
        if blocks:
            size = blocks * self._block_bytes
            self._tell(Moved(Tier.HOST, Tier.DEVICE, blocks, size, MoveReason.RESTORED, request_id))
        if declined:
            self._tell(RestoreDeclined(request_id, declined * self._block_size))

    # -- what the disk answers ---------------------------------------------------------------------

    def arrived(self, arrivals: Iterable[Arrival]) -> None:
        """Copies to or from the disk have ended, well or not."""
        for arrival in arrivals:
            move = arrival.move
            self._under_way.discard(move)
            to_disk = move.target_tier is Tier.DISK
            target_tier = self._tier(move.target_tier)
            target = target_tier.blocks[move.target]
            if arrival.ok and move.source_tier is Tier.DISK:
                with suppress(Exception):  # what it cannot learn from is its own loss
                    self._restore.observe(Tier.DISK, arrival.seconds)
            if arrival.ok and target.key is not None:
                target_tier.filled(target)
            else:
                if target.key is not None:
                    target_tier.forget(target)
                target_tier.unpin(target)
            if move.source_tier is not Tier.DEVICE:
                self._let_go(self._tier(move.source_tier), move.source, lost=not (arrival.ok or to_disk))
            if not arrival.ok:
                self._writable = self._writable and not to_disk  # a full or broken disk is not asked again
                self._tell(TransferFailed(move.source_tier, move.target_tier))

    def _let_go(self, tier: LowerTier, block_id: int, *, lost: bool) -> None:
        block = tier.blocks[block_id]
        if lost and block.key is not None:
            tier.forget(block)
        tier.unpin(block)

    def _tier(self, tier: Tier) -> LowerTier:
        return next(each for each in self._tiers if each.tier is tier)

    # -- the rest ----------------------------------------------------------------------------------

    def mark(self, keys: Sequence[bytes], *, wanted: bool) -> None:
        """A waiting request asks for these keys of a chain, or no longer does."""
        for tier in self._tiers:
            tier.mark(keys, wanted=wanted)

    def advance(self, now: float) -> None:
        """Another step is planned: what was claimed for the one before is not any more, and retentions may end."""
        self.host.unpin_all(self._claimed[::-1])  # ends of chains first, so that they go first
        self._claimed = []
        for tier in self._tiers:
            tier.advance(now)

    def reset(self) -> None:
        """Forget everything; what is under way comes to nothing."""
        for tier in self._tiers:
            tier.reset()

    def check(self) -> None:
        """Raise AssertionError when the books of a tier disagree, or pins do not belong to transfers."""
        for tier in self._tiers:
            tier.check()
            pins = sum(block.refs for block in tier.blocks.values())
            ends = [move for move in self._under_way if tier.tier in (move.source_tier, move.target_tier)]
            claims = len(self._claimed) if tier is self.host else 0
            assert pins == len(ends) + claims, (
                f"{tier.tier}: {pins} pins, {len(ends)} transfers, {claims} claims"
            )

    def _move(self, move: Move, reason: MoveReason) -> None:
        self._moves.append(move)
        self._tell(Moved(move.source_tier, move.target_tier, 1, self._block_bytes, reason))

    def _begin(self, move: Move, reason: MoveReason) -> None:
        self._under_way.add(move)
        self._move(move, reason)
