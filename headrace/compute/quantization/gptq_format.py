"""Linear layers in the format of GPTQ's tools: ``qweight``, ``qzeros``, ``scales``, ``g_idx``.

Words run down the inputs; a column is an output. The first version of the format stores each zero minus one, the
second as it is. With ``desc_act``, ``g_idx`` names the group of each input, because the tool processed the inputs in
the order of their activations' size (arXiv:2210.17323).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from headrace.compute.quantization.weight import QuantizedWeight, pack_halves
from headrace.compute.quantization.words import halves_of, integers_of


@dataclass(frozen=True, slots=True)
class GptqLayout:
    """One linear layer: ``bits``, ``group_size`` (None: one group), and whether zeros are stored minus one."""

    bits: Literal[4, 8]
    group_size: int | None
    zeros_less_one: bool
    required: tuple[str, ...] = ("qweight", "qzeros", "scales")
    optional: tuple[str, ...] = ("g_idx",)

    def read(self, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> QuantizedWeight:
        """See `stored.LinearLayout`."""
        outputs, inputs = shape
        groups = groups_of(inputs, self.group_size)
        per_word = 32 // self.bits
        check_shape("qweight", parts["qweight"], (inputs // per_word, outputs))
        check_shape("scales", parts["scales"], (groups, outputs))
        check_shape("qzeros", parts["qzeros"], (groups, -(-outputs // per_word)))
        zeros = integers_of(parts["qzeros"], self.bits)[:, :outputs]
        if self.zeros_less_one:
            limit = 1 << (self.bits - 1)
            # The sum wraps, as in the tools: a zero stored as the highest value is the lowest.
            zeros = ((zeros.to(torch.int16) + limit + 1) % (2 * limit) - limit).to(torch.int8)
        order = None
        if "g_idx" in parts:
            check_shape("g_idx", parts["g_idx"], (inputs,))
            order = order_of(parts["g_idx"], inputs // groups)
        words = parts["qweight"].t()
        values = halves_of(words) if self.bits == 4 else integers_of(words, 8)
        if order is not None:
            integers = integers_of(words, self.bits)[:, order]
            values = pack_halves(integers) if self.bits == 4 else integers
        return QuantizedWeight(
            values.contiguous(),
            parts["scales"].t().float().contiguous(),
            zeros.t().contiguous() if zeros.any() else None,
            order,
            self.bits,
            16,
        )


def groups_of(inputs: int, group_size: int | None) -> int:
    """The number of groups. Raises ValueError if the last one would be smaller."""
    size = group_size or inputs
    if inputs % size:
        raise ValueError(f"{inputs} inputs are not a multiple of group_size {size}")
    return inputs // size


def order_of(group_index: Tensor, group_size: int) -> Tensor | None:
    """The order of the inputs that puts the members of each group together; None if they already are.

    Raises:
        ValueError: the groups have different sizes.
    """
    order = torch.argsort(group_index, stable=True)
    expected = torch.arange(len(group_index)) // group_size
    if not torch.equal(group_index[order].long(), expected):
        raise ValueError(f"g_idx does not give every group {group_size} inputs")
    return None if torch.equal(group_index.long(), expected) else order


def check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raise ValueError, naming the tensor, unless it has the shape."""
    if tensor.shape != shape:
        raise ValueError(f"{name} has shape {list(tensor.shape)}, the config says {list(shape)}")
