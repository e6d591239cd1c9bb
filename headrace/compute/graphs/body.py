"""The work of a graph: a step of N lines that only reads and writes buffers with fixed addresses.

All values that differ between steps are in the buffers; only the number of lines and the ending are fixed in a graph.
Padding lines use the spare slot: they attend to nothing, and their keys and values are not written.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from headrace.compute.batch import Batch
from headrace.compute.graphs.buffers import Fields, StepBuffers
from headrace.compute.memory_plan import in_one_block
from headrace.compute.model.kv import PagedKV
from headrace.compute.sampling.choice import TokenChoice
from headrace.compute.sampling.penalties import Penalty
from headrace.compute.shared_keys import SharedKeys
from headrace.compute.slots import Slots
from headrace.compute.states import StateTensors
from headrace.compute.step_sampling import Head


class Ending(StrEnum):
    """How a graph ends: with greedy tokens, with sampled tokens, with tokens sampled after penalties and then counted,
    or with hidden states from which tokens are sampled later.
    """

    LIKELIEST = "likeliest"
    SAMPLED = "sampled"
    PENALIZED = "penalized"
    STATES = "states"


class Variant(NamedTuple):
    """The key of a graph. ``verifies``: rows may have drafts; ``shares``: rows share leading keys, read once."""

    size: int
    ending: Ending
    verifies: bool
    shares: bool = False


class Decoder(Head, Protocol):
    """The methods of a model that a step needs. While they are recorded, they must not read host memory or wait for the
    device.
    """

    def hidden(self, batch: Batch, kv: PagedKV) -> Tensor:
        """Write the batch's keys and values into ``kv``; return the last states [S, hidden] of the wanted positions."""
        ...


class StepBody:
    """The work of all graphs of at most ``most`` lines, of which a row of attention has at most ``row_tokens``.

    ``counts`` are those of penalties, ``states`` the recurrent states that a model keeps.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv: PagedKV,
        slots: Slots,
        buffers: StepBuffers,
        counts: Tensor,
        most: int,
        row_tokens: int,
        states: Tensor | None = None,
    ) -> None:
        self._counts = counts
        self._states = () if states is None else (states,)
        self._row_tokens = row_tokens
        self._decoder = decoder
        self._kv = kv
        self._slots = slots
        self._buffers = buffers
        self._starts = torch.arange(most + 1, dtype=torch.int32, device=slots.device)
        self._order = torch.arange(most, dtype=torch.int64, device=slots.device)

    def buffers(self) -> Sequence[Tensor]:
        """All buffers that graphs share with the host or with each other, except the model's weights."""
        slots = self._slots
        shared = (
            *self._buffers.all(),
            slots.tokens,
            slots.tables,
            *self._kv.tensors,
            self._counts,
            *self._states,
        )
        return *shared, self._starts, self._order

    def addresses(self) -> tuple[int, ...]:
        """The addresses of the buffers, which recorded graphs use."""
        return tuple(buffer.data_ptr() for buffer in self.buffers())

    def run(self, variant: Variant) -> None:
        """Compute one step on the buffers."""
        size, ending, verifies, _ = variant
        given = self._buffers.given[size]
        tokens = self._slots.tokens.view(-1)
        self._slots.tables.view(-1).index_copy_(0, given.table_places, given.table_blocks)
        if verifies:  # behind a known token is the next one of the row, not a draft
            behind = given.places + 1
            _put(tokens, behind, torch.where(given.drafts < 0, tokens.index_select(0, behind), given.drafts))
        hidden = self._decoder.hidden(self._batch(given, variant), self._kv)
        if ending is Ending.STATES:
            self._buffers.states[:size].copy_(hidden)
            return
        logits = self._decoder.logits(hidden)
        if ending is Ending.PENALIZED:
            logits = logits.float()
            self._decoder.penalize(logits, self._counts, self._penalty(given, variant))
        drawn = self._decoder.likeliest(logits)
        if ending is not Ending.LIKELIEST:
            sampled = self._decoder.choose(logits, _choice(given))
            drawn = torch.where(given.random != 0, sampled, drawn)
        out = self._buffers.out
        out[:size].copy_(drawn)
        _put(tokens, given.places + 1, drawn)
        counted = given.counted
        if verifies:
            # A token that does not count for the row does not count for penalties.
            counting = out[size : 2 * size]
            counting.copy_(self._decoder.accept(drawn, given.drafts, given.first, given.offsets))
            counted = counted * counting
        if ending is Ending.PENALIZED:
            lanes = given.lanes * self._counts.shape[1]
            self._counts.view(-1).index_add_(0, lanes + drawn.clamp(min=0), counted.to(self._counts.dtype))

    def _penalty(self, given: Fields[Any], variant: Variant) -> Penalty:
        """The penalties of all lines, before each of which its row's drafts have been."""
        order: Any = self._order[: variant.size]
        begins = given.first if variant.verifies else order
        numbers = (given.repetition, given.presence, given.frequency)
        return Penalty(order, given.lanes, *numbers, given.drafts, begins, order)

    def _batch(self, given: Fields[Tensor], variant: Variant) -> Batch:
        slots, size = self._slots, variant.size
        return Batch(
            tokens=slots.tokens.view(-1).index_select(0, given.places),
            positions=given.positions,
            slot_mapping=given.mapping,
            query_starts=given.starts if variant.verifies else self._starts[: size + 1],
            context_lens=given.contexts,
            block_tables=slots.tables.index_select(0, given.slots),
            logits_indices=self._order[:size],
            lengths=(1,) * size,
            # The maximum: a graph must not depend on the contexts of the step with which it is recorded.
            contexts=(slots.max_model_len,) * size,
            decode_rows=size,
            block_size=slots.block_size,
            most_tokens=self._row_tokens if variant.verifies else 1,
            line_slots=None if variant.verifies else given.slots,
            shared=SharedKeys(given.shared, given.order, given.groups) if variant.shares else None,
        )


def _put(tokens: Tensor, places: Tensor, values: Tensor) -> None:
    """Store tokens, and 0 in place of a fault or of no draft."""
    tokens.index_copy_(0, places, values.clamp(min=0).to(tokens.dtype))


def _choice(given: Fields[Any]) -> TokenChoice:
    return TokenChoice(given.temperature, given.min_p, given.top_k, given.top_p, given.uniform)


# Compiles the kernels of steps without a graph by running them once before the first request.
#
# Otherwise a request would wait for a second or more for each of them. These are steps with more tokens than the
# largest graph, and steps with prompt chunks after long contexts. Here they have few tokens, with a row for each
# kernel.

ROWS = (((1, 20, 100), (600, 20, 100)), ((1, 100), (100, 100)))
"""Tokens of rows, and their contexts: one token with a context that several programs split, a short and a long chunk;
then a token with a short context.
"""


@torch.inference_mode()
def compile_others(
    decoder: Decoder, kv: PagedKV, max_model_len: int, states: StateTensors | None = None
) -> None:
    """Compute each of `ROWS` in block 0 of ``kv`` and slot 0 of ``states``, before any request uses them."""
    for lengths, contexts in ROWS:
        chunks = tuple(min(length, max_model_len) for length in lengths)
        ends = tuple(min(context, max_model_len) for context in contexts)
        if states is not None:
            states.lose([0])  # rows may continue it anywhere
        decoder.hidden(in_one_block(chunks, ends, kv.block_size, kv.device, slot=0), kv)
