"""The running sequences: their slots, their order in the batch, and preemption.

A sequence's place orders the batch: sequences that may not be preempted again, then better classes, then rank. The
sequence with the first place gets blocks first and always makes progress. Background work is paused while other
requests are live: it keeps slot and blocks until another request needs them. The scheduler decides about waiting and
admission.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from operator import attrgetter

from headrace.core.capacity import NO_WINDOWS, most_blocks
from headrace.core.events import (
    AdmitReason,
    Admitted,
    Event,
    Preempted,
    PreemptReason,
    Skipped,
    SkipReason,
    Stepped,
    StepRows,
)
from headrace.core.images import unsplit
from headrace.core.memory.block_table import BlockTables
from headrace.core.memory.prefix_hit import PrefixHit
from headrace.core.plan import Entry
from headrace.core.prediction.memory_peak import RoomPolicy
from headrace.core.queueing.fair_queue import FairQueue, PolicyFailed
from headrace.core.scheduler.step_builder import Grow, StepBuilder
from headrace.core.scheduler.victims import VictimPolicy
from headrace.core.sequence import Sequence, Status

MAX_PREEMPTIONS = 3  # see docs/decisions/scheduling.md#preemption-and-admission
"""The most preemptions of one request. After the last one it is readmitted only when its largest possible size fits."""

by_batch_rank = attrgetter("batch_rank")


class RunningSet:
    """The running sequences by place, over ``slots`` slots of the runner."""

    def __init__(
        self,
        tables: BlockTables,
        victims: VictimPolicy,
        room: RoomPolicy,
        waiting: FairQueue,
        events: list[Event],
        slots: int,
    ) -> None:
        self.tables = tables
        self.committed = -1  # the last committed step
        self.admissions = 0
        self._victims, self._room = victims, room
        self._waiting, self._events = waiting, events
        self._sequences: list[Sequence] = []
        self._paused: list[Sequence] = []  # paused background work: it holds slots and blocks
        self._allocated_positions = 0  # positions for which the tables of all sequences have memory
        self._planned_positions = 0  # positions of these that are planned or computed
        self._slots = list(range(slots - 1, -1, -1))

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def due(self, turns: int) -> list[Sequence]:
        """The sequences that a step may compute, if those of ``turns`` steps in flight must not wait for each other.

        These are all that wait for no token, but only an equal part of those that decode.
        """
        if turns == 1:
            return list(self._sequences)
        prompts = [each.known > each.planned + 1 for each in self._sequences]
        most, due = -(-prompts.count(False) // turns), []
        for sequence, prompt in zip(self._sequences, prompts, strict=True):
            if not sequence.pending and (prompt or most > 0):
                due.append(sequence)
                most -= not prompt
        return due

    @property
    def num_paused(self) -> int:
        """Number of paused sequences, which continue when only background work is left."""
        return len(self._paused)

    @property
    def all_sequences(self) -> list[Sequence]:
        """All sequences that hold slots and blocks, paused ones too."""
        return [*self._sequences, *self._paused]

    @property
    def free_slots(self) -> int:
        return len(self._slots)

    def has_room(self, sequence: Sequence, hit: PrefixHit) -> bool:
        """Whether a waiting sequence may start, by the room policy; a protected one only if its largest size fits.

        Paused background work is preempted where that makes room.

        Raises:
            PolicyFailed: the room policy failed.
        """
        fits = self._fits(sequence, hit)
        if not fits and self._paused:
            self.preempt_paused()
            fits = self._fits(sequence, hit)
        return fits

    def _fits(self, sequence: Sequence, hit: PrefixHit) -> bool:
        fresh, free = self.tables.fresh_blocks(sequence, hit), self.tables.free_blocks(hit)
        if fresh > free or (self.is_protected(sequence) and not self._can_protect(sequence)):
            return False
        try:
            fits = bool(self._room.fits(self._sequences, sequence, fresh, free))
            if not fits and not self._sequences:
                raise ValueError(f"it refused {fresh} of {free} free blocks although nothing runs")
        except Exception as error:
            raise PolicyFailed(sequence, "room", error) from error
        return fits

    def start(self, sequence: Sequence, hit: PrefixHit, step: StepBuilder) -> None:
        """Give a waiting sequence a slot and blocks for all known tokens; ``step`` gets its entry and moves."""
        reason = AdmitReason.NEW if sequence.status is Status.WAITING else AdmitReason.RESUMED
        sequence.enter(Status.RUNNING)
        sequence.slot = self._slots.pop()
        step.moves += self.tables.take(sequence, hit)
        if reason is AdmitReason.NEW:
            sequence.cached_tokens = min(sequence.computed, sequence.prompt_tokens)
            sequence.started = step.now
        sequence.skips, sequence.skip_reason = 0, None
        self._waiting.started(sequence)
        sequence.batch_rank = (
            not self.is_protected(sequence),
            sequence.account.owner.terms.level,
            *sequence.rank,
        )
        insort(self._sequences, sequence, key=by_batch_rank)
        self._count(sequence, 1)
        sequence.account.take_slot(sequence.finish_length)
        self.admissions += 1
        request = sequence.request
        step.entries.append(
            Entry(
                sequence.slot,
                request.id,
                tuple(sequence.tokens),
                sequence.prompt_tokens,
                request.params,
                request.seed,
                request.eos_token_ids,
                tuple(sequence.table),
                request.adapter,
                request.images,
            )
        )
        self._events.append(Admitted(request.id, reason, sequence.computed, sequence.known, step.now))

    def leave(self, sequence: Sequence) -> None:
        """Release slot and blocks; computed content stays in the prefix cache."""
        (self._paused if sequence in self._paused else self._sequences).remove(sequence)
        self._count(sequence, -1)
        sequence.account.give_slot(sequence.finish_length)
        self._slots.append(sequence.slot)
        self.tables.give_back(sequence, self.committed)
        sequence.epoch += 1
        sequence.slot = -1

    def preempt(self, sequence: Sequence, reason: PreemptReason) -> None:
        """Move a running sequence back to the queue. Only preemptions for slots and blocks are counted."""
        lost = sequence.computed
        self.leave(sequence)
        sequence.preemptions += reason in (PreemptReason.NO_BLOCKS, PreemptReason.OWED)
        sequence.enter(Status.PREEMPTED)
        self._events.append(Preempted(sequence.request.id, reason, lost))
        self._waiting.push(sequence)
        self.tables.want(sequence)

    # -- preemption ---------------------------------------------------------------------------------

    def preempt_for_head(self, now: float) -> None:
        """Preempt for a queue head that is owed slots or blocks: all background work at once, then one sequence a
        step.

        Raises:
            PolicyFailed: the victim policy failed for this head.
        """
        self._pause_background()
        head = self._waiting.peek(now)
        if head is None or self.tables.fenced:  # fenced blocks become free without preemption
            return
        if self._slots and head.skip_reason is not SkipReason.NO_BLOCKS:
            return
        if self._paused:
            self.preempt_paused()
            return
        owing = [s for s in self._sequences if not self.is_protected(s) and self._waiting.is_owed(head, s)]
        if owing:
            self.preempt(self._choose(owing, now, head), PreemptReason.OWED)

    def _pause_background(self) -> None:
        """Pause background work while other requests are live, and continue it afterwards.

        Background work that has announced blocks or checkpoints which another request may wait for is preempted
        instead.
        """
        for sequence in self._waiting.yielding(self._sequences):
            if sequence.registered < sequence.announced or sequence.announced_cuts:
                self.preempt(sequence, PreemptReason.YIELD)
            else:
                self._sequences.remove(sequence)
                self._paused.append(sequence)
                self._events.append(Skipped(sequence.request.id, SkipReason.NOT_IDLE))
        if self._paused and not self._waiting.foreground:
            for sequence in self._paused:
                insort(self._sequences, sequence, key=by_batch_rank)
            self._paused = []

    def preempt_paused(self) -> None:
        """Preempt paused background work, which then holds neither slots nor blocks."""
        for sequence in tuple(self._paused):
            self.preempt(sequence, PreemptReason.YIELD)

    def catch_up(self, sequence: Sequence, step: StepBuilder, grow: Grow) -> bool:
        """Plan a decode row that begins at a state before known tokens; false: it does not fit, they are a prompt."""
        start, known, tables = sequence.planned, sequence.known, self.tables
        if sequence.status is not Status.RUNNING or known >= sequence.finish_length:
            return True  # preempted for blocks of others, or tokens in flight will end it
        if known - start > step.budget or (step.rows and not step.fits(start, known - start)):
            sequence.ahead = 0
            return False
        blocks: tuple[int, ...] = ()
        if known > len(sequence.table) * tables.pool.block_size:
            if not grow(sequence, step):
                return True
            blocks = (sequence.table[-1],)
        step.catch_up(sequence, blocks, tables.ahead(start, known))
        tables.planned(sequence)
        return True

    def grow(self, sequence: Sequence, step: StepBuilder) -> bool:
        """Get one more block for a sequence whose blocks are full; preempt other sequences, or itself, for it.

        Raises:
            PolicyFailed: the victim policy failed for this sequence.
        """
        if self.tables.windows is not None:
            self.tables.windows.passed(sequence)
        if not self._make_room(sequence, step, self.tables.blocks_to_grow):
            return False
        self.tables.grow(sequence)
        self.tables.save_state(sequence)
        self._allocated_positions += self.tables.pool.block_size
        return True

    def chunk(self, sequence: Sequence, step: StepBuilder, length: int) -> int:
        """How many of the next ``length`` positions of a prompt have blocks; if nothing else runs, preempt for one.

        Only window groups may lack some: the table has all other blocks.

        Raises:
            PolicyFailed: the victim policy failed for this sequence.
        """
        windows = self.tables.windows
        if windows is None:
            return length
        for tried in range(2):
            images, room = sequence.request.images, windows.room(sequence, length)
            if room := unsplit(images, sequence.planned, room, 0) if images and room < length else room:
                return room
            if tried or step.rows or not self._make_room(sequence, step, windows.least(sequence)):
                break
        return 0

    def _make_room(self, sequence: Sequence, step: StepBuilder, blocks: int) -> bool:
        """Preempt other sequences, or this one, until so many blocks are free; whether they are, and this one runs."""
        while self.tables.pool.num_free < blocks:
            if self.tables.fenced:
                return False  # fenced blocks become free at commit
            if self._paused:
                self.preempt(self._paused[-1], PreemptReason.YIELD)
                continue
            candidates = [
                s for s in self._sequences if s.last_step != step.number and not self.is_protected(s)
            ]
            if not candidates:
                return False  # only protected sequences are left, and together they fit
            victim = self._choose(candidates, step.now, sequence)
            self.preempt(victim, PreemptReason.NO_BLOCKS)
            if victim is sequence:
                return False
        return True

    def extend(self, sequence: Sequence, count: int) -> tuple[int, ...]:
        """Add ``count`` free blocks to the table of a sequence; `BlockPool.num_free` must suffice for them."""
        for _ in range(count):
            self.tables.grow(sequence)
        self._allocated_positions += count * self.tables.pool.block_size
        return tuple(sequence.table[-count:])

    def _choose(self, candidates: list[Sequence], now: float, asking: Sequence) -> Sequence:
        try:
            victim = self._victims.choose(candidates, now)
            if victim not in candidates:
                raise ValueError("it did not return one of the candidates")
        except Exception as error:
            raise PolicyFailed(asking, "victim", error) from error
        return victim

    def is_protected(self, sequence: Sequence) -> bool:
        """Whether a sequence has reached `MAX_PREEMPTIONS` and must not be preempted again."""
        return sequence.preemptions >= MAX_PREEMPTIONS

    def _can_protect(self, sequence: Sequence) -> bool:
        """Whether this sequence and all protected ones fit in the pool at their largest possible size."""
        size = self.tables.pool.block_size
        kept = [s for s in self._sequences if self.is_protected(s)]
        windows = NO_WINDOWS if self.tables.windows is None else self.tables.windows.groups
        needed = sum(most_blocks(s.finish_length, size, windows) for s in (*kept, sequence))
        return needed <= self.tables.pool.num_blocks

    def planned(self, step: StepBuilder) -> None:
        """Count the rows of a step whose plan is complete."""
        self._planned_positions += step.all_planned_positions

    def advance(self, sequence: Sequence, accepted: int) -> None:
        """Drafted positions that were accepted count as planned."""
        sequence.planned += accepted
        self._planned_positions += accepted

    def unplan(self, step: StepBuilder) -> None:
        """Undo the plan of a step that was interrupted: its rows will be planned again."""
        rows = zip(step.sequences, step.epochs, step.rows, step.samples, strict=True)
        for row, (sequence, epoch, planned, samples) in enumerate(rows):
            if sequence.epoch == epoch:
                length = step.planned_positions(row)
                sequence.planned -= length
                sequence.pending -= samples
                # A decode row computes one position more than its state was behind.
                sequence.ahead = planned.length - len(planned.drafts) - 1 if row < step.decodes else 0
                self._planned_positions -= length

    def _count(self, sequence: Sequence, times: int) -> None:
        self._allocated_positions += times * len(sequence.table) * self.tables.pool.block_size
        self._planned_positions += times * sequence.planned

    def stepped(self, step: StepBuilder) -> Stepped:
        """The event for a committed step: its size, and what runs and waits after it."""
        pool = self.tables.pool
        decodes = step.decodes + step.lengths[step.decodes :].count(1)
        held = pool.num_blocks - pool.num_free
        allocated = held * pool.block_size
        return Stepped(
            step=step.number,
            decode_rows=decodes,
            prefill_rows=len(step.rows) - decodes,
            computed_tokens=step.tokens,
            running=len(self._sequences) + len(self._paused),
            waiting=len(self._waiting),
            blocks_held=held,
            blocks_total=pool.num_blocks,
            slots_allocated=allocated,
            slots_filled=allocated - self._allocated_positions + self._planned_positions,
            work=_work(step),
        )

    def check(self) -> None:
        """Raise AssertionError unless blocks, slots and states agree."""
        all_sequences = self.all_sequences
        self.tables.check(all_sequences)
        allocated = self.tables.pool.block_size * sum(len(s.table) for s in all_sequences)
        planned = sum(s.planned for s in all_sequences)
        assert (self._allocated_positions, self._planned_positions) == (allocated, planned), (
            "positions are counted wrongly"
        )
        assert len({s.slot for s in all_sequences}) == len(all_sequences), "a slot is used twice"
        assert all(s.status is Status.RUNNING for s in all_sequences), (
            "a request runs without the status running"
        )


def _work(step: StepBuilder) -> StepRows:
    """What a step computed, with the time of drafting by row if there was any."""
    ids, spent = tuple([s.request.id for s in step.sequences]), step.draft_seconds
    drafting = tuple([spent.get(each, 0.0) for each in ids]) if spent else ()
    return StepRows(step.now, ids, tuple(step.rows), drafting)
