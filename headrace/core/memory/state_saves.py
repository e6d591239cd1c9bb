"""Which states of running sequences become checkpoints, and the moves that save and restore them.

A row leaves its state where a checkpoint is due, and a move of the next plan saves it. So the copy needs no
synchronization: moves and rows run in order. If less than a block is known behind that place, the row computes it, too,
and the next row computes it again (`StepPlan.ahead`). Otherwise the row ends there. Checkpoints are made

- at the last block boundary of the known tokens, from which an equal prompt continues;
- where the prompt leaves a prefix that is cached, or that another running or waiting request shares;
- at every ``interval`` tokens of a long prompt;
- at each block boundary of the output, where only the last one is kept: the next turn of a chat continues there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from headrace.core.events import Checkpointed, Event, Recomputed, StateRestored
from headrace.core.memory.block_pool import BlockPool
from headrace.core.memory.checkpoints import Checkpoints
from headrace.core.memory.prefix_hit import PrefixHit
from headrace.core.plan import Move, Tier
from headrace.core.sequence import Sequence

INTERVAL_SHARE = 4
"""Checkpoints at intervals of one prompt take at most a fourth of all cells."""


class StateSaves:
    """Saves the states of sequences in the cells of ``checkpoints``, and restores them."""

    def __init__(self, pool: BlockPool, checkpoints: Checkpoints, emit: Callable[[Event], None]) -> None:
        self._pool = pool
        self._checkpoints = checkpoints
        self._emit = emit
        self._moves: list[Move] = []
        self._due: list[tuple[Sequence, int]] = []  # sequences whose last planned row ends at a checkpoint

    def take_moves(self) -> list[Move]:
        """The moves since the last call, in their order."""
        moves, self._moves = self._moves, []
        return moves

    def lost(self) -> None:
        """All states are lost."""
        self._moves.clear()
        self._due.clear()
        self._checkpoints.reset()

    # -- the beginning of a sequence ---------------------------------------------------------------

    def awaited(self, keys: list[bytes]) -> bytes:
        """The last of ``keys`` at which a running sequence is about to make a checkpoint; empty if none is."""
        announced = self._checkpoints.is_announced
        return next((key for key in reversed(keys) if announced(key)), b"")

    def start(self, sequence: Sequence, hit: PrefixHit) -> None:
        """A sequence starts in its slot: restore its state, and choose where its rows end for checkpoints."""
        keys, size = sequence.full_keys(self._pool.block_size), self._pool.block_size
        last = (sequence.known - 1) // size
        if not sequence.output_tokens:  # not resumed
            self._checkpoints.learn(keys[: hit.full + hit.beyond])
        if hit.full:
            self._checkpoints.used(keys[hit.full - 1], equal=hit.full == last)
            self._moves.append(Move(hit.checkpoint, sequence.slot, Tier.CHECKPOINT, Tier.SLOT))
            self._emit(StateRestored(sequence.request.id, hit.full * size))
        if hit.beyond:
            missed = keys[hit.full : hit.full + hit.beyond]
            reason = self._checkpoints.why_missing(missed, hit.full)
            self._emit(Recomputed(sequence.request.id, hit.beyond * size, reason))
        places = {last, *self._pool.departures(keys[:last]), *self._intervals(sequence.known)}
        checkpoints = self._checkpoints
        if checkpoints.num_cells:
            sequence.cuts = [
                place * size
                for place in sorted(places)
                if hit.full < place <= last and keys[place - 1] not in checkpoints
            ]
        sequence.announced_cuts = list(sequence.cuts)
        for position in sequence.cuts:
            checkpoints.announce(keys[position // size - 1])

    def _intervals(self, known: int) -> Iterable[int]:
        """Block boundaries at which a long prompt gets checkpoints, no more than its share of the cells."""
        size, most = self._pool.block_size, self._checkpoints.num_cells // INTERVAL_SHARE
        interval = -(-self._checkpoints.interval // size)
        if not interval or not most:
            return ()
        while (known - 1) // (interval * size) > most:
            interval *= 2
        return range(interval, (known - 1) // size + 1, interval)

    # -- while it runs -----------------------------------------------------------------------------

    def chunk(self, sequence: Sequence, length: int) -> tuple[int, int]:
        """How many of the next ``length`` positions of a prompt one row computes, and how many of them are ahead.

        Behind a prompt of whole blocks, the state at its end is worth a row of its own: longer prompts continue there.
        """
        if not sequence.cuts or sequence.cuts[0] - sequence.planned >= length:
            return length, 0
        kept = sequence.cuts[0] - sequence.planned
        rest = sequence.known - sequence.cuts[0]
        if kept + rest == length and rest < self._pool.block_size and len(sequence.cuts) == 1:
            return length, rest
        return kept, 0

    def ahead(self, start: int, known: int) -> int:
        """How many positions of a row [start, known) of an output are ahead: those behind its last block boundary."""
        boundary = known // self._pool.block_size * self._pool.block_size
        return known - boundary if boundary > start and self._checkpoints.num_cells else 0

    def planned(self, sequence: Sequence) -> None:
        """A row has been planned that leaves its state at a checkpoint of the prompt, or at any place of the output."""
        position = sequence.planned
        due = sequence.cuts[0] == position if sequence.cuts else position >= sequence.prompt_tokens
        if due and not position % self._pool.block_size:
            self._due.append((sequence, position))

    def advance(self) -> None:
        """A step is being planned: save the states behind the rows of the step before."""
        for sequence, position in self._due:
            # A step that was interrupted is planned again, and a sequence that has ended has saved its state.
            if sequence.planned == position:
                self.save(sequence)
        self._due.clear()

    def save(self, sequence: Sequence) -> None:
        """Save the state at the planned position, if that is a block boundary, before a row continues from there.

        The row up to there may be in flight. Then the checkpoint is held until the row has been committed.
        """
        position, size = sequence.planned, self._pool.block_size
        if position % size or (sequence.unconfirmed and sequence.unconfirmed[-1][0] == position):
            return
        if sequence.cuts and sequence.cuts[0] == position:
            del sequence.cuts[0]
        if position <= len(sequence.tokens):
            keys = sequence.full_keys(size)
            if not position or keys[position // size - 1] in self._checkpoints:
                self._settle(sequence, position)
                return
        cell = self._checkpoints.take()
        if cell is None:
            self._settle(sequence, position)
            return
        self._moves.append(Move(sequence.slot, cell, Tier.SLOT, Tier.CHECKPOINT))
        sequence.unconfirmed.append((position, cell))
        self.confirm(sequence)

    def confirm(self, sequence: Sequence) -> None:
        """Publish the checkpoints whose positions have been committed, and their blocks registered."""
        size, pool, checkpoints = self._pool.block_size, self._pool, self._checkpoints
        end = sequence.registered * size
        while sequence.unconfirmed and sequence.unconfirmed[0][0] <= end:
            position, cell = sequence.unconfirmed.pop(0)
            key = sequence.full_keys(size)[position // size - 1]
            announced = position in sequence.announced_cuts
            self._settle(sequence, position)
            if key in checkpoints or not pool.is_cached(key):
                checkpoints.free(cell)
                checkpoints.made_again(key)
                continue
            checkpoints.publish(cell, key, position // size, wanted=pool.is_wanted(key))
            self._emit(Checkpointed(sequence.request.id, position))
            if not announced:  # of the output, only the last one is kept
                if sequence.rolling != key:  # it may have been evicted, and is saved again
                    checkpoints.supersede(sequence.rolling)
                sequence.rolling = key
                if position > sequence.prompt_tokens:
                    checkpoints.answered(self._prompt_end(sequence), key)

    def _prompt_end(self, sequence: Sequence) -> bytes:
        """The key of the last block boundary of the prompt from which an equal prompt continues; empty: none."""
        blocks = (sequence.prompt_tokens - 1) // self._pool.block_size
        return sequence.keys[blocks - 1] if blocks else b""

    def _settle(self, sequence: Sequence, position: int) -> None:
        """The checkpoint at a position has been made, or will not be: no request waits for it any more."""
        if position in sequence.announced_cuts:
            sequence.announced_cuts.remove(position)
            self._checkpoints.withdraw(sequence.keys[position // self._pool.block_size - 1])

    def end(self, sequence: Sequence) -> None:
        """A sequence leaves its slot: save its state if it stands at a block boundary, and give up the rest.

        The slot keeps the state until a later plan, whose moves come before its rows.
        """
        whole = sequence.computed == sequence.planned and not sequence.computed % self._pool.block_size
        if whole and sequence.computed:
            self.save(sequence)
        self.confirm(sequence)
        for _, cell in sequence.unconfirmed:
            self._checkpoints.free(cell)
        for position in tuple(sequence.announced_cuts):
            self._settle(sequence, position)
        sequence.unconfirmed, sequence.cuts, sequence.rolling = [], [], b""

    def check(self, running: list[Sequence]) -> None:
        """Raise AssertionError unless the cells are those of checkpoints and of running sequences."""
        size = self._pool.block_size
        held = [cell for sequence in running for _, cell in sequence.unconfirmed]
        announced = [each.keys[position // size - 1] for each in running for position in each.announced_cuts]
        self._pool.check_checkpoints(held, announced)
