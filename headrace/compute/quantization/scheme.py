"""Quantization schemes: bits, groups and scales of a weight; and rounding to the nearest value.

The schemes in which a plain checkpoint can be loaded are here, by the names of ``--quantization``. `gptq` and `awq`
choose better values than the nearest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from headrace.compute.quantization.weight import FP8, FP8_LARGEST, QuantizedWeight, pack_halves, stacked

# The interface of a format on disk: which tensors a linear layer has, and what weight they make.


class LinearLayout(Protocol):
    """How one linear layer is stored: as tensors named by the module's name, a dot, and these suffixes."""

    @property
    def required(self) -> tuple[str, ...]:
        """Suffixes of required tensors."""

    @property
    def optional(self) -> tuple[str, ...]:
        """Suffixes of optional tensors."""

    def read(self, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> Tensor | QuantizedWeight:
        """The weight [out, in] from its parts by suffix; not quantized if it can only be computed so.

        Raises:
            ValueError: the parts do not fit each other or ``shape``.
        """


class StoredFormat(Protocol):
    """The quantization of a whole checkpoint, as described in its config."""

    @property
    def name(self) -> str:
        """The public name: gptq, awq, compressed-tensors, fp8, mxfp4."""

    def layout_of(self, module: str) -> LinearLayout | None:
        """How a linear layer is stored; None: not quantized, as ``.weight``."""


TILE_INPUTS = 64
"""Number of inputs of a product on byte tiles."""

_ROWS_ELEMENTS = 1 << 22
"""Elements rounded at once, which limits the temporary memory to about 50 MB."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """A grid for weights: ``bits``, and one scale (and zero) for up to ``group_size`` inputs (None: for all).

    ``symmetric``: zero is in the middle. ``activation_bits`` as in `QuantizedWeight`. ``floating``: values are fp8.
    """

    bits: Literal[4, 8]
    group_size: int | None
    symmetric: bool
    activation_bits: Literal[8, 16]
    floating: bool = False

    def group(self, inputs: int) -> int:
        """Number of inputs that share a scale: the largest divisor of ``inputs`` up to ``group_size``.

        It is a multiple of `TILE_INPUTS` if there is one: with 576 inputs, groups of 96 are multiplied on tiles at
        three fifths of the speed of groups of 64.

        Raises:
            ValueError: 4 bits with an odd number of inputs: two share a byte.
        """
        if self.bits == 4 and inputs % 2:
            raise ValueError(f"4 bits need an even number of inputs, got {inputs}")
        if self.group_size is None:
            return inputs
        sizes = [size for size in range(min(self.group_size, inputs), 0, -1) if inputs % size == 0]
        return next((size for size in sizes if size % TILE_INPUTS == 0), sizes[0])

    def grid(self, grouped: Tensor, scale_dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Scales and zeros, float32 [..., 1], that just cover [..., group]; scales are representable in
        ``scale_dtype``.

        The range always contains 0, so that zero is one of the values and a weight of 0 stays 0.
        """
        if self.floating:
            scales = (grouped.abs().amax(-1, keepdim=True) / FP8_LARGEST).to(scale_dtype).float()
            return scales.clamp_(min=torch.finfo(torch.float32).tiny), torch.zeros_like(scales)
        limit = 1 << (self.bits - 1)
        low, high = grouped.amin(-1, keepdim=True).clamp(max=0), grouped.amax(-1, keepdim=True).clamp(min=0)
        widest = 2 * torch.maximum(-low, high) if self.symmetric else high - low
        scales = widest / (2 * limit - (2 if self.symmetric else 1))
        scales = scales.to(scale_dtype).float().clamp_(min=torch.finfo(torch.float32).tiny)
        if self.symmetric:
            return scales, torch.zeros_like(scales)
        return scales, (torch.round(-low / scales) - limit).clamp(-limit, limit - 1)

    def round(self, values: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
        """The integers (or fp8 numbers) nearest to ``values``, float32."""
        if self.floating:
            return (values / scales).clamp_(-FP8_LARGEST, FP8_LARGEST).to(FP8).float()
        limit = 1 << (self.bits - 1)
        return (values / scales).round_().add_(zeros).clamp_(-limit, limit - 1)

    def pack(self, integers: Tensor, scales: Tensor, zeros: Tensor, order: Tensor | None) -> QuantizedWeight:
        """A weight from its integers (or fp8 numbers) [out, in] and float32 scales and zeros [out, groups]."""
        values = integers.to(FP8 if self.floating else torch.int8)
        return QuantizedWeight(
            pack_halves(values) if self.bits == 4 else values,
            scales.contiguous(),
            None if self.symmetric else zeros.to(torch.int8).contiguous(),
            order,
            self.bits,
            self.activation_bits,
        )


W8A8 = Scheme(8, None, symmetric=True, activation_bits=8)
"""One scale for each output. Both sides of the product are integers, which recent CPUs and GPUs multiply fastest."""

W4A16 = Scheme(4, 128, symmetric=False, activation_bits=16)
"""A quarter of the bytes. Asymmetric: a symmetric grid leaves one of 16 values unused, and half of them for a skewed
group. A zero takes one byte for 128 weights."""

W4A8 = replace(W4A16, activation_bits=8)
"""The same weights with activations as in `W8A8`: half the products, for prompts and large batches."""

FP8_W8A8 = Scheme(8, None, symmetric=True, activation_bits=8, floating=True)
"""As `W8A8` in e4m3: finer near zero, coarser elsewhere. Only some GPUs multiply it."""

WRITTEN = {"int8": W8A8, "int4": W4A16, "w4a8": W4A8}
"""The schemes of ``headrace quantize``."""

SCHEMES = {**WRITTEN, "fp8": FP8_W8A8}
"""By the names of ``--quantization``, for the linear layers of layers."""

HEAD = W8A8
"""The LM head in every scheme: no later layer averages its errors."""


def round_to_nearest(
    weight: Tensor, scheme: Scheme, scale_dtype: torch.dtype = torch.float32
) -> QuantizedWeight:
    """A weight [out, in] rounded to the nearest values.

    Raises:
        ValueError: as `Scheme.group`.
    """
    inputs = weight.shape[1]

    def rounded(rows: Tensor) -> QuantizedWeight:
        grouped = rows.float().view(len(rows), -1, scheme.group(inputs))
        scales, zeros = scheme.grid(grouped, scale_dtype)
        integers = scheme.round(grouped, scales, zeros).view(len(rows), inputs)
        return scheme.pack(integers, scales.squeeze(-1), zeros.squeeze(-1), None)

    step = max(1, _ROWS_ELEMENTS // inputs)
    parts = [rounded(weight[begin : begin + step]) for begin in range(0, len(weight), step)]
    return parts[0] if len(parts) == 1 else stacked(parts)
