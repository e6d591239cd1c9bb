"""The rows of one step, packed: all tokens in one line, no padding.

```
 rows      2 (decode)   5 (decode)   0 (three tokens of prefill)
 tokens    [ a          b            c d e ]          query_starts  [0, 1, 2, 5]
 positions [ 17         4            0 1 2 ]          context_lens  [18, 5, 3]
```
Knows nothing of sequences, slots or sampling. The runner packs; decoder and kernels only read. What a kernel
needs to size its work also lies on the host (`lengths`, `contexts`), so that no launch waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's packed rows; R rows, T tokens, S wanted logits, tables W blocks wide.

    Attributes:
        tokens: int64 [T].
        positions: int64 [T], position of each token in its sequence.
        slot_mapping: int64 [T], ``block * block_size + offset`` where each token's key and value are written.
        query_starts: int32 [R + 1], where each row begins in the packed line.
        context_lens: int32 [R], keys that the row's last token sees: ``start + length``.
        block_tables: int32 [R, W]; entries past a row's context are never read as keys, but must name a block.
        logits_indices: int64 [S], places in the packed line whose logits are wanted, ascending, each once.
        lengths: tokens of each row, on the host.
        contexts: ``context_lens``, on the host.
        decode_rows: how many rows at the front have exactly one token.
        block_size: tokens per block.
    """

    tokens: Tensor
    positions: Tensor
    slot_mapping: Tensor
    query_starts: Tensor
    context_lens: Tensor
    block_tables: Tensor
    logits_indices: Tensor
    lengths: tuple[int, ...]
    contexts: tuple[int, ...]
    decode_rows: int
    block_size: int

    @property
    def max_query_len(self) -> int:
        return max(self.lengths)

    @property
    def max_context_len(self) -> int:
        return max(self.contexts)


def pack(
    tokens: Tensor,
    starts: Sequence[int],
    lengths: Sequence[int],
    block_tables: npt.NDArray[np.int32],
    logits_indices: npt.NDArray[np.int64],
    block_size: int,
) -> Batch:
    """Derive a `Batch` from its rows; everything lands on the device of ``tokens`` in few transfers.

    Args:
        tokens: int64 [T], the rows' tokens one after the other (on the device: sampled tokens may never
            have been on the host).
        starts: first position that each row computes.
        lengths: tokens of each row, at least 1; rows of one token should come first.
        block_tables: int32 [R, W], at least ``ceil((start + length) / block_size)`` entries valid per row.
        logits_indices: int64 [S] into the packed line.
        block_size: tokens per block.
    """
    start = np.asarray(starts, dtype=np.int64)
    length = np.asarray(lengths, dtype=np.int64)
    context = start + length
    query_starts = np.zeros(len(length) + 1, dtype=np.int32)
    np.cumsum(length, out=query_starts[1:])
    row = np.repeat(np.arange(len(length)), length)
    positions = np.arange(len(row)) + (start - query_starts[:-1])[row]
    slots = block_tables[row, positions // block_size].astype(np.int64) * block_size + positions % block_size
    lengths_host = tuple(length.tolist())
    decode_rows = next((i for i, n in enumerate(lengths_host) if n != 1), len(lengths_host))

    device = tokens.device
    long = _to_device(np.concatenate((positions, slots, logits_indices)), device)
    short = _to_device(np.concatenate((query_starts, context.astype(np.int32), block_tables.ravel())), device)
    t, r = len(row), len(length)
    return Batch(
        tokens=tokens,
        positions=long[:t],
        slot_mapping=long[t : 2 * t],
        query_starts=short[: r + 1],
        context_lens=short[r + 1 : 2 * r + 1],
        block_tables=short[2 * r + 1 :].view(block_tables.shape),
        logits_indices=long[2 * t :],
        lengths=lengths_host,
        contexts=tuple(context.tolist()),
        decode_rows=decode_rows,
        block_size=block_size,
    )


def _to_device(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
