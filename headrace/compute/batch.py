"""The packed batch of one step: all tokens of its rows in one sequence, without padding.

```
 rows      2 (decode)   5 (decode)   0 (three tokens of prefill)
 tokens    [ a          b            c d e ]          query_starts  [0, 1, 2, 5]
 positions [ 17         4            0 1 2 ]          context_lens  [18, 5, 3]
```
It does not know sequences, slots or sampling. The runner packs; decoder and kernels only read. What a kernel needs to
size its work is also on the host (`lengths`, `contexts`), so that no launch waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from headrace.compute.step_interrupt import StepInterrupt


class Taps(NamedTuple):
    """Hidden states that a forward pass is to return beside its result.

    ``states`` [T, N * hidden], in the dtype of activations, receives for each token the states before the N ``layers``
    (int64), one after the other. The number of layers stands for the state after the last one, before the final norm;
    all positions must then be wanted.
    """

    states: Tensor
    layers: np.ndarray[tuple[int, ...], np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Batch:
    """The packed rows of one step; R rows, T tokens, S wanted logits, tables W blocks wide.

    Attributes:
        tokens: int32 [T].
        positions: int64 [T], position of each token in its sequence.
        slot_mapping: int64 [T], ``block * block_size + offset`` where each token's key and value are written.
        query_starts: int32 [R + 1], where each row starts in the packed tokens.
        context_lens: int32 [R], keys that the row's last token attends to: ``start + length``.
        block_tables: int32 [R, W]; entries past a row's context are never read as keys, but must name a block.
        logits_indices: int64 [S], packed positions whose logits are wanted, ascending, each once.
        lengths: tokens of each row, on the host.
        contexts: ``context_lens``, on the host.
        decode_rows: number of rows at the front that have exactly one token.
        block_size: tokens per block.
        shared_blocks: how many first blocks all rows have in common, none of them the last of a row; or 0 if it was
            not looked for.
        bell: interrupts the forward pass when it is set; None if it must not be interrupted.
        taps: hidden states to return, or None.
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
    shared_blocks: int = 0
    bell: StepInterrupt | None = None
    taps: Taps | None = None


def shared_blocks(tables: np.ndarray[tuple[int, ...], np.dtype[np.int32]], most: int) -> int:
    """How many blocks at the start of ``tables`` [R, W] are the same in all rows, ``most`` at most."""
    first = tables[0]
    if len(tables) < 2 or (tables[:, 0] != first[0]).any():
        return 0
    different = np.flatnonzero((tables[:, :most] != first[:most]).any(0))
    return int(different[0]) if different.size else most
