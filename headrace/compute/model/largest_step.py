"""Measures the memory of the largest step before the KV cache is sized, instead of estimating it.

The step has as many tokens and rows as the limits allow. Its rows read and write one block, so that it needs no KV
cache: the memory of a step does not depend on which blocks it reads.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from headrace.compute.batch import Batch
from headrace.compute.model.decoder import ModelDecoder
from headrace.compute.model.kv import PagedKV
from headrace.compute.sampling.choice import TokenChoice


class Meter(Protocol):
    """Measures the most memory that a device needs at once."""

    def begin(self) -> None:
        """Measure from now on."""
        ...

    def end(self) -> int:
        """The most bytes since `begin`, in addition to those in use then."""
        ...


class CudaMeter:
    """The memory that torch's allocator takes from a GPU, with what it loses to fragments."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0

    def begin(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_reserved(self._device)

    def end(self) -> int:
        torch.cuda.synchronize(self._device)
        most: int = torch.cuda.max_memory_reserved(self._device) - self._before
        torch.cuda.empty_cache()
        return most


@torch.inference_mode()
def largest_step_bytes(
    decoder: ModelDecoder,
    meter: Meter,
    *,
    block_size: int,
    kv_dtype: torch.dtype,
    max_model_len: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
) -> int:
    """Run a step of ``max_num_batched_tokens`` tokens that samples ``max_num_seqs`` rows; its memory in bytes.

    Raises:
        torch.OutOfMemoryError: the device has less.
    """
    lengths = row_lengths(max_num_seqs, max_num_batched_tokens, max_model_len)
    kv = PagedKV(decoder.shape, 1, block_size, kv_dtype, decoder.device)
    batch = in_one_block(lengths, lengths, block_size, decoder.device)
    uniform = np.full(len(lengths), 0.5)
    ones, none = np.ones(len(lengths)), np.zeros(len(lengths))
    if decoder.states is not None:  # until the memory has been sized
        decoder.states.allocate(len(lengths), 0, decoder.device)
    try:
        meter.begin()
        hidden = decoder.hidden(batch, kv)
        logits = decoder.logits(hidden)
        shaped = logits.to(torch.float32, copy=True)  # as penalties and constraints do
        decoder.likeliest(logits)
        decoder.choose(shaped, TokenChoice(ones, none, none.astype(np.int64), ones * 0.9, uniform))
    finally:
        most = meter.end()
    return most


def row_lengths(rows: int, tokens: int, longest: int) -> tuple[int, ...]:
    """Lengths of at most ``rows`` rows of at most ``longest`` tokens: as many single tokens as leave room for all."""
    left, lengths = tokens, []
    for row in range(min(rows, tokens)):
        after = min(rows, tokens) - row - 1
        lengths.append(max(1, min(longest, left - after)))
        left -= lengths[-1]
    return tuple(sorted(lengths))


def in_one_block(
    lengths: tuple[int, ...],
    contexts: tuple[int, ...],
    block_size: int,
    device: torch.device,
    slot: int | None = None,
) -> Batch:
    """Rows of so many tokens behind contexts that end with them, all in block 0; those of one token come first. All
    have the same ``slot``, or slots of their own.
    """
    ends = np.cumsum(lengths)
    positions = np.concatenate(
        [np.arange(end - row, end) for row, end in zip(lengths, contexts, strict=True)]
    )
    blocks = -(-max(contexts) // block_size)
    return Batch(
        tokens=torch.zeros(len(positions), dtype=torch.int32, device=device),
        positions=torch.from_numpy(positions).to(device),
        slot_mapping=torch.from_numpy(positions % block_size).to(device),
        query_starts=torch.from_numpy(np.concatenate([[0], ends]).astype(np.int32)).to(device),
        context_lens=torch.tensor(contexts, dtype=torch.int32, device=device),
        block_tables=torch.zeros(len(lengths), blocks, dtype=torch.int32, device=device),
        logits_indices=torch.from_numpy(ends - 1).to(device),
        lengths=lengths,
        contexts=contexts,
        decode_rows=sum(length == 1 for length in lengths),
        block_size=block_size,
        slots=np.arange(len(lengths)) if slot is None else np.full(len(lengths), slot),
    )
