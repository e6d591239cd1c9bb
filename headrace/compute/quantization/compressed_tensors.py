"""Linear layers in the format of compressed-tensors, read and written: packed in words, as int8, or in fp8.

Words run along the inputs; zeros are packed along the outputs. All readers of this format can read the output.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from headrace.compute.quantization.gptq_format import check_shape, groups_of, order_of
from headrace.compute.quantization.weight import QuantizedWeight, pack_halves
from headrace.compute.quantization.words import halves_of, integers_of, words_of


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Format ``pack-quantized``: weights in 4 or 8 bits."""

    bits: Literal[4, 8]
    group_size: int | None
    symmetric: bool
    activation_bits: Literal[8, 16] = 16
    optional: tuple[str, ...] = ("weight_shape", "weight_g_idx")

    @property
    def required(self) -> tuple[str, ...]:
        return "weight_packed", "weight_scale", *(() if self.symmetric else ("weight_zero_point",))

    def read(self, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> QuantizedWeight:
        """See `stored.LinearLayout`."""
        outputs, inputs = shape
        groups = groups_of(inputs, self.group_size)
        per_word = 32 // self.bits
        words = parts["weight_packed"]
        check_shape("weight_packed", words, (outputs, -(-inputs // per_word)))
        scales = _by_group("weight_scale", parts, outputs, groups).float()
        zeros = None
        if not self.symmetric:
            packed = parts["weight_zero_point"]
            check_shape("weight_zero_point", packed, (-(-outputs // per_word), groups))
            zeros = integers_of(packed.t(), self.bits)[:, :outputs].t().contiguous()
        order = None
        if "weight_g_idx" in parts and (parts["weight_g_idx"] >= 0).all():  # -1: not reordered
            order = order_of(parts["weight_g_idx"], inputs // groups)
        if order is None and self.bits == 4:
            values = halves_of(words)[:, : inputs // 2].clone()
        else:
            integers = integers_of(words, self.bits)[:, :inputs]
            integers = integers if order is None else integers[:, order]
            values = pack_halves(integers) if self.bits == 4 else integers.contiguous()
        return QuantizedWeight(values, scales, zeros, order, self.bits, self.activation_bits)


@dataclass(frozen=True, slots=True)
class Int8Layout:
    """Format ``int-quantized``: a scale for each output, for a group of its inputs, or for all; W8A8 or W8A16."""

    group_size: int | None
    symmetric: bool
    activation_bits: Literal[8, 16]
    optional: tuple[str, ...] = ()

    @property
    def required(self) -> tuple[str, ...]:
        return "weight", "weight_scale", *(() if self.symmetric else ("weight_zero_point",))

    def read(self, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> QuantizedWeight:
        """See `stored.LinearLayout`."""
        outputs, groups = shape[0], groups_of(shape[1], self.group_size)
        check_shape("weight", parts["weight"], shape)
        if parts["weight"].dtype != torch.int8:
            raise ValueError(f"weight is {parts['weight'].dtype}, the config says int8")
        scales = _by_group("weight_scale", parts, outputs, groups).float()
        zeros = None
        if not self.symmetric:
            zeros = _by_group("weight_zero_point", parts, outputs, groups).to(torch.int8)
        return QuantizedWeight(parts["weight"].clone(), scales, zeros, None, 8, self.activation_bits)


def _by_group(name: str, parts: Mapping[str, Tensor], outputs: int, groups: int) -> Tensor:
    """A part as [outputs, groups]. It may be stored flat, or once for all outputs if there is one group."""
    part = parts[name]
    if part.numel() == groups == 1:
        return part.reshape(1, 1).expand(outputs, 1).contiguous()
    if part.numel() != outputs * groups:
        check_shape(name, part, (outputs, groups))
    return part.reshape(outputs, groups).contiguous()


def stored_format(bits: int, activation_bits: int) -> str:
    """The format in which a weight is written."""
    return "int-quantized" if bits == activation_bits == 8 else "pack-quantized"


def stored_parts(weight: QuantizedWeight, scale_dtype: torch.dtype) -> dict[str, Tensor]:
    """A weight's tensors by suffix, in its `stored_format`."""
    scales = weight.scales.to(scale_dtype)
    if stored_format(weight.bits, weight.activation_bits) == "int-quantized":
        return {"weight": weight.values, "weight_scale": scales}
    parts = {
        "weight_packed": words_of(weight.integers(), weight.bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if weight.zeros is not None:
        parts["weight_zero_point"] = words_of(weight.zeros.t(), weight.bits).t().contiguous()
    return parts
