"""Adapters as tables of words, so that the extension adds what they change within its pass of a stack.

The words are those of `AdapterPart`, `AdapterChange` and `AdapterRows` in `csrc/operations.h`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from headrace.compute.batch import AdapterTokens
from headrace.compute.kernels.adapters import LINEARS, OF_EXPERTS, Change, LayerChanges, Part, of_expert
from headrace.compute.kernels.experts import Mixture
from headrace.compute.kernels.packed import PackedWeight, WeightMemory, pack
from headrace.compute.kernels.stack import Layer, Stack

Words = np.ndarray[tuple[int, ...], np.dtype[np.int64]]

_MOST_PIECES = 8


class NativeAdapter:
    """An adapter of a ``stack`` in panels of ``panel`` columns.

    ``address`` is that of its words, one change per layer and linear. ``experts_address`` is that of one address per
    layer, where the changes of its experts are.

    Raises:
        ValueError: its dtype is not one that the extension multiplies.
    """

    def __init__(self, layers: LayerChanges, stack: Stack, panel: int) -> None:
        self.layers, self.dtype, self.panel = len(layers), stack.dtype, panel
        nbytes = sum(change.nbytes for layer in layers for change in layer.values())
        self._memory = WeightMemory(max(nbytes, 1))
        self._parts: list[Tensor] = []
        rows = [self._words(layer.get(name)) for layer in layers for name in LINEARS]
        self._table = torch.tensor(rows, dtype=torch.int64)
        self.address = self._table.data_ptr()
        experts = [self._of_experts(*pair) for pair in zip(layers, stack.layers, strict=True)]
        self._experts = torch.tensor(experts, dtype=torch.int64)
        self.experts_address = self._experts.data_ptr()

    def _of_experts(self, changes: Mapping[str, Change], layer: Layer) -> int:
        """Where the changes of all experts of a layer are; 0: there are none."""
        if changes.keys() <= set(LINEARS) or not isinstance(layer.feed, Mixture):
            return 0
        count = len(layer.feed.each.each)
        rows = [
            self._words(changes.get(of_expert(name, each))) for each in range(count) for name in OF_EXPERTS
        ]
        self._parts.append(torch.tensor(rows, dtype=torch.int64))
        return self._parts[-1].data_ptr()

    def _words(self, change: Change | None) -> tuple[int, ...]:
        if change is None:
            return 0, 0, 0, 0, 1
        even = _even(change)
        ups = [self._packed(part.up) for part in even.parts]
        words = [
            (up.address, up.inputs, part.offset, up.outputs) for up, part in zip(ups, even.parts, strict=True)
        ]
        table = torch.tensor(words, dtype=torch.int64)
        self._parts.append(table)
        fold = _fold(even.down, self.panel)
        down = self._packed(_folded(even.down, fold, self.panel // fold) if fold > 1 else even.down)
        return down.address, table.data_ptr(), len(words), len(even.down), fold

    def _packed(self, weight: Tensor) -> PackedWeight:
        packed = pack(weight, self.panel, self._memory) if weight.dtype == self.dtype else None
        if packed is None:
            raise ValueError(f"an adapter of {weight.dtype} for activations of {self.dtype}")
        self._parts.append(packed.packed)
        return packed


def _fold(down: Tensor, panel: int) -> int:
    """Into how many pieces the inputs are divided, so that their columns fill a panel: see `csrc/adapters.h`."""
    rank, inputs = down.shape
    fold = 1
    while 2 * fold * rank <= panel and inputs % (4 * fold) == 0 and fold < _MOST_PIECES:
        fold *= 2
    return fold


def _folded(down: Tensor, fold: int, width: int) -> Tensor:
    """``down`` [R, in] as [fold * width, in / fold]: the rows of each piece of the inputs, padded to ``width``."""
    rank, inputs = down.shape
    pieces = down.view(rank, fold, inputs // fold).transpose(0, 1)
    return functional.pad(pieces, (0, 0, 0, width - rank)).reshape(fold * width, inputs // fold)


def _even(change: Change) -> Change:
    """The same change with even ranks: a row of zeros in ``down`` is a rank that adds nothing."""
    downs = torch.split(change.down, [part.up.shape[1] for part in change.parts])
    if not any(len(down) % 2 for down in downs):
        return change
    return Change(
        torch.cat([functional.pad(down, (0, 0, 0, len(down) % 2)) for down in downs]),
        tuple(Part(at, functional.pad(up, (0, up.shape[1] % 2))) for at, up in change.parts),
    )


class AdapterCall:
    """The words of a step's adapters; ``arguments`` are their address and number. It owns the memory of the words."""

    def __init__(
        self, adapters: Sequence[AdapterTokens], layers: int, dtype: torch.dtype, panel: int
    ) -> None:
        for adapter, tokens in adapters:
            if (adapter.layers, adapter.dtype, adapter.panel) != (layers, dtype, panel):
                raise ValueError(
                    f"an adapter of {adapter.layers} layers in {adapter.dtype} for {layers} in {dtype}"
                )
            if tokens.dtype != np.int64 or not tokens.flags.c_contiguous:
                raise ValueError(f"tokens of an adapter are {tokens.dtype}")
        self._alive = adapters
        words = [
            (each.adapter.address, each.tokens.ctypes.data, len(each.tokens), each.adapter.experts_address)
            for each in adapters
        ]
        self._words: Words = np.array(words, dtype=np.int64)
        self.arguments = (self._words.ctypes.data, len(words)) if words else (0, 0)
