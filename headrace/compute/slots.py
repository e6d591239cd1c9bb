"""The slots of a runner: tokens and block table of each running sequence, on the device.

A slot is written once, when a sequence takes it. After that a step only adds its new blocks and the sampled token. So
the host's work per step is a few array operations over the rows, and does not grow with the context. Values that the
host knows are computed on the host: in a step of a small model each torch operation costs more than its arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from headrace.compute.batch import Batch, Ints, StepInterrupt
from headrace.compute.kernels.step_arrays import step_arrays
from headrace.compute.shared_keys import RowGroups, SharedKeys, find_groups
from headrace.compute.transfer import Line, upload
from headrace.core.plan import Entry, Placement, Row

Blocks = np.ndarray[tuple[int, ...], np.dtype[np.int32]]


class Rows(NamedTuple):
    """The rows of a plan as columns, int64 [R] each; ``samples`` is 0 or 1, ``drafts`` counts drafted positions."""

    slot: Ints
    start: Ints
    length: Ints
    samples: Ints
    drafts: Ints

    @classmethod
    def of(cls, rows: Sequence[Row]) -> Rows:
        """Turn ``rows`` (at least one) into columns."""
        slot, start, length, _, samples, drafts = zip(*rows, strict=True)
        counts = (
            np.array([len(tokens) for tokens in drafts]) if any(drafts) else np.zeros(len(rows), np.int64)
        )
        return cls(*(np.array(each, dtype=np.int64) for each in (slot, start, length, samples, counts)))

    @property
    def end(self) -> Ints:
        """The position after the last one of each row."""
        return self.start + self.length

    @property
    def known(self) -> Ints:
        """The position after the last known token of each row, where a sampled token goes."""
        return self.start + self.length - self.drafts


class Growth(NamedTuple):
    """New blocks of tables: ``blocks`` int32 [N] at ``places`` int64 [N], which are counted through all tables."""

    places: Ints
    blocks: Blocks


class Slots:
    """Token buffer int32 [slots, max_model_len + 1] and block tables int32 [slots, max_blocks].

    The buffer is one wider than the context because the last sampled token is stored, although never computed.
    ``spare`` adds one slot that no sequence uses, for the padding of graphs; the tables then have separate device
    memory also on a CPU.

    ``held``: results of `pack` are still read after its next call, so each step gets new arrays. ``reached`` is one
    more than the highest block that any table ever contained. ``windows``: number of groups of window layers, on a CPU;
    each has its own tables, filled by `place`.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
        spare: bool = False,
        held: bool = False,
        windows: int = 0,
    ) -> None:
        self.device = device
        self.max_model_len = max_model_len
        self.block_size = block_size
        self.max_blocks = -(-max_model_len // block_size)
        slots = max_num_seqs + spare
        self.tokens = torch.zeros(slots, max_model_len + 1, dtype=torch.int32, device=device)
        self._tokens = Line(self.tokens)
        self._host_tokens = self.tokens.numpy() if device.type == "cpu" else np.zeros((0, 1), dtype=np.int32)
        self._host_tables = np.zeros((slots, self.max_blocks), dtype=np.int32)
        self._windows = np.zeros((windows, slots, self.max_blocks), dtype=np.int32)
        self._shared = device.type == "cpu" and not spare  # the device's tables are those of the host
        tables = torch.from_numpy(self._host_tables)
        self.tables = tables if self._shared else tables.to(device, copy=True)
        self._blocks = np.zeros(slots, dtype=np.int64)
        self.arrays = None if held or not self._shared else step_arrays(device, block_size)
        self.reached = 0

    def admit(self, entry: Entry, tokens: Ints) -> None:
        """A sequence takes ``entry.slot`` with its known ``tokens``; earlier content is discarded."""
        self._tokens.write(entry.slot * (self.max_model_len + 1), tokens)
        self._blocks[entry.slot] = len(entry.blocks)
        if entry.blocks:
            places = entry.slot * self.max_blocks + np.arange(len(entry.blocks))
            blocks = np.array(entry.blocks, dtype=np.int32)
            self._note(places, blocks)
            self.send(Growth(places, blocks))

    def extend(self, rows: Sequence[Row]) -> None:
        """Append each row's ``new_blocks`` to its slot's table."""
        growth = self.grow(rows)
        if growth is not None:
            self.send(growth)

    def grow(self, rows: Sequence[Row]) -> Growth | None:
        """Like `extend`, but only in the host's tables; returns the change for the device's tables, if any."""
        places, blocks = list[int](), list[int]()
        for slot, _, _, new, *_ in rows:
            if new:
                begin = int(self._blocks[slot])
                self._blocks[slot] = end = begin + len(new)
                if end > self.max_blocks:
                    limit = f"{self.max_blocks} blocks, the limit of the context"
                    raise ValueError(f"a block table would exceed {limit}")
                places += range(slot * self.max_blocks + begin, slot * self.max_blocks + end)
                blocks += new
        if not blocks:
            return None
        growth = Growth(np.array(places, dtype=np.int64), np.array(blocks, dtype=np.int32))
        self._note(*growth)
        return growth

    def place(self, placed: Sequence[Placement]) -> None:
        """Change the tables of window groups."""
        for slot, first, parts in placed:
            blocks = np.array(parts, dtype=np.int32).T
            self._windows[:, slot, first : first + len(parts)] = blocks
            self.reached = max(self.reached, int(blocks.max()) + 1)

    def send(self, growth: Growth) -> None:
        """Write new blocks to the device's tables."""
        if not self._shared:
            at, new = upload(self.device, *growth)
            self.tables.view(-1).index_copy_(0, at, new)

    def _note(self, places: Ints, blocks: Blocks) -> None:
        """Write ``blocks`` to the host's tables."""
        self._host_tables.reshape(-1)[places] = blocks
        self.reached = max(self.reached, int(blocks.max()) + 1)

    def places(self, slots: Ints, positions: Ints) -> Ints:
        """Where the tokens at the given positions are in the buffer, counted through all slots."""
        return slots * (self.max_model_len + 1) + positions

    def mapping(self, slots: Ints, positions: Ints) -> Ints:
        """``block * block_size + offset`` of the given positions."""
        pages, offsets = np.divmod(positions, self.block_size)
        return self._host_tables[slots, pages].astype(np.int64) * self.block_size + offsets

    def check(self, rows: Rows) -> None:
        """Raise ValueError for a row beyond the context or its slot's blocks: it would read another sequence's
        memory.
        """
        if (rows.end > np.minimum(self.max_model_len, self._blocks[rows.slot] * self.block_size)).any():
            raise ValueError("a row exceeds the blocks of its slot or the context")

    def shared_keys(self, rows: Rows) -> RowGroups | None:
        """The rows whose leading keys are read once for all of them; None on a CPU, whose kernel finds them."""
        if self._shared:
            return None
        most = rows.start // self.block_size
        tables = self._host_tables[rows.slot, : int(most.max(initial=0)) + 1]
        return find_groups(tables, most, rows.length, self.block_size)

    def table(self, slot: int) -> Blocks:
        """The blocks of a slot, on the host."""
        return self._host_tables[slot, : self._blocks[slot]]

    def append(self, slots: Ints, positions: Ints, tokens: torch.Tensor | Ints) -> None:
        """Store tokens (int64 [S], on the device) at the given positions; 0 in place of a fault or of no draft.

        On a CPU they may be an array. The next row of a failed row may be in flight already, and needs a valid token.
        Tokens behind the last known one are undefined, except drafts of the step: they are overwritten before they are
        read.
        """
        if self.arrays is not None:
            values = tokens.numpy() if isinstance(tokens, torch.Tensor) else tokens
            self.arrays.store(self._host_tokens, slots, positions, values)
            return
        given = tokens if isinstance(tokens, torch.Tensor) else torch.from_numpy(tokens)
        self._tokens.put(self.places(slots, positions), given, least=0)

    def tokens_at(self, slots: Ints, positions: Ints) -> torch.Tensor:
        """The tokens (int64, on the device) at the given positions of the given slots."""
        return self._tokens.take(self.places(slots, positions)).long()

    def pack(self, rows: Rows, logits_indices: Ints, interrupt: StepInterrupt | None = None) -> Batch:
        """Pack all rows as one batch without padding, which ``interrupt`` may interrupt; raises what `check` raises.

        ``logits_indices`` count tokens of the packed batch, ascending.
        """
        batch = self._pack(rows, logits_indices, interrupt)
        return self._with_windows(batch, rows) if len(self._windows) else batch

    def _with_windows(self, batch: Batch, rows: Rows) -> Batch:
        """The batch with the blocks of each group of window layers."""
        width = batch.block_tables.shape[1]
        positions = batch.positions.numpy()
        pages, offsets = np.divmod(positions, self.block_size)
        owners = np.repeat(rows.slot, rows.length)
        groups = []
        for tables in self._windows:
            mapping = tables[owners, pages].astype(np.int64) * self.block_size + offsets
            blocks = torch.from_numpy(tables[rows.slot, :width])
            slots = torch.from_numpy(mapping)
            groups.append(replace(batch, slot_mapping=slots, block_tables=blocks, kept={}))
        return replace(batch, windows=tuple(groups), kept={})

    def _pack(self, rows: Rows, logits_indices: Ints, interrupt: StepInterrupt | None) -> Batch:
        if self.arrays is not None:
            return self.arrays.pack(
                *rows[:3],
                logits_indices,
                self._host_tables,
                self._blocks,
                self._host_tokens,
                limit=self.max_model_len,
                interrupt=interrupt,
            )
        self.check(rows)
        end = rows.end
        starts = np.zeros(end.size + 1, dtype=np.int64)
        np.cumsum(rows.length, out=starts[1:])
        positions = np.repeat(rows.start - starts[:-1], rows.length) + np.arange(starts[-1])
        owners = np.repeat(rows.slot, rows.length)
        places = self.places(owners, positions)
        longer = np.flatnonzero(rows.length != 1)
        groups, own = None if longer.size else self.shared_keys(rows), np.arange(end.size)
        positions_, slot_mapping, starts_, end_, logits_at, places_, slots_, *shared = upload(
            self.device,
            positions,
            self.mapping(owners, positions),
            starts.astype(np.int32),
            end.astype(np.int32),
            logits_indices,
            places,
            rows.slot,
            *(() if groups is None else (groups.keys.astype(np.int32), *groups.arrange(own, own))),
        )
        columns = -(-int(end.max()) // self.block_size)
        if self._shared:  # numpy takes elements faster
            tokens, tables = (
                self._tokens.take(places),
                torch.from_numpy(self._host_tables[rows.slot, :columns]),
            )
        else:
            tokens = self.tokens.view(-1).index_select(0, places_)
            tables = self.tables[:, :columns].index_select(0, slots_)
        return Batch(
            tokens=tokens,
            positions=positions_,
            slot_mapping=slot_mapping,
            query_starts=starts_,
            context_lens=end_,
            block_tables=tables,
            logits_indices=logits_at,
            lengths=tuple(rows.length.tolist()),
            contexts=tuple(end.tolist()),
            decode_rows=int(longer[0]) if longer.size else len(end),
            block_size=self.block_size,
            shared=SharedKeys(*shared) if shared else None,
            interrupt=interrupt,
        )
