"""KV tiers below the device: where evicted blocks are stored, and how they are restored.

```
 device ──evicted──> host ──worth it──> disk
   ^                  | ^                 |
   └──── restored ────┘ ├──── fetched ────┘       down: one step at a time; up: disk and peers by way of the host
                        └──── fetched ──── peers
```
Copies between device and host are moves that run in order before a step's rows, so both ends may be used at once.
Copies to and from the disk, and from peers, take longer. They start as moves too; until their `Arrival` both ends are
pinned and the target is not ready. A block has the same key in every tier, and its tokens are compared in every tier.

This file tracks keys and block ids; the runner copies the bytes. The host is always there, disk and peers may be.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress

from headrace.core.events import Event, Moved, MoveReason, RestoreDeclined, TransferFailed
from headrace.core.memory.eviction import Block
from headrace.core.memory.lower_tier import Held, LowerTier, Saved
from headrace.core.memory.restore import RestoreFailed, RestorePolicy
from headrace.core.peers import NO_OFFER, Inquiry, Offer, Peers, PeersAnswered, Pulled
from headrace.core.plan import Arrival, Move, Tier
from headrace.core.request import DEFAULT_RETENTION

# Claims: the host blocks that waiting requests will start with, and the copies that they wait for.
#
# Without a claim, blocks fetched for later requests, or a request's own later blocks, could evict its first
# blocks in every step. A claim also records whether anything that its request waits for has arrived; until
# then, the request is not looked up again.


class Claim:
    """The claim of one waiting request."""

    __slots__ = ("_coming", "_crowded", "_missed", "below", "blocks", "kept")

    def __init__(self, below: tuple[Held, ...], blocks: list[Block]) -> None:
        self.below = below  # what was found when it was made
        self.blocks = blocks  # pinned
        self.kept = True  # whether it was renewed since the last step began
        self._coming: set[int] = set()
        self._missed: tuple[Block, bytes | None] | None = None
        self._crowded = False

    def wait_for(self, coming: set[int], missed: Block | None, *, crowded: bool) -> None:
        """Wait for copies to these blocks of the host.

        The copy of ``missed`` and those after it could not start. ``crowded``: too many copies were in flight.
        """
        self._coming = coming
        self._missed = None if missed is None else (missed, missed.key)
        self._crowded = crowded and missed is not None

    def waits(self, *, room: bool) -> bool:
        """Whether nothing that it waits for has changed; ``room``: more copies could begin."""
        if not self._crowded and not self._coming:
            return False
        return self._missed is None or not (room or self._missed[0].key != self._missed[1])

    def arrived(self, came: set[int], failed: set[int]) -> None:
        """Copies to these blocks have ended, some of which failed."""
        if self._coming & failed:
            self.look_up_again()
        else:
            self._coming -= came

    def look_up_again(self) -> None:
        """Wait for nothing any more."""
        self._coming, self._crowded = set(), False


class Claims:
    """All claims on the blocks of the host tier. A claim that is not renewed in a step lapses at the one after it."""

    def __init__(self, host: LowerTier) -> None:
        self._host = host
        self._claims: list[Claim] = []

    @property
    def pins(self) -> int:
        """Number of pins that claims hold."""
        return sum(len(claim.blocks) for claim in self._claims)

    def make(self, below: tuple[Held, ...], old: Claim | None) -> Claim:
        """Pin the blocks of ``below`` that are in the host tier, in place of the request's ``old`` claim."""
        if old is not None and old.blocks and old.below == below:
            old.kept = True
            old.look_up_again()
            return old
        claim = Claim(below, [])
        self._claims.append(claim)
        for held in below:
            if held.tier is Tier.HOST:
                self.pin(claim, self._host.blocks[held.block])
        if old is not None:
            self.drop(old)
        return claim

    def pin(self, claim: Claim, block: Block) -> None:
        """Add a block of the host tier to a claim."""
        self._host.pin(block)
        claim.blocks.append(block)

    def keep(self, claim: Claim | None) -> None:
        """Renew the claim of a request that waits for an answer of peers, if it has one."""
        if claim is not None:
            claim.kept = True

    def waits(self, claim: Claim, *, room: bool) -> bool:
        """Whether a request need not be looked up again; that renews its claim."""
        waits = claim.waits(room=room)
        claim.kept = claim.kept or waits
        return waits

    def arrived(self, arrivals: Sequence[Arrival]) -> None:
        """Copies have ended; a request that waits for one that failed is looked up again."""
        ups = [each for each in arrivals if each.move.target_tier is Tier.HOST]
        came = {each.move.target for each in ups}
        failed = {each.move.target for each in ups if not each.ok}
        for claim in self._claims:
            claim.arrived(came, failed)

    def drop(self, claim: Claim) -> None:
        """Unpin the blocks of a claim whose request starts or ends; one that has lapsed is ignored."""
        if claim in self._claims:
            self._claims.remove(claim)
            self._lapse(claim)

    def advance(self) -> None:
        """A new step is planned: claims that were not renewed in the last one lapse."""
        kept = [claim for claim in self._claims if claim.kept]
        for claim in self._claims:
            if not claim.kept:
                self._lapse(claim)
            claim.kept = False
        self._claims = kept

    def reset(self) -> None:
        """The tier was cleared: all waiting requests are looked up again."""
        for claim in self._claims:
            claim.look_up_again()

    def _lapse(self, claim: Claim) -> None:
        self._host.unpin_all(claim.blocks[::-1])  # the end of the chain first, so that it is evicted first
        claim.blocks = []
        claim.look_up_again()


# The lower tier of blocks that peers hold.
#
# A block of this tier records which peer held a key when it was asked; its content is not here. It is fetched like a
# block of the disk, and the fetch may fail.


class PeerBlocks:
    """The tier of blocks held by peers, and the connection to them."""

    def __init__(self, tier: LowerTier, peers: Peers) -> None:
        self.tier = tier
        self._peers = peers

    def ask(self, inquiry: Inquiry) -> None:
        """Begin to ask; an inquiry without keys is answered at once."""
        if inquiry.keys:
            self._peers.ask(inquiry)
        else:
            inquiry.answer, inquiry.taken = NO_OFFER, True

    def take(self, inquiry: Inquiry, offer: Offer, block_size: int) -> None:
        """Store the answer to an inquiry; of an earlier answer, only blocks that are being fetched stay."""
        inquiry.taken = True
        parent, at = inquiry.parent, 0
        for key in inquiry.keys[: min(offer.blocks, self.tier.num_blocks)]:
            tokens = inquiry.tokens[at : at + block_size]
            block = self.tier.find(key, tokens)
            if block is None and key not in self.tier:
                block = self.tier.make_room()
                if block is None:
                    break
                self.tier.adopt(Saved(block.id, parent, key, tokens))
            if block is not None and not block.refs:
                self.tier.touch(block)
                self._peers.assign(block.id, offer.peer, key)
            parent, at = key, at + block_size


MAX_TRANSFERS = 512
"""Maximum number of concurrent copies to or from disk and peers; each pins two blocks."""

MIN_STARTED = 8
"""Copies for a request start only if at least this many more are allowed, so that lookups are less frequent."""

WRITE_SHARE = 4
"""Writes may use 1/4 of `MAX_TRANSFERS`, and of the host's blocks; twice as many for blocks worth more."""


class LowerTiers:
    """Host, disk and peers together: stores evicted blocks, finds them, restores them.

    ``block_bytes`` is the size of a block's keys and values. Moves collect until `take_moves`; they must run in their
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
        emit: Callable[[Event], None],
        peers: PeerBlocks | None = None,
    ) -> None:
        self.host = host
        self.disk = disk
        self._peers = peers
        self._slow_tiers = tuple(tier for tier in (disk, peers.tier if peers else None) if tier is not None)
        self._tiers = (host, *self._slow_tiers)
        self._restore = restore
        self._block_size = block_size
        self._block_bytes = block_bytes
        self._emit = emit
        self._moves: list[Move] = []
        self._under_way: set[Move] = set()
        self.claims = Claims(host)
        self._writable = disk is not None
        self._max_writes = max(1, min(MAX_TRANSFERS, host.num_blocks) // WRITE_SHARE)

    def __contains__(self, key: bytes) -> bool:
        return any(key in tier for tier in self._tiers)

    def tell_gone(self, gone: Callable[[bytes], None]) -> None:
        """Call ``gone`` with the key of each block that a tier has lost; another tier may still have it."""
        for tier in self._tiers:
            tier.gone = gone

    @property
    def under_way(self) -> int:
        """Number of copies to or from disk and peers that have started and not ended."""
        return len(self._under_way)

    def take_moves(self) -> list[Move]:
        """The moves since the last call."""
        moves, self._moves = self._moves, []
        return moves

    # -- down --------------------------------------------------------------------------------------

    def demote(self, block: Block) -> None:
        """A block of the device is about to lose its content: copy it to the host tier if that is worth it.

        It is worth it if the block is full, no request asked for less than the default retention, and fetching its
        chain would be faster than computing it. A hit is not required: most blocks that are found at all are found
        below for the first time.
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
        """Copy a block of the host to the disk if fetching its chain from there would be faster than computing it.

        While many writes are under way, only blocks with a hit or a higher retention are written. The other transfers
        are left to requests that wait to read.
        """
        worth_more = source.hits or source.retention > DEFAULT_RETENTION
        if len(self._under_way) >= self._max_writes * (2 if worth_more else 1):
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
            self._start_copy(Move(source.id, target.id, Tier.HOST, Tier.DISK), MoveReason.KEPT)

    def save(self, device: Iterable[Block]) -> Iterator[list[Move]]:
        """Moves that copy the blocks of device and host to the disk, a few at a time, the most valuable last.

        The copies of one batch must end before the next is taken. If the disk has no room for all, it keeps the last.
        """
        if self.disk is None:
            return
        yield self.take_moves()  # moves that were collected before
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
            self._start_copy(Move(source.id, target.id, tier, Tier.DISK), MoveReason.SAVED)
            if len(self._under_way) >= MAX_TRANSFERS:
                yield self.take_moves()
        yield self.take_moves()

    def saved(self) -> list[Saved]:
        """The content of the disk, least valuable first, to be written to its index."""
        if self.disk is None:
            return []
        blocks = sorted(self.disk, key=lambda block: block.used)
        return [Saved(block.id, block.parent, block.key or b"", block.tokens) for block in blocks]

    def adopt(self, saved: Iterable[Saved]) -> None:
        """Take over the disk content of an earlier process, in the order of `saved`."""
        for each in saved:
            if self.disk is not None:
                self.disk.adopt(each)

    def _pays(self, source: Tier, target: Tier, blocks: int) -> bool:
        """Whether copying a chain of ``blocks`` blocks down is worth it; no, if the policy fails."""
        try:
            return bool(self._restore.pays(target, blocks))
        except Exception:
            self._emit(TransferFailed(source, target))
            return False

    # -- up ----------------------------------------------------------------------------------------

    def find(
        self, keys: Sequence[bytes], tokens: Sequence[int], start: int, *, may_wait: bool
    ) -> tuple[tuple[Held, ...], int]:
        """The blocks of ``keys`` that are faster to fetch, and how many more are in lower tiers.

        ``start`` is the position of the first one in ``tokens``. Without ``may_wait``, content that is not in the
        host tier yet counts as missing.

        Raises:
            RestoreFailed: the policy failed.
        """
        found: list[Held] = []
        for key in keys[: self.host.num_blocks]:
            held = self._held(key, tokens[start : start + self._block_size], may_wait)
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
                raise ValueError(f"it chose {count!r} of {len(found)} blocks")
        except Exception as error:
            raise RestoreFailed(error) from error
        return tuple(found[:count]), len(found) - count

    def leading(self, keys: Sequence[bytes]) -> int:
        """Number of leading blocks of a chain that are in lower tiers, found by bisection."""
        return bisect_left(keys, True, key=lambda key: key not in self)

    def _held(self, key: bytes, tokens: Sequence[int], may_wait: bool) -> Held | None:
        block = self.host.find(key, tokens)
        if block is not None and (may_wait or self.host.is_ready(block)):
            return Held(Tier.HOST, block.id, self.host.is_ready(block))
        for tier in self._slow_tiers if may_wait else ():
            block = tier.find(key, tokens)
            if block is not None and tier.is_ready(block):
                return Held(tier.tier, block.id, ready=True)
        return None

    @property
    def has_peers(self) -> bool:
        return self._peers is not None

    def ask(self, inquiry: Inquiry) -> None:
        """Ask peers for blocks that are missing here, unless computing them is faster."""
        if inquiry.keys and not self._pays(Tier.HOST, Tier.PEER, len(inquiry.keys)):
            inquiry.keys = ()
        if self._peers is not None:
            self._peers.ask(inquiry)

    def take(self, inquiry: Inquiry, request_id: str) -> bool:
        """Store the answer of peers; returns whether it has new blocks."""
        offer = inquiry.answer
        if self._peers is None or offer is None or inquiry.taken:
            return False
        self._peers.take(inquiry, offer, self._block_size)
        asked, size = len(inquiry.keys), self._block_size
        self._emit(PeersAnswered(request_id, offer.peer, asked * size, offer.blocks * size, offer.seconds))
        return offer.blocks > 0

    def fetch(self, below: Iterable[Held], request_id: str = "", claim: Claim | None = None) -> bool:
        """Start copies from disk and peers to the host; whether any copy to the host is under way now.

        The waiting request's ``claim`` gets the blocks that they fill.
        """
        coming: set[int] = set()
        crowded = not self._may_start
        missed: Block | None = None
        started: Counter[Tier] = Counter()
        for held in below:
            if held.tier is Tier.HOST:
                if not held.ready:
                    coming.add(held.block)
                continue
            tier = self._tier(held.tier)
            source = tier.blocks[held.block]
            crowded = crowded or len(self._under_way) >= MAX_TRANSFERS
            target = None if crowded else self.host.make_room()
            if target is None:
                missed = source
                break
            self.host.put(target, source, filling=True)
            tier.pin(source)
            self._moves.append(Move(source.id, target.id, held.tier, Tier.HOST))
            self._under_way.add(self._moves[-1])
            started[held.tier] += 1
            coming.add(target.id)
            if claim is not None:
                self.claims.pin(claim, target)
        for each, count in started.items():
            size = count * self._block_bytes
            self._emit(Moved(each, Tier.HOST, count, size, MoveReason.FETCHED, request_id))
        if claim is not None:
            claim.wait_for(coming, missed, crowded=crowded)
        return bool(coming) or (crowded and missed is not None)

    def waits(self, claim: Claim) -> bool:
        """Whether nothing has changed for a waiting request since its lookup; that renews its claim."""
        return self.claims.waits(claim, room=self._may_start and self.host.has_room)

    @property
    def _may_start(self) -> bool:
        return len(self._under_way) <= MAX_TRANSFERS - MIN_STARTED

    def hold(self, below: Iterable[Held]) -> None:
        """Pin blocks in the host tier that are about to be restored, while room is made on the device."""
        for held in below:
            self.host.pin(self.host.blocks[held.block])

    def promote(self, held: Held, target: int) -> Block:
        """Copy a held host block to a block of the device; returns the host block with its content."""
        source = self.host.blocks[held.block]
        source.hits += 1
        self._moves.append(Move(source.id, target, Tier.HOST, Tier.DEVICE))
        self.host.unpin(source)
        self._write(source)
        return source

    def emit_restored(self, request_id: str, blocks: int, declined: int) -> None:
        """Emit that a request started with ``blocks`` blocks from the host, and will compute ``declined`` others."""
        if blocks:
            size = blocks * self._block_bytes
            self._emit(Moved(Tier.HOST, Tier.DEVICE, blocks, size, MoveReason.RESTORED, request_id))
        if declined:
            self._emit(RestoreDeclined(request_id, declined * self._block_size))

    # -- completed copies --------------------------------------------------------------------------

    def arrived(self, arrivals: Iterable[Arrival]) -> None:
        """Copies to or from disk and peers have ended, with or without success."""
        arrivals = tuple(arrivals)
        pulled = [arrival for arrival in arrivals if arrival.move.source_tier is Tier.PEER]
        if pulled:
            came = sum(arrival.ok for arrival in pulled)
            seconds = sum(arrival.seconds for arrival in pulled)
            self._emit(Pulled(came, len(pulled) - came, came * self._block_bytes, seconds))
        for arrival in arrivals:
            move = arrival.move
            self._under_way.discard(move)
            to_disk = move.target_tier is Tier.DISK
            target_tier = self._tier(move.target_tier)
            target = target_tier.blocks[move.target]
            if arrival.ok and not to_disk:
                with suppress(Exception):  # a policy that cannot learn from it only predicts worse
                    self._restore.observe(move.source_tier, arrival.seconds)
            if arrival.ok and target.key is not None:
                target_tier.filled(target)
            else:
                self._unpin(target_tier, move.target, lost=True)
            if move.source_tier is not Tier.DEVICE:
                self._unpin(self._tier(move.source_tier), move.source, lost=not (arrival.ok or to_disk))
            if not arrival.ok:
                self._writable = self._writable and not to_disk  # no more writes to a full or broken disk
                if move.source_tier is not Tier.PEER:  # which `Pulled` counts
                    self._emit(TransferFailed(move.source_tier, move.target_tier))
        if arrivals:
            self.claims.arrived(arrivals)

    def _unpin(self, tier: LowerTier, block_id: int, *, lost: bool) -> None:
        block = tier.blocks[block_id]
        if lost and block.key is not None:
            tier.forget(block)
        tier.unpin(block)

    def _tier(self, tier: Tier) -> LowerTier:
        return next(each for each in self._tiers if each.tier is tier)

    # -- upkeep ------------------------------------------------------------------------------------

    def mark(self, keys: Sequence[bytes], *, wanted: bool) -> None:
        """A waiting request needs these keys of a chain, or no longer does."""
        for tier in self._tiers:
            tier.mark(keys, wanted=wanted)

    def advance(self, now: float) -> None:
        """A new step is planned: claims lapse that were not renewed in the last one, and retention expires."""
        self.claims.advance()
        for tier in self._tiers:
            tier.advance(now)

    def reset(self) -> None:
        """Clear all tiers; copies under way are discarded."""
        for tier in self._tiers:
            tier.reset()
        self.claims.reset()

    def lost(self) -> None:
        """Device and host have lost their content, and no copy under way will arrive; the disk keeps its content."""
        for move in self._under_way:
            self._unpin(self._tier(move.target_tier), move.target, lost=True)
            if move.source_tier is not Tier.DEVICE:
                self._unpin(self._tier(move.source_tier), move.source, lost=False)
        self._under_way.clear()
        self._moves.clear()
        self.host.reset()
        self.claims.reset()

    def check(self) -> None:
        """Raise AssertionError if the counts of a tier disagree, or pins do not belong to transfers."""
        for tier in self._tiers:
            tier.check()
            pins = sum(block.refs for block in tier.blocks.values())
            ends = [move for move in self._under_way if tier.tier in (move.source_tier, move.target_tier)]
            claims = self.claims.pins if tier is self.host else 0
            assert pins == len(ends) + claims, (
                f"{tier.tier}: {pins} pins, {len(ends)} transfers, {claims} claims"
            )

    def _move(self, move: Move, reason: MoveReason) -> None:
        self._moves.append(move)
        self._emit(Moved(move.source_tier, move.target_tier, 1, self._block_bytes, reason))

    def _start_copy(self, move: Move, reason: MoveReason) -> None:
        self._under_way.add(move)
        self._move(move, reason)
