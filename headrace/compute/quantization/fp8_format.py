"""Linear layers in 8-bit floating point: ``weight`` and its scales, for the whole, for each output, or for blocks.

A weight in e4m3 is kept as it is where the device multiplies fp8, and expanded to a plain weight elsewhere; e5m2 is
always expanded. Activation scales of a checkpoint are not needed: activations are scaled per token, or not quantized.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from headrace.compute.quantization.gptq_format import check_shape
from headrace.compute.quantization.weight import FP8, QuantizedWeight

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
        """See `stored.LinearLayout`."""
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
