"""Routers and experts as tables of words, so that the extension computes the experts of a layer in one call.

The words are those of `Router`, `ExpertSet` and `StackLinear` in `csrc/operations.h`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from headrace.compute.kernels.cpp_checks import DTYPES
from headrace.compute.kernels.experts import MAX_EXPERTS, Mlp, Router, Routing
from headrace.compute.kernels.packed import PackedIntegers, PackedWeight, WeightMemory, pack

Weight = PackedIntegers | PackedWeight

_SCORING = {"softmax": 0, "sigmoid": 1}
_NARROW = 16
"""The bits of a weight that is narrow (`NARROW` in csrc/operations.h)."""
_SHARED = {"none": 0, "plain": 1, "gated": 2}


def is_native(weight: Any, dtype: torch.dtype) -> bool:
    """Whether a prepared weight is one that the extension multiplies with activations of ``dtype``."""
    return isinstance(weight, PackedIntegers) or (isinstance(weight, PackedWeight) and weight.dtype == dtype)


def address(tensor: Tensor | None, dtype: torch.dtype, size: int) -> int:
    """Where the elements of a tensor are, 0 for None; ValueError if it is not one of ``size`` elements of ``dtype``."""
    if tensor is None:
        return 0
    if not tensor.is_cpu or tensor.dtype != dtype or tensor.numel() != size or not tensor.is_contiguous():
        raise ValueError(f"a norm, bias or table {tensor.dtype} {list(tensor.shape)} for {dtype} [{size}]")
    return tensor.data_ptr()


def linear_words(
    weight: Weight, bias: Tensor | None, dtype: torch.dtype, inputs: int, outputs: int
) -> tuple[int, ...]:
    """A linear layer [outputs, inputs] for activations of ``dtype`` as words of a table."""
    bias_at = address(bias, dtype, outputs)
    if (weight.inputs, weight.outputs) != (inputs, outputs):
        raise ValueError(f"a linear layer [{weight.outputs}, {weight.inputs}] for [{outputs}, {inputs}]")
    if isinstance(weight, PackedWeight):
        bits = _NARROW if weight.narrow else 0
        return (weight.address, 0, 0, 0, 0, bias_at, inputs, outputs, 0, 0, bits, weight.codes_at)
    planes = weight.planes(dtype)
    return (*weight.addresses, bias_at, inputs, outputs, weight.group_size, planes, weight.bits, 0)


class NativeRouter:
    """A router whose weight is packed; ``address`` is that of its words.

    Raises:
        ValueError: its parts do not fit each other, or it has too many experts.
    """

    def __init__(self, router: Router, panel: int, memory: WeightMemory) -> None:
        weight, correction, routing, bias = router
        _check(routing)
        if weight.dtype != torch.bfloat16 or weight.shape[1] % 2:
            weight = weight.float()
        packed = pack(weight, panel, memory)
        if packed is None or packed.outputs != routing.outputs:
            raise ValueError(f"a router {weight.dtype} {list(weight.shape)} of {routing.outputs} outputs")
        self.routing, self.packed, self.hidden, self.panel = routing, packed, packed.inputs, panel
        self._correction = None if correction is None else correction.float().contiguous()
        self._bias = None if bias is None else bias.float().contiguous()
        words = (
            *(packed.address, address(self._correction, torch.float32, routing.experts)),
            address(self._bias, torch.float32, routing.outputs),
            *(DTYPES[packed.dtype], packed.inputs, routing.experts, routing.chosen),
            *(routing.groups, routing.kept_groups, _SCORING[routing.scoring], int(routing.normalized)),
            _SHARED[routing.shared],
        )
        (scale,) = struct.unpack("q", struct.pack("d", routing.scale))
        self._words = torch.tensor([*words, scale], dtype=torch.int64)
        self.address = self._words.data_ptr()

    def takes(self, dtype: torch.dtype) -> bool:
        """Whether it is computed for activations of ``dtype``."""
        return self.packed.dtype in (torch.float32, dtype)


def _check(routing: Routing) -> None:
    size, left = divmod(routing.experts, max(routing.groups, 1))
    if (
        not 1 <= routing.chosen <= routing.experts <= MAX_EXPERTS
        or left
        or not 1 <= routing.kept_groups <= routing.groups
        or routing.chosen > routing.kept_groups * size
    ):
        raise ValueError(f"experts of at most {MAX_EXPERTS} cannot be chosen so: {routing}")


class NativeExperts:
    """The experts of a layer for activations of ``dtype``; ``address`` is that of their words.

    ``loads`` int64 [experts] counts the tokens that each has computed. ``gated``: each has a gate.

    Raises:
        ValueError: a weight does not fit the others.
    """

    def __init__(self, each: Sequence[Mlp], dtype: torch.dtype) -> None:
        self.each, self.dtype = each, dtype
        self.hidden = each[0].down.weight.outputs
        weights = [linear.weight for mlp in each for linear in mlp]
        panels = {weight.panel for weight in weights}
        if len(panels) != 1:
            raise ValueError(f"weights in panels of {sorted(panels)}, which are those of several levels")
        (self.panel,) = panels
        self.gated = each[0].gate_up.weight.outputs != each[0].down.weight.inputs
        rows = []
        for gate_up, down in each:
            inner = down.weight.inputs
            wide = (1 + self.gated) * inner
            for linear, inputs, outputs in ((gate_up, self.hidden, wide), (down, inner, self.hidden)):
                rows.append(linear_words(linear.weight, linear.bias, dtype, inputs, outputs))
        self._table = torch.tensor(rows, dtype=torch.int64)
        self.loads = torch.zeros(len(each), dtype=torch.int64)
        words = (self._table.data_ptr(), len(each), self.hidden, self.loads.data_ptr())
        self._words = torch.tensor(words, dtype=torch.int64)
        self.address = self._words.data_ptr()
