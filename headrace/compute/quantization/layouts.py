"""Layouts of quantized weights on disk: GPTQ, AWQ, fp8, compressed-tensors; small integers in 32-bit words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from headrace.compute.quantization.weight import FP8, QuantizedWeight, pack_halves


def halves_of(words: Tensor) -> Tensor:
    """Words int32 [rows, n] of 4-bit values plus 8 as uint8 [rows, 4n]: what `QuantizedWeight` holds."""
    return words.reshape(-1).view(torch.uint8).view(len(words), -1)


def integers_of(words: Tensor, bits: Literal[4, 8]) -> Tensor:
    """The values of words int32 [rows, n], which are stored plus half their range: int8 [rows, n * 32 / bits]."""
    halves = halves_of(words)
    if bits == 8:
        return (halves ^ 128).view(torch.int8)
    return torch.stack((halves & 15, halves >> 4), -1).flatten(1).to(torch.int8) - 8


def words_of(integers: Tensor, bits: Literal[4, 8]) -> Tensor:
    """The inverse of `integers_of`; an incomplete last word of a row is padded with zero bits."""
    limit, per_word = 1 << (bits - 1), 32 // bits
    stored = (integers.to(torch.int16) + limit).to(torch.uint8)
    padding = -stored.shape[1] % per_word
    stored = torch.nn.functional.pad(stored, (0, padding))
    if bits == 4:
        stored = stored[:, ::2] | (stored[:, 1::2] << 4)
    return stored.reshape(-1).view(torch.int32).view(len(stored), -1)


# Linear layers in the format of GPTQ's tools: ``qweight``, ``qzeros``, ``scales``, ``g_idx``.
#
# Words run down the inputs; a column is an output. The first version of the format stores each zero minus one, the
# second as it is. With ``desc_act``, ``g_idx`` names the group of each input, because the tool processed the inputs in
# the order of their activations' size (arXiv:2210.17323).


@dataclass(frozen=True, slots=True)
class GptqLayout:
    """One linear layer: ``bits``, ``group_size`` (None: one group), and whether zeros are stored minus one."""

    bits: Literal[4, 8]
    group_size: int | None
    zeros_less_one: bool
    required: tuple[str, ...] = ("qweight", "qzeros", "scales")
    optional: tuple[str, ...] = ("g_idx",)

    def read(self, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> QuantizedWeight:
        """See `scheme.LinearLayout`."""
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


# Linear layers in the format of AutoAWQ (version ``gemm``): ``qweight``, ``qzeros``, ``scales``.
#
# Words run along the outputs; a row is an input. Within a word the outputs are interleaved, even ones first, as the
# original GPU kernel unpacks them (arXiv:2306.00978).

_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The position of each output in a word."""


@dataclass(frozen=True, slots=True)
class AwqLayout:
    """One linear layer in 4 bits; ``group_size`` inputs share scale and zero (None: all)."""

    group_size: int | None
    required: tuple[str, ...] = ("qweight", "qzeros", "scales")
    optional: tuple[str, ...] = ()

    def read(self, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> QuantizedWeight:
        """See `scheme.LinearLayout`."""
        outputs, inputs = shape
        groups = groups_of(inputs, self.group_size)
        check_shape("qweight", parts["qweight"], (inputs, outputs // 8))
        check_shape("qzeros", parts["qzeros"], (groups, outputs // 8))
        check_shape("scales", parts["scales"], (groups, outputs))
        return QuantizedWeight(
            pack_halves(_unpacked(parts["qweight"])),
            parts["scales"].t().float().contiguous(),
            _unpacked(parts["qzeros"]),
            None,
            4,
            16,
        )


def _unpacked(words: Tensor) -> Tensor:
    """Words [rows, outputs / 8] as int8 [outputs, rows]."""
    rows = len(words)
    interleaved = integers_of(words, 4).view(rows, -1, 8)
    return interleaved[..., _PLACES].reshape(rows, -1).t().contiguous()


# Linear layers in 8-bit floating point: ``weight`` and its scales, for the whole, for each output, or for blocks.
#
# A weight in e4m3 is kept as it is where the device multiplies fp8, and expanded to a plain weight elsewhere; e5m2 is
# always expanded. Activation scales of a checkpoint are not needed: activations are scaled per token, or not quantized.

_STORED = (FP8, torch.float8_e5m2)
_SCALES = ("weight_scale", "weight_scale_inv")
_E8M0_BIAS = 127  # exponents of two may be stored as bytes (OCP Microscaling Formats, 5.4.1)


@dataclass(frozen=True, slots=True)
class Fp8Layout:
    """One linear layer: the outputs and inputs that share a scale (None: outputs or all), and the bits of activations
    in its product.

    Tools agree on the meaning of a scale but not on its name: ``weight_scale_inv`` is not an inverse.
    """

    block: tuple[int, int] | None
    activation_bits: Literal[8, 16] = 16
    required: tuple[str, ...] = ("weight",)
    optional: tuple[str, ...] = (*_SCALES, "input_scale", "output_scale", "activation_scale")

    def read(self, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> Tensor | QuantizedWeight:
        """See `scheme.LinearLayout`."""
        weight = parts["weight"]
        check_shape("weight", weight, shape)
        if weight.dtype not in _STORED:
            raise ValueError(f"weight is {weight.dtype}, the config says fp8")
        named = [name for name in _SCALES if name in parts]
        if len(named) != 1:
            raise ValueError(f"lacks {' or '.join(_SCALES)}" if not named else f"has {' and '.join(named)}")
        scale = _floats(named[0], parts[named[0]])
        scales, columns = self._by_output(named[0], scale, shape)
        if weight.dtype == FP8 and shape[1] % columns == 0:
            return QuantizedWeight(weight.clone(), scales, None, None, 8, self.activation_bits)
        return weight.float().mul_(scales.repeat_interleave(columns, 1)[:, : shape[1]])

    def _by_output(self, name: str, scale: Tensor, shape: tuple[int, int]) -> tuple[Tensor, int]:
        """Scales [out, groups], and the inputs of a group."""
        outputs, inputs = shape
        if scale.numel() == 1:
            return scale.view(1, 1).expand(outputs, 1).contiguous(), inputs
        if self.block is None:
            check_shape(name, scale.view(-1), (outputs,))
            return scale.reshape(-1, 1).contiguous(), inputs
        rows, columns = self.block
        check_shape(name, scale, (-(-outputs // rows), -(-inputs // columns)))
        return scale.repeat_interleave(rows, 0)[:outputs].contiguous(), columns


def _floats(name: str, scale: Tensor) -> Tensor:
    if scale.dtype == torch.uint8:
        return (scale.float() - _E8M0_BIAS).exp2()
    if not scale.is_floating_point():
        raise ValueError(f"{name} is {scale.dtype}; only floats or exponents as bytes are supported")
    return scale.float()


# Experts in MXFP4 (OCP Microscaling Formats): ``blocks`` of 32 values in fp4 (e2m1), and their ``scales``, exponents of
# two as bytes (e8m0).

_MXFP4_BLOCK = 32
_E8M0_NAN = 255


@dataclass(frozen=True, slots=True)
class Mxfp4Layout:
    """One linear layer of an expert; nothing is rounded when it is read."""

    required: tuple[str, ...] = ("blocks", "scales")
    optional: tuple[str, ...] = ()

    def read(self, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> QuantizedWeight:
        """See `scheme.LinearLayout`."""
        outputs, groups = shape[0], groups_of(shape[1], _MXFP4_BLOCK)
        blocks, scales = parts["blocks"], parts["scales"]
        check_shape("blocks", blocks, (outputs, groups, _MXFP4_BLOCK // 2))
        check_shape("scales", scales, (outputs, groups))
        for name, part in parts.items():
            if part.dtype != torch.uint8:
                raise ValueError(f"{name} is {part.dtype}, in MXFP4 it has bytes")
        if (scales == _E8M0_NAN).any():
            raise ValueError("scales has an exponent that is not a number (255)")
        doubled = (scales.float() - (_E8M0_BIAS + 1)).exp2()
        values = blocks.reshape(outputs, -1).clone()
        return QuantizedWeight(values, doubled, None, None, 4, 16, fp4=True)

    def random(self, shape: tuple[int, int], generator: torch.Generator) -> QuantizedWeight:
        """Noise of a deviation of 0.02."""
        outputs, groups = shape[0], groups_of(shape[1], _MXFP4_BLOCK)
        size = (outputs, shape[1] // 2)
        values = torch.randint(256, size, dtype=torch.uint8, generator=generator, device=generator.device)
        scales = torch.full((outputs, groups), 2.0**-8, device=generator.device)
        return QuantizedWeight(values, scales, None, None, 4, 16, fp4=True)


# Linear layers in the format of compressed-tensors, read and written: packed in words, as int8, or in fp8.
#
# Words run along the inputs; zeros are packed along the outputs. All readers of this format can read the output.


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
        """See `scheme.LinearLayout`."""
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
        """See `scheme.LinearLayout`."""
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
