"""Linear layers in 8-bit floating point: ``weight`` and its scales, for the whole, for each output, or for blocks.

They are read into plain weights: there are no fp8 products here, so fp8 only saves space on disk. Activation scales
of a checkpoint are not needed then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.compute.quantization.gptq_format import check_shape

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_SCALES = ("weight_scale", "weight_scale_inv")
_E8M0_BIAS = 127  # exponents of two may be stored as bytes (OCP Microscaling Formats, 5.4.1)


@dataclass(frozen=True, slots=True)
class Fp8Layout:
    """One linear layer: the outputs and inputs that share a scale (None: outputs or all).

    Tools agree on the meaning of a scale but not on its name: ``weight_scale_inv`` is not an inverse.
    """

    block: tuple[int, int] | None
    required: tuple[str, ...] = ("weight",)
    optional: tuple[str, ...] = (*_SCALES, "input_scale", "output_scale", "activation_scale")

    def read(self, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> Tensor:
        """See `stored.LinearLayout`."""
        weight = parts["weight"]
        check_shape("weight", weight, shape)
        if weight.dtype not in FP8:
            raise ValueError(f"weight is {weight.dtype}, the config says fp8")
        named = [name for name in _SCALES if name in parts]
        if len(named) != 1:
            raise ValueError(f"lacks {' or '.join(_SCALES)}" if not named else f"has {' and '.join(named)}")
        scale = _floats(named[0], parts[named[0]])
        dense = weight.float()
        if scale.numel() == 1:
            return dense.mul_(scale.view(()))
        if self.block is None:
            check_shape(named[0], scale.view(-1), (shape[0],))
            return dense.mul_(scale.view(-1, 1))
        rows, columns = self.block
        check_shape(named[0], scale, (-(-shape[0] // rows), -(-shape[1] // columns)))
        along = scale.repeat_interleave(columns, 1)[:, : shape[1]]
        for index, factors in enumerate(along):
            dense[index * rows : (index + 1) * rows].mul_(factors)
        return dense


def _floats(name: str, scale: Tensor) -> Tensor:
    if scale.dtype == torch.uint8:
        return (scale.float() - _E8M0_BIAS).exp2()
    if not scale.is_floating_point():
        raise ValueError(f"{name} is {scale.dtype}; only floats or exponents as bytes are supported")
    return scale.float()
