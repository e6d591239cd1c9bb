"""Linears in 8-bit floating point: ``weight`` and its scales, for all of it, for each output, or for blocks.

Read into plain weights: there is no product in fp8 here, so what these save is space on the disk. Scales of
activations that a checkpoint brings are not needed then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.compute.quantization.gptq_format import check_shape

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True, slots=True)
class Fp8Layout:
    """One linear: the suffix of its ``scale``, and the outputs and inputs that share one (None: outputs or all)."""

    scale: str
    block: tuple[int, int] | None
    optional: tuple[str, ...] = ("input_scale", "output_scale", "activation_scale")

    @property
    def required(self) -> tuple[str, ...]:
        return "weight", self.scale

    def read(self, parts: Mapping[str, Tensor], shape: tuple[int, int]) -> Tensor:
        """See `stored.LinearLayout`."""
        weight, scale = parts["weight"], parts[self.scale].float()
        check_shape("weight", weight, shape)
        if weight.dtype not in FP8:
            raise ValueError(f"weight is {weight.dtype}, the config says fp8")
        dense = weight.float()
        if scale.numel() == 1:
            return dense.mul_(scale.view(()))
        if self.block is None:
            check_shape(self.scale, scale.view(-1), (shape[0],))
            return dense.mul_(scale.view(-1, 1))
        rows, columns = self.block
        check_shape(self.scale, scale, (-(-shape[0] // rows), -(-shape[1] // columns)))
        along = scale.repeat_interleave(columns, 1)[:, : shape[1]]
        for index, factors in enumerate(along):
            dense[index * rows : (index + 1) * rows].mul_(factors)
        return dense
