"""The packed batch of one step: all tokens of its rows in one sequence, without padding.

```
 rows      2 (decode)   5 (decode)   0 (three tokens of prefill)
 tokens    [ a          b            c d e ]          query_starts  [0, 1, 2, 5]
 positions [ 17         4            0 1 2 ]          context_lens  [18, 5, 3]
```
The runner packs it; decoder and kernels only read it. Sizes that a kernel needs for its launch are also on the host
(`lengths`, `contexts`), so that no launch waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from headrace.compute.shared_keys import SharedKeys

# The step interrupt: a flag that ends a step of background work early when a request arrives.


class StepInterrupted(Exception):
    """A forward pass was interrupted between two layers; it can be repeated."""


class StepInterrupt:
    """One byte at ``address``: set by any thread, and read between two layers by a forward pass, also in the
    extension.
    """

    __slots__ = ("_byte", "address")

    def __init__(self) -> None:
        self._byte = np.zeros(1, dtype=np.uint8)
        self.address: int = self._byte.ctypes.data

    def set(self) -> None:
        """Interrupt steps that may be interrupted."""
        self._byte[0] = 1

    def clear(self) -> None:
        """Let steps that start from now on run to their end."""
        self._byte[0] = 0

    def is_set(self) -> bool:
        """Whether steps that may be interrupted should be."""
        return bool(self._byte[0])


Ints = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


class Taps(NamedTuple):
    """Hidden states that a forward pass returns in addition to its result.

    ``states`` [T, N * hidden], in the dtype of activations, receives for each token the states before the N ``layers``
    (int64), concatenated. An index equal to the number of layers means the state after the last one, before the final
    norm; all positions must then be wanted.
    """

    states: Tensor
    layers: Ints


class AdapterTokens(NamedTuple):
    """The packed positions ``tokens`` int64 (ascending, each in one group) whose rows have an adapter.

    ``adapter`` is as `Kernels.prepare_adapter` made it.
    """

    adapter: Any
    tokens: Ints


class Features(NamedTuple):
    """Rows of images that stand in the place of embeddings: ``rows`` [N, hidden] at packed positions ``places``.

    ``places`` int64 [N] are ascending and on the device of ``rows``, which are in the dtype of activations. ``deep``
    [L, N, hidden] are added to the states behind each of the first L layers, fewer than all (arXiv:2406.04334).
    """

    places: Tensor
    rows: Tensor
    deep: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Batch:
    """The packed rows of one step; R rows, T tokens, S wanted logits, tables W blocks wide.

    Attributes:
        tokens: int32 [T].
        positions: int64 [T], which rotations each token has: its position in its sequence, or a smaller one behind
            images whose tokens share positions.
        axes: int64 [3, T], the positions of each token in time, rows and columns, in place of ``positions``; None:
            all three are equal.
        slot_mapping: int64 [T], ``block * block_size + offset`` where each token's key and value are written.
        query_starts: int32 [R + 1], where each row starts in the packed tokens.
        context_lens: int32 [R], keys that the row's last token attends to: ``start + length``.
        block_tables: int32 [R, W]; entries past a row's context are never read as keys, but must name a block.
        logits_indices: int64 [S], packed positions whose logits are wanted, ascending, each once.
        lengths: tokens of each row, on the host.
        contexts: ``context_lens``, on the host.
        decode_rows: number of rows at the front that have exactly one token.
        block_size: tokens per block.
        most_tokens: in a graph, where only the device knows the tokens of a row, the maximum of any row: then
            ``lengths`` and ``contexts`` are limits, and all rows count as ``decode_rows``. Otherwise 1.
        shared: the rows that begin with the same keys, which are read once for each group of them (see
            `shared_keys.find_groups`); None: each row reads all of its keys.
        interrupt: interrupts the forward pass when it is set; None if it must not be interrupted.
        taps: hidden states to return, or None.
        slots: int64 [R], the slot of each row's sequence, on the host, for models that keep recurrent states; None for
            others.
        ahead: int64 [R], how many of each row's last positions the state of its slot stays before (`StepPlan.ahead`);
            None: none of any row.
        line_slots: int64 [R], in a graph in place of ``slots``: the slots of rows of one token, on the device. A row
            that attends to no key is padding.
        adapters: the tokens of each adapter, for rows that have one.
        windows: the same rows for each group of window layers, which have their own blocks: ``slot_mapping`` and
            ``block_tables`` differ. Entries of tables before a row's window name any block.
        features: rows of images in place of embeddings, or None.
        joint: uint8 [R], not 0 for rows whose tokens all attend to the whole context of their row, in layers whose
            attention knows such rows; None: no row.
        kept: values that kernels cache for further steps with the same tensors but other contents.
    """

    tokens: Tensor
    positions: Tensor
    slot_mapping: Tensor
    query_starts: Tensor
    context_lens: Tensor
    block_tables: Tensor
    logits_indices: Tensor
    lengths: Sequence[int]
    contexts: Sequence[int]
    decode_rows: int
    block_size: int
    most_tokens: int = 1
    shared: SharedKeys | None = None
    interrupt: StepInterrupt | None = None
    taps: Taps | None = None
    slots: Ints | None = None
    ahead: Ints | None = None
    line_slots: Tensor | None = None
    adapters: Sequence[AdapterTokens] = ()
    windows: tuple[Batch, ...] = ()
    features: Features | None = None
    axes: Tensor | None = None
    joint: Tensor | None = None
    kept: dict[Any, Any] = field(default_factory=dict, compare=False)

    def of(self, group: int) -> Batch:
        """The rows with the block tables of a group of layers."""
        return self if group == 0 else self.windows[group - 1]


def adapter_tokens(adapters: Sequence[Any], lengths: Ints) -> tuple[AdapterTokens, ...]:
    """The packed tokens of each adapter, from that of each row (None: it has none) and the rows' lengths."""
    numbers = {id(each): number for number, each in enumerate(adapters) if each is not None}
    owners = np.repeat([-1 if each is None else numbers[id(each)] for each in adapters], lengths)
    return tuple(
        AdapterTokens(adapters[number], np.flatnonzero(owners == number)) for number in numbers.values()
    )


def ramps(counts: Ints) -> Ints:
    """0 .. counts[0]-1, 0 .. counts[1]-1, … concatenated."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if ends.size else 0) - np.repeat(ends - counts, counts)
