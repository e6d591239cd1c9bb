"""Block tables: which blocks each running sequence holds, and when they become free.

The scheduler decides what runs; this file keeps the tables. A sequence may be preempted or finished while rows of it
are in flight, so its blocks stay fenced until the last of them has been committed. This is also where blocks in lower
tiers are looked up, and where a request's ranges become the retention priority of each block.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from headrace.core.block_keys import chained_keys, root_key
from headrace.core.capacity import blocks_needed
from headrace.core.events import SkipReason
from headrace.core.images import contents, unsplit
from headrace.core.memory.block_pool import BlockPool
from headrace.core.memory.lower_tier import Saved
from headrace.core.memory.prefix_hit import NO_HIT, PrefixHit
from headrace.core.memory.restore import RestoreFailed
from headrace.core.memory.state_saves import StateSaves
from headrace.core.memory.tiers import Claim, LowerTiers
from headrace.core.memory.window_blocks import WindowBlocks
from headrace.core.peers import Inquiry
from headrace.core.plan import Arrival, Move, Placement, StepPlan, Tier
from headrace.core.queueing.fair_queue import PolicyFailed
from headrace.core.request import DEFAULT_RETENTION, Request
from headrace.core.sequence import Sequence

# The fence: blocks of ended or preempted sequences that a step in flight may still write to.
#
# If they were freed at once, another sequence could get them and a stale row could overwrite them. So each
# table waits for the commit of the last step that had a row of its sequence. The fence knows steps and block
# ids, nothing else.


class Fence:
    """Tables with the step whose commit frees them; ``num_blocks`` counts references, not distinct blocks."""

    def __init__(self) -> None:
        self.tables: list[tuple[int, list[int]]] = []
        self.num_blocks = 0

    def hold(self, table: list[int], until_step: int) -> None:
        """Hold a table's references until ``until_step`` has been committed."""
        self.tables.append((until_step, table))
        self.num_blocks += len(table)

    def lift(self, committed: int) -> list[list[int]]:
        """Remove and return the tables that the commit of this step frees, oldest first."""
        lifted = [table for step, table in self.tables if step <= committed]
        if lifted:
            self.tables = [entry for entry in self.tables if entry[0] > committed]
            self.num_blocks -= sum(map(len, lifted))
        return lifted


# Which blocks of window groups each running sequence holds.
#
# A sequence holds the parts (`window_blocks`) of the blocks that the window of its next row reaches, and of
# those that its planned rows fill. Before it gets new parts, it releases the ones that its window has passed.
# A row in flight may still read these, but plans run in order: whatever a later plan writes to them comes
# after it. Drafts change nothing, because a sequence is planned up to its last known token only.


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


class BlockRetention(NamedTuple):
    """The retention of one block: its priority, and the seconds after its last use that it lasts (None: no end)."""

    priority: int = DEFAULT_RETENTION
    seconds: float | None = None


UNSET_RETENTION = BlockRetention()


def block_retention(request: Request, block_size: int, num_blocks: int) -> list[BlockRetention]:
    """The retention of each of the first ``num_blocks`` blocks of a request.

    A block that overlaps a range has its priority. Blocks of the answer have that of the prompt's last block. A block
    is retained at least as long as the blocks after it, because they are only found through it.
    """
    prompt = len(request.tokens)
    last = (prompt - 1) // block_size
    kept: list[BlockRetention] = []
    best: BlockRetention | None = None
    for i in range(num_blocks - 1, -1, -1):
        own = _requested(request, min(i, last), block_size)
        best = own if best is None else _longest((best, own))
        kept.append(best)
    return kept[::-1]


def _requested(request: Request, block: int, block_size: int) -> BlockRetention:
    begin, end = block * block_size, min((block + 1) * block_size, len(request.tokens))
    touching = [
        BlockRetention(each.priority, each.seconds)
        for each in request.retention
        if each.start < end and (each.end is None or each.end > begin)
    ]
    return _longest(touching) if touching else UNSET_RETENTION


def _longest(kept: Iterable[BlockRetention]) -> BlockRetention:
    return max(kept, key=lambda each: (each.priority, each.seconds is None, each.seconds or 0.0))


RESTORE_SECONDS = 5.0
"""How long a request waits for its blocks from disk and peers; then it computes the missing ones."""

ASK_SECONDS = 0.005  # see docs/decisions/fleet.md#blocks-while-the-prompt-is-computed
"""Initial interval between two inquiries to a peer that still computes a prompt."""

ASK_SHARE = 1 / 16
"""Later intervals, as a share of the time waited so far."""

LOOK_UP_SECONDS = 0.1  # see docs/decisions/memory.md#requests-that-wait-for-blocks
"""Interval at which a request that waits for blocks is looked up again although none has arrived: computing the missing
ones may be faster by now.
"""


class BlockTables:
    """Block tables over a pool; ``caching`` says whether equal prefixes share computed blocks, which needs ``states``
    to be saved if the model has any.
    """

    def __init__(self, pool: BlockPool, caching: bool, states: StateSaves | None = None) -> None:
        self.pool = pool
        self._states = states if caching else None
        self.windows = None if pool.windows is None else WindowTables(pool, pool.windows)
        self.blocks_to_grow = 1 if pool.windows is None else 1 + pool.windows.groups.groups
        self.caching = caching
        self.recurrent = states is not None
        self._fence = Fence()
        self._lower = pool.lower
        self._claims: dict[Sequence, Claim] = {}  # of waiting sequences
        self._now = -math.inf
        self.restoring = False  # whether a sequence waits for disk or peers in this step

    def advance(self, now: float) -> None:
        """A step is being planned at ``now``."""
        self._now = now
        self.restoring = False
        self.pool.advance(now)
        if self._states is not None:
            self._states.advance()

    def take_moves(self) -> list[Move]:
        """The moves of the lower tiers and of states, to be done before any row that is planned next."""
        moves = self._lower.take_moves() if self._lower else []
        return moves if self._states is None else moves + self._states.take_moves()

    def take_placed(self) -> list[Placement]:
        """What changes in the tables of window groups before any row that is planned next."""
        return [] if self.windows is None else self.windows.take_placed()

    def arrived(self, arrivals: tuple[Arrival, ...]) -> None:
        """Copies from or to disk and peers have ended."""
        if self._lower:
            self._lower.arrived(arrivals)

    def save(self) -> Iterator[list[Move]]:
        """Moves that copy the prefix cache to the disk; the copies of one batch should end before the next is taken."""
        if self._lower:
            yield self.take_moves()  # those of states, too
            yield from self._lower.save(self.pool.full_blocks())

    def saved(self) -> list[Saved]:
        """The content of the disk tier."""
        return self._lower.saved() if self._lower else []

    def adopt(self, saved: Iterable[Saved]) -> None:
        """Take over the disk tier of an earlier process."""
        if self._lower:
            self._lower.adopt(saved)

    def lost(self) -> None:
        """Device and host have lost their content, and no pending copy will arrive."""
        self.pool.reset(lower=False)
        if self._lower:
            self._lower.lost()
        if self._states is not None:
            self._states.lost()

    @property
    def under_way(self) -> int:
        """Number of copies to or from disk and peers that have started and not ended."""
        return self._lower.under_way if self._lower else 0

    def want(self, sequence: Sequence) -> None:
        """A sequence waits: retain its cached blocks before those that no request needs."""
        if self.caching:
            keys = sequence.full_keys(self.pool.block_size)
            sequence.wanted = len(keys)
            self.pool.want(keys)

    def unwant(self, sequence: Sequence) -> None:
        """A sequence no longer waits."""
        if self._lower and (claim := self._claims.pop(sequence, None)) is not None:
            self._lower.claims.drop(claim)
        self.pool.unwant(sequence.keys[: sequence.wanted])
        sequence.wanted = 0

    @property
    def fenced(self) -> bool:
        """Whether blocks become free when the steps in flight are committed."""
        return self._fence.num_blocks > 0

    @property
    def fenced_tables(self) -> list[list[int]]:
        return [table for _, table in self._fence.tables]

    def cached_estimate(self, request: Request) -> int:
        """An upper estimate, at low cost, of a request's tokens that are cached in any tier or being computed."""
        if not self.caching or request.params.prompt_logprobs is not None:
            return 0
        known, size = [*contents(request.tokens, request.images), *request.answered], self.pool.block_size
        keys = chained_keys(root_key(request.salt, request.adapter), known[:-1], size)
        return self.pool.leading(keys, below=True) * size

    def look_up(self, sequence: Sequence) -> PrefixHit | SkipReason:
        """The cached prefix of a sequence, or the reason to wait for more.

        The reason is that a running sequence computes its next block, that peers are asked for blocks that are missing
        here, or that a copy from disk or peers is under way.

        Raises:
            PolicyFailed: the restore policy failed.
        """
        try:
            return self._look_up(sequence)
        except RestoreFailed as failed:
            raise PolicyFailed(sequence, "restore", failed.error) from failed

    def _look_up(self, sequence: Sequence) -> PrefixHit | SkipReason:
        if not self.caching or sequence.request.params.prompt_logprobs is not None:
            return NO_HIT
        # 1. It was looked up before, and nothing has arrived since. Without this, each waiting request would cost a
        #    lookup at every step.
        patient = self._now < sequence.restore_by
        if (reason := self._still_waits(sequence, patient)) is not None:
            return reason
        # 2. What is cached here. The last known token is computed in any case: its logits are needed.
        keys = sequence.full_keys(self.pool.block_size)
        limit = sequence.known - 1
        hit = self.pool.match(sequence.root, keys, sequence.contents, limit, may_wait=patient)
        if self._states is not None:
            sequence.awaited_key = self._states.awaited(keys[hit.full : limit // self.pool.block_size])
        else:
            sequence.awaited_key = keys[hit.full] if hit.full < len(keys) else b""
        if self.pool.is_announced(sequence.awaited_key):
            return SkipReason.PREFIX_IN_FLIGHT
        # 3. What peers have of the rest.
        if self._lower and self._lower.has_peers and patient:
            inquiry = sequence.inquiry
            if inquiry is None or self._all_arrived(sequence, inquiry, hit):
                inquiry = self._ask(self._lower, sequence, hit)
            if self._waits_for_answer(self._lower, sequence, inquiry):
                return SkipReason.ASKING_PEERS
            if self._lower.take(inquiry, sequence.request.id):
                hit = self.pool.match(sequence.root, keys, sequence.contents, limit)
        # 4. Pin what lower tiers have, or others could evict it while it is on its way.
        if self._lower:
            claim = self._lower.claims.make(hit.below, self._claims.get(sequence))
            self._claims[sequence] = claim
        # 5. Fetch what is not in host memory. If the time for this is over, compute it.
        if self._lower and not hit.is_ready:
            sequence.restore_by = min(sequence.restore_by, self._now + RESTORE_SECONDS)
            if self._lower.fetch(hit.below, sequence.request.id, claim):
                self.restoring = True
                sequence.look_up_at = self._now + LOOK_UP_SECONDS
                return SkipReason.RESTORING
            hit = self.pool.match(sequence.root, keys, sequence.contents, limit, may_wait=False)
        return hit

    def _still_waits(self, sequence: Sequence, patient: bool) -> SkipReason | None:
        """Why a sequence that was looked up before still waits: nothing that it waits for has arrived since.

        This takes the same time for a prompt of any length.
        """
        if self.pool.is_announced(sequence.awaited_key):
            return SkipReason.PREFIX_IN_FLIGHT
        if self._lower is None or not patient:
            return None
        claim, recent = self._claims.get(sequence), self._now < sequence.look_up_at
        inquiry = sequence.inquiry
        if inquiry is not None and self._waits_for_answer(self._lower, sequence, inquiry):
            return SkipReason.ASKING_PEERS
        if recent and claim is not None and self._lower.waits(claim):
            self.restoring = True
            return SkipReason.RESTORING
        return None

    def _ask(self, lower: LowerTiers, sequence: Sequence, hit: PrefixHit) -> Inquiry:
        """Ask peers for the whole blocks of a sequence that are missing here."""
        size, first = self.pool.block_size, hit.full
        end = first if hit.declined else max(first, (sequence.known - 1) // size)
        keys = sequence.full_keys(size)
        parent = keys[first - 1] if first else sequence.root
        tokens = sequence.contents[first * size : end * size]
        inquiry = Inquiry(sequence.request.peer, parent, keys[first:end], tokens)
        if sequence.request.follows:
            before = sequence.inquiry
            if before is None or before.parent != parent:  # something has arrived
                sequence.restore_by = self._now + RESTORE_SECONDS
            sequence.look_up_at = self._now + ASK_SECONDS
        sequence.inquiry = inquiry
        lower.ask(inquiry)
        return inquiry

    def _all_arrived(self, sequence: Sequence, inquiry: Inquiry, hit: PrefixHit) -> bool:
        """Whether all blocks that the peer held have arrived, while it still computes the rest of the prompt."""
        if not sequence.request.follows or not inquiry.taken or not (inquiry.answer and inquiry.answer.peer):
            return False
        return hit.is_ready and hit.full < (len(sequence.request.tokens) - 1) // self.pool.block_size

    def poll_at(self, sequence: Sequence) -> float:
        """When peers are asked again for a waiting sequence; now if it waits for anything else."""
        answered = sequence.inquiry is not None and sequence.inquiry.answer is not None
        return sequence.look_up_at if answered else self._now

    def _waits_for_answer(self, lower: LowerTiers, sequence: Sequence, inquiry: Inquiry) -> bool:
        """Whether there is no answer, or a peer that still computes the prompt has nothing new and is asked again.

        What the request has so far stays claimed.
        """
        answer, follows = inquiry.answer, sequence.request.follows
        if answer is not None and follows and not inquiry.taken:
            if answer.blocks:
                inquiry.keys = inquiry.keys[: answer.blocks]  # the others will be asked for again
            elif answer.peer and self._now >= sequence.look_up_at:
                inquiry.answer = None
                waited = self._now - (sequence.restore_by - RESTORE_SECONDS)
                sequence.look_up_at = self._now + max(ASK_SECONDS, ASK_SHARE * waited)
                lower.ask(inquiry)
        waits = answer is None or (follows and not answer.blocks and bool(answer.peer))
        if waits:
            lower.claims.keep(self._claims.get(sequence))
        return waits

    def fresh_blocks(self, sequence: Sequence, hit: PrefixHit) -> int:
        """Number of blocks to allocate for the known tokens of a sequence, in addition to shared ones."""
        fresh = blocks_needed(sequence.known, self.pool.block_size) - len(hit.blocks)
        return fresh if self.windows is None else fresh + self.windows.fresh(sequence, hit)

    def free_blocks(self, hit: PrefixHit) -> int:
        """Number of free blocks beside those that a sequence shares which starts with ``hit``."""
        free = self.pool.num_free - self.pool.references_of(hit.blocks).count(0)
        if self.windows is None or self.pool.windows is None:
            return free
        return free - self.pool.windows.idle(self.windows.shared(hit))

    def take(self, sequence: Sequence, hit: PrefixHit) -> list[Move]:
        """Build the table of a sequence that starts; the returned moves must run before its first row."""
        # Shared blocks get their references first: allocation must not evict them.
        self.pool.share(hit.blocks)
        if self._lower:
            self._lower.hold(hit.below)
        if self.windows is not None:
            self.windows.start(sequence, hit)
        fresh = blocks_needed(sequence.known, self.pool.block_size) - len(hit.blocks)
        sequence.table = [*hit.blocks, *self.pool.allocate(fresh)]
        moves = self.take_moves()  # evicted content is copied down before its blocks are overwritten
        if hit.copied:
            moves.append(Move(hit.source, sequence.table[hit.full]))
        if self._lower:
            self.pool.promote(hit, sequence.table[len(hit.blocks) : hit.full])
            self._lower.emit_restored(sequence.request.id, len(hit.below), hit.declined)
            moves += self.take_moves()
        self.unwant(sequence)
        sequence.restore_by = math.inf
        sequence.inquiry = None
        sequence.registered = hit.full
        sequence.planned = sequence.computed = hit.tokens(self.pool.block_size)
        if self._states is not None:
            self._states.start(sequence, hit)
            moves += self._states.take_moves()
        if self.caching:
            sequence.announced = len(sequence.full_keys(self.pool.block_size))
            self.pool.announce(sequence.keys[sequence.registered :])
        return moves

    def grow(self, sequence: Sequence) -> None:
        """Add one block; `BlockPool.num_free` must not be less than `blocks_to_grow`."""
        sequence.table += self.pool.allocate(1)
        if self.windows is not None:
            self.windows.fill(sequence)

    def save_state(self, sequence: Sequence) -> None:
        """A row is about to be planned behind a full block: save the state before it."""
        if self._states is not None:
            self._states.save(sequence)

    def chunk(self, sequence: Sequence, length: int) -> tuple[int, int]:
        """How many of the next ``length`` positions one row computes; how many of them its state does not pass."""
        return (length, 0) if self._states is None else self._states.chunk(sequence, length)

    def ahead(self, start: int, known: int) -> int:
        """How many positions of a row [start, known) of an output its state does not pass."""
        return 0 if self._states is None else self._states.ahead(start, known)

    def planned(self, sequence: Sequence) -> None:
        """A row has been planned: where its state stands at a checkpoint, the next plan saves it."""
        if self._states is not None:
            self._states.planned(sequence)

    def register(self, sequence: Sequence, *, tail: bool) -> None:
        """Add computed blocks to the prefix cache: full ones always, the partly filled last one if ``tail``."""
        if not self.caching:
            return
        size = self.pool.block_size
        full = sequence.computed // size
        if full > sequence.registered:
            keys = sequence.full_keys(size)
            first = sequence.registered
            parent = keys[first - 1] if first else sequence.root
            tokens = sequence.contents[first * size : full * size]
            self.pool.register_chain(sequence.table[first:full], parent, tokens, keys[first:full], first)
            sequence.registered = full
            if sequence.unconfirmed and self._states is not None:
                self._states.confirm(sequence)
        if tail and sequence.computed % size and self.windows is None:
            parent = sequence.full_keys(size)[full - 1] if full else sequence.root
            self.pool.register(
                sequence.table[full], parent, sequence.contents[full * size : sequence.computed]
            )

    def give_back(self, sequence: Sequence, committed: int) -> None:
        """Release the table of a sequence that stops running; its computed content stays cached.

        ``committed`` is the last committed step: a later row of this sequence may still write to the blocks.
        """
        if self.caching:
            self.register(sequence, tail=True)
            if self._states is not None:
                self._states.end(sequence)
            self._keep(sequence)
            self.pool.withdraw(sequence.keys[sequence.registered : sequence.announced])
        if self.windows is not None:
            self.windows.end(sequence, committed)
        if sequence.last_step > committed:
            self._fence.hold(sequence.table, until_step=sequence.last_step)
        else:
            self.pool.release(sequence.table)
        sequence.table = []
        sequence.computed = sequence.planned = sequence.pending = sequence.ahead = 0
        sequence.registered = sequence.announced = 0

    def _keep(self, sequence: Sequence) -> None:
        """Apply the retention priority that the request asked for."""
        if sequence.request.retention:
            kept = block_retention(sequence.request, self.pool.block_size, sequence.registered)
            for block, (priority, seconds) in zip(sequence.table, kept, strict=False):
                self.pool.keep(block, priority, seconds)
            if self.pool.checkpoints is not None:
                for key, (priority, seconds) in zip(sequence.keys, kept, strict=False):
                    self.pool.checkpoints.keep(key, priority, seconds)

    def committed(self, plan: StepPlan) -> None:
        """Free the tables that waited for the commit of this step; what its moves restored has arrived."""
        if self.windows is not None:
            self.windows.committed(plan.step)
        for table in self._fence.lift(plan.step):
            self.pool.release(table)
        self.pool.notifier.restored(move.target for move in plan.moves if move.target_tier is Tier.DEVICE)

    def check(self, running: list[Sequence]) -> None:
        """Raise AssertionError unless the pool's references are those of the tables."""
        self.pool.check()
        if self._states is not None:
            self._states.check(running)
        expected = [0] * self.pool.num_blocks
        for table in [s.table for s in running] + self.fenced_tables:
            for block in table:
                expected[block] += 1
        if self.windows is not None:
            for block in self.windows.check(running):
                expected[block] += 1
        assert expected == self.pool.references(), "references differ from the tables"
