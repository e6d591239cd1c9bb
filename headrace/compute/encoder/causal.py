"""A decoder as an encoder: the hidden states of whole inputs, computed in parts over a KV cache of its own.

The parts limit the time of one call, as chunked prefill does. The cache has room for one batch, and the next batch
reuses it.
"""

from __future__ import annotations

from collections.abc import Generator
from itertools import accumulate

import torch
from torch import Tensor

from headrace.compute.batch import Batch
from headrace.compute.encoder.networks import Packed
from headrace.compute.model.decoder import ModelDecoder
from headrace.compute.model.kv import PagedKV
from headrace.core.capacity import blocks_needed

BLOCK_SIZE = 16
PART_TOKENS = 128
"""Tokens that one part computes on a CPU; a GPU computes a whole batch at once."""


class CausalEncoder:
    """The hidden states of a decoder after its last norm.

    A batch has at most ``batch_tokens`` tokens, where each row counts as a multiple of `BLOCK_SIZE`.
    """

    def __init__(self, decoder: ModelDecoder, batch_tokens: int) -> None:
        self.spec = decoder.shape
        self.device = decoder.device
        self.batch_tokens = batch_tokens
        self._decoder = decoder
        self._part = PART_TOKENS if decoder.device.type == "cpu" else batch_tokens
        blocks = blocks_needed(batch_tokens, BLOCK_SIZE)
        self._kv = PagedKV(decoder.shape, blocks, BLOCK_SIZE, decoder.dtype, decoder.device)

    def layers(self, rows: Packed) -> Generator[None, None, Tensor]:
        """Compute the last hidden states [T, hidden] of packed rows; yields after each part of them."""
        tables = _tables(rows.lengths)
        parts = []
        for begin in range(0, len(rows.tokens), self._part):
            yield
            batch = self._batch(rows, tables, begin, min(begin + self._part, len(rows.tokens)))
            parts.append(self._decoder.hidden(batch, self._kv).float())
        return torch.cat(parts)

    def _batch(self, rows: Packed, tables: Tensor, begin: int, end: int) -> Batch:
        """The packed tokens ``[begin, end)``, which may begin and end within a row."""
        starts = rows.starts
        owners, lengths, contexts = list[int](), list[int](), list[int]()
        for row, (start, length) in enumerate(zip(starts, rows.lengths, strict=True)):
            first, last = max(begin, start), min(end, start + length)
            if first < last:
                owners.append(row)
                lengths.append(last - first)
                contexts.append(last - start)
        positions = rows.positions[begin:end]
        owner = torch.tensor([row for row, count in zip(owners, lengths, strict=True) for _ in range(count)])
        slots = tables[owner, positions.cpu() // BLOCK_SIZE] * BLOCK_SIZE + positions.cpu() % BLOCK_SIZE

        def on(values: Tensor, dtype: torch.dtype) -> Tensor:
            return values.to(self.device, dtype)

        return Batch(
            tokens=on(rows.tokens[begin:end], torch.int32),
            positions=on(positions, torch.int64),
            slot_mapping=on(slots, torch.int64),
            query_starts=on(torch.tensor([0, *accumulate(lengths)]), torch.int32),
            context_lens=on(torch.tensor(contexts), torch.int32),
            block_tables=on(tables[torch.tensor(owners)], torch.int32),
            logits_indices=torch.arange(end - begin, device=self.device),
            lengths=tuple(lengths),
            contexts=tuple(contexts),
            decode_rows=next((row for row, length in enumerate(lengths) if length != 1), len(lengths)),
            block_size=BLOCK_SIZE,
        )


def _tables(lengths: tuple[int, ...]) -> Tensor:
    """The blocks of each row, one row's after the other's."""
    counts = [blocks_needed(length, BLOCK_SIZE) for length in lengths]
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.int64)
    first = 0
    for row, count in enumerate(counts):
        tables[row, :count] = torch.arange(first, first + count)
        first += count
    return tables
