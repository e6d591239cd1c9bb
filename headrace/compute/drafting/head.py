"""An EAGLE-3 head (arXiv:2503.01840): one layer that reads hidden states of the target and guesses what follows.

```
 position            p                                       p + 1
 target's states     a, b, c ─ fc ─► state                   (the head's own state, while it drafts)
 token               the one after p                         the one that was guessed
                     norm(token), norm(state) ─► attention ─► MLP ─► own state ─► norm ─► logits ─► next guess
```
The head's keys and values of position ``p`` belong to the token at ``p + 1``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.compute.batch import Batch, Ints, Taps
from headrace.compute.drafting.forward import LEAST_CONFIDENCE, MOST, Forward, GuardedProposer
from headrace.compute.drafting.forward import Rows as PassRows
from headrace.compute.kernels import HeadShape, Kernels
from headrace.compute.model.kv import PagedKV
from headrace.compute.model.rope import rope_table
from headrace.compute.model.spec import DecoderSpec
from headrace.compute.slots import Rows, Slots
from headrace.compute.transfer import upload
from headrace.core.capacity import blocks_needed
from headrace.core.drafting.proposal import DraftRow, Proposal
from headrace.core.plan import Entry
from headrace.core.request import Request


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """A head: the shape of its ``layer``, and the target's states that it reads.

    States are taken before these ``layers`` of the target; an index equal to the number of layers means the state after
    the last one. ``normed_residual``: the normed state, not the state, is the residual of the attention.
    """

    layer: DecoderSpec
    layers: tuple[int, ...]
    draft_vocab_size: int
    normed_residual: bool


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """The weights of a head; linear weights are [out, in], norms float32.

    ``head`` None: the target's is used. ``names`` int64 are the tokens of its logits (None: all, in order).
    """

    embedding: Tensor
    combine: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None
    token_norm: Tensor
    state_norm: Tensor
    mlp_norm: Tensor
    norm: Tensor
    head: Tensor | None
    names: Ints | None


class Head:
    """A head that is ready to run: `drafting.forward.Decoder`, one pass at a time.

    Args:
        spec: its shape.
        weights: in the device and dtype of the computation.
        kernels: the backend.
        target_head: the target's head, as `Kernels.prepare_linear` made it; used without one of its own.
        own_bytes: memory of the weights that are not the target's.
        max_model_len: the longest sequence; sizes the rotary table.
    """

    def __init__(
        self,
        spec: HeadSpec,
        weights: HeadWeights,
        kernels: Kernels,
        target_head: Any,
        own_bytes: int,
        max_model_len: int,
    ) -> None:
        self.spec = spec
        self.names = weights.names
        self.device, self.dtype = weights.embedding.device, weights.combine.dtype
        self.nbytes = own_bytes
        self._kernels = kernels
        self._weights = weights
        prepare = kernels.prepare_linear
        self._combine, self._qkv, self._output = map(prepare, (weights.combine, weights.qkv, weights.output))
        self._gate_up, self._down = prepare(weights.gate_up), prepare(weights.down)
        self._head = target_head if weights.head is None else prepare(weights.head)
        self._rope = rope_table(spec.layer.ropes[0], max_model_len, self.device)
        self._shape = HeadShape(spec.layer.num_heads, spec.layer.num_kv_heads, spec.layer.head_dim)
        self._states = torch.empty(0)

    @property
    def state_width(self) -> int:
        """Width of the target's states of a token, all together."""
        return self._weights.combine.shape[1]

    def read(self, states: Tensor) -> None:
        """The next pass is on tokens with these ``states`` [T, state_width] of the target."""
        self._states = self._kernels.linear(states, self._combine)

    def follow(self, rows: Ints) -> None:
        """The next pass continues these of the last pass's wanted positions, with the head's own states."""
        if len(rows) != len(self._states):
            (at,) = upload(self.device, rows)
            self._states = self._states.index_select(0, at)

    def hidden(self, batch: Batch, kv: PagedKV) -> Tensor:
        """See `forward.Decoder.hidden`; the own states of the wanted positions are kept for `follow`."""
        kernels, weights, spec = self._kernels, self._weights, self.spec.layer
        eps, (pages,), states = spec.norm_eps, kv.layers, self._states
        tokens = weights.embedding.index_select(0, batch.tokens).to(self.dtype)
        tokens = kernels.rms_norm(tokens, weights.token_norm, eps)
        normed = kernels.rms_norm(states, weights.state_norm, eps)
        qkv = kernels.linear(torch.cat((tokens, normed), -1), self._qkv, weights.qkv_bias)
        rotation = self._rope.index_select(0, batch.positions)
        queries = kernels.rope_write_kv(qkv, self._shape, rotation, None, eps, batch.slot_mapping, pages)
        residual = normed if self.spec.normed_residual else states
        wanted = batch.logits_indices
        if not len(wanted):
            return residual[:0]
        plan = kernels.plan_attention(batch, None, self.dtype)
        x = kernels.paged_attention(queries, pages, plan, spec.attention_scale, None)
        if len(wanted) < len(batch.tokens):
            x, residual = x.index_select(0, wanted), residual.index_select(0, wanted)
        x = kernels.linear(x, self._output, weights.output_bias)
        x, residual = kernels.add_rms_norm(x, residual, weights.mlp_norm, eps)
        x = kernels.linear(x, self._gate_up, weights.gate_up_bias)
        x = kernels.gated_activation(x, spec.activation)
        x = kernels.linear(x, self._down, weights.down_bias)
        x, self._states = kernels.add_rms_norm(x, residual, weights.norm, eps)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [S, draft_vocab_size] of hidden states."""
        logits: Tensor = self._kernels.logits(hidden, self._head)
        return logits

    def draft(self, batch: Batch, kv: PagedKV, most: Ints, least: float) -> None:
        """Returns None: no backend supports all passes in one call; `forward.Forward` runs them one by one."""


# A proposer that runs a head on hidden states of the target; its keys and values lie in the target's block tables.
#
#  step      hidden states of its positions ─► pending, by slot ─► (too many) keys and values of the head
#  propose   pending states of a row, in one pass ─► its first draft ─► passes on the head's own states
# Block ``b`` of the head's pages corresponds to block ``b`` of the target's, so shared prefixes and preemptions need no
# extra handling. Positions beyond a slot's table, which contain only drafts, use separate blocks per slot. States of
# the target are pending until the row is drafted for, because a pass over many positions costs hardly more than over
# one. The next pass overwrites rejected drafts.

SPARE_STATES = 16
"""Pending states of a slot beyond those of one step with the longest draft."""


class _Slot:
    """State of a slot: ``count`` positions from ``begin`` on have pending states; earlier ones have keys and values."""

    __slots__ = ("begin", "count", "owner")

    def __init__(self) -> None:
        self.owner, self.begin, self.count = "", 0, 0


class _Line(NamedTuple):
    """A row of a pass: ``length`` positions from ``begin`` on, their states and the tokens after them."""

    slot: int
    begin: int
    length: int
    states: torch.Tensor
    tokens: Sequence[int]
    place: int = 0  # of the ask
    most: int = 1  # tokens to propose


def pending_states(most: int) -> int:
    """Capacity of pending states per slot if drafts have up to ``most`` tokens."""
    return most + 1 + SPARE_STATES


def scratch_blocks(most: int, block_size: int) -> int:
    """Number of extra blocks per slot for drafts beyond its table."""
    return blocks_needed(most, block_size) + 1


class HeadDrafts(GuardedProposer):
    """`core.drafting.proposal.CostlyProposer` on a head; the runner hands it the states of each step.

    Args:
        head: the head.
        kv: its pages: as many blocks as the target has, and `scratch_blocks` for each slot.
        name: the drafting method's name in proposals.
        layer_count: layers of the target.
        max_num_seqs: slots of the runner.
        max_model_len: the longest sequence.
        warn: receives the message when drafting is disabled.
        most: maximum number of tokens to draft for a row.
    """

    label = "draft head"

    def __init__(
        self,
        head: Head,
        kv: PagedKV,
        *,
        name: str,
        layer_count: int,
        max_num_seqs: int,
        max_model_len: int,
        warn: Callable[[str], None],
        most: int = MOST,
    ) -> None:
        super().__init__(warn)
        self.name = name
        self._head = head
        self._kv = kv
        self._forward = Forward(head, kv, head.follow, head.names)
        self._max_model_len = max_model_len
        self._most = most
        self._layers = np.array(head.spec.layers, dtype=np.int64)
        self.reads_last = layer_count in head.spec.layers
        """Whether it needs the states after the last layer, so that all positions of a step are wanted."""
        self._held = [_Slot() for _ in range(max_num_seqs)]
        self._slot_of: dict[str, int] = {}
        self._room = pending_states(most)
        shape = (max_num_seqs, self._room, head.state_width)
        self._pending = torch.zeros(shape, dtype=head.dtype, device=head.device)
        spare = scratch_blocks(most, kv.block_size)
        first = kv.num_blocks - max_num_seqs * spare
        self._scratch = np.arange(first, kv.num_blocks, dtype=np.int32).reshape(max_num_seqs, spare)
        self._slots: Slots | None = None

    def bind(self, slots: Slots) -> None:
        """The runner's slots, whose tokens and block tables are used."""
        self._slots = slots

    def admit(self, entry: Entry) -> None:
        """A sequence takes a slot."""
        held = self._held[entry.slot]
        held.owner, held.begin, held.count = entry.request_id, 0, 0
        self._slot_of[entry.request_id] = entry.slot

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Blocks of the target are copied."""
        self._kv.copy_blocks(sources, targets)

    def tapping(self, batch: Batch) -> Taps | None:
        """The taps for a forward pass on ``batch``."""
        if not self._enabled:
            return None
        shape = (len(batch.tokens), self._head.state_width)
        return Taps(torch.empty(shape, dtype=self._head.dtype, device=self._head.device), self._layers)

    def observe(self, rows: Rows, taps: Taps) -> None:
        """Store the ``taps`` of a finished forward pass; the sampled tokens must be in the slots."""
        if not self._enabled:
            return
        try:
            self._observe(rows, taps.states)
        except Exception as error:
            self._disable(error)

    def ended(self, request: Request, tokens: list[int]) -> None:
        """See `Proposer.ended`."""
        self._slot_of.pop(request.id, None)

    def clear(self) -> None:
        """See `GuardedProposer.clear`; running requests get new slots when they continue."""
        self._kv.clear()

    def _release(self) -> None:
        self._slot_of.clear()

    def _observe(self, rows: Rows, states: torch.Tensor) -> None:
        late: list[_Line] = []
        firsts = np.cumsum(rows.length) - rows.length
        columns = (rows.slot, rows.start, rows.length, rows.drafts, firsts)
        for slot, start, length, drafts, first in zip(*(each.tolist() for each in columns), strict=True):
            held = self._held[slot]
            if held.begin <= start <= held.begin + held.count:
                held.count = start - held.begin  # states of rejected drafts are void
            else:  # positions of a shared prefix have keys and values
                held.begin, held.count = start, 0
            whole = states[first : first + length]
            if held.count + length > self._room:
                if held.count:
                    late.append(self._late(slot, held.begin, self._pending[slot, : held.count]))
                known = (
                    length - drafts - 1
                )  # the last known position has to wait: its pass gives the first draft
                if known:
                    late.append(self._late(slot, start, whole[:known]))
                held.begin, held.count = start + known, 0
                whole = whole[known : known + self._room]
            self._pending[slot, held.count : held.count + len(whole)] = whole
            held.count += len(whole)
        if late:
            self._forward.compute(self._rows(late))

    def _late(self, slot: int, begin: int, states: torch.Tensor) -> _Line:
        assert self._slots is not None
        positions = np.arange(begin + 1, begin + 1 + len(states))
        tokens = self._slots.tokens_at(np.full(len(states), slot), positions)
        return _Line(slot, begin, len(states), states.clone(), tokens.tolist())

    def _propose(self, draft_rows: Sequence[DraftRow]) -> Sequence[Proposal | None]:
        proposals: list[Proposal | None] = [None] * len(draft_rows)
        lines = [
            line
            for place, draft_row in enumerate(draft_rows)
            if (line := self._line(place, draft_row)) is not None
        ]
        if not lines:
            return proposals
        lines.sort(key=lambda line: line.length)
        rows = self._rows(lines)
        wanted = np.cumsum(rows.lengths) - 1
        most = np.array([line.most for line in lines], dtype=np.int64)
        drafted = self._forward.draft(rows, wanted, most, LEAST_CONFIDENCE)
        for at, (line, count) in enumerate(zip(lines, drafted.counts.tolist(), strict=True)):
            held = self._held[line.slot]
            held.begin, held.count = line.begin + line.length, 0
            if count:
                tokens = drafted.tokens[at, :count]
                confidences = tuple(drafted.probabilities[at, :count].tolist())
                proposals[line.place] = Proposal(tuple(tokens.tolist()), confidences, self.name)
        return proposals

    def _line(self, place: int, draft_row: DraftRow) -> _Line | None:
        """The row of an ask; None if the states of its last positions are missing."""
        known = len(draft_row.tokens)
        # The last draft is never computed here, so its position may be the first one beyond the limit.
        most = min(draft_row.max_tokens, self._most, self._max_model_len + 1 - known)
        slot = self._slot_of.get(draft_row.request.id)
        if slot is None or most < 1 or draft_row.in_flight:
            return None
        held = self._held[slot]
        length = known - 1 - held.begin
        if held.owner != draft_row.request.id or not 0 < length <= held.count:
            return None
        states, tokens = self._pending[slot, :length], draft_row.tokens[held.begin + 1 : known]
        return _Line(slot, held.begin, length, states, tokens, place, most)

    def _rows(self, lines: Sequence[_Line]) -> PassRows:
        """The rows of a pass, whose states the head reads."""
        assert self._slots is not None
        lines = sorted(lines, key=lambda line: line.length)
        self._head.read(torch.cat([line.states for line in lines]))
        size = self._kv.block_size
        width = max(blocks_needed(line.begin + line.length + line.most - 1, size) for line in lines)
        tables = np.zeros((len(lines), width), dtype=np.int32)
        for row, line in zip(tables, lines, strict=True):
            table = self._slots.table(line.slot)[:width]
            row[: len(table)] = table
            rest = width - len(table)
            spare = self._scratch[line.slot][:rest]
            row[len(table) : len(table) + len(spare)] = spare
        return PassRows(
            np.array([token for line in lines for token in line.tokens], dtype=np.int32),
            np.array([line.begin for line in lines], dtype=np.int64),
            np.array([line.length for line in lines], dtype=np.int64),
            tables,
        )
