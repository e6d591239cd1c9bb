"""Random weights in few bits, for tests of the kernels."""

from __future__ import annotations

from typing import Literal

import torch

from headrace.compute.quantization.weight import FP8, QuantizedWeight, pack_halves


def quantized_weight(
    outputs: int,
    inputs: int,
    groups: int,
    bits: Literal[4, 8],
    activation_bits: Literal[8, 16],
    *,
    zeros: bool = False,
    order: bool = False,
    fp8: bool = False,
    minima: bool = False,
    fp4: bool = False,
    powers: bool = False,
) -> QuantizedWeight:
    """Drawn from torch's generator; products with normal activations are about as large as these. The scales of ``fp4``
    are ``powers`` of two, as those of MXFP4, or any.
    """
    limit = 1 << (bits - 1)
    if fp8:
        values = torch.randn(outputs, inputs).to(FP8)
        return QuantizedWeight(
            values, (torch.rand(outputs, groups) + 0.5) / inputs**0.5, None, None, 8, activation_bits
        )
    if fp4:
        codes = torch.randint(0, 256, (outputs, inputs // 2)).to(torch.uint8)
        scales = (torch.rand(outputs, groups) + 0.5) / (8 * inputs**0.5)
        if powers:
            scales = scales.log2().round().exp2()
        return QuantizedWeight(codes, scales, None, None, 4, activation_bits, fp4=True)
    integers = torch.randint(-limit, limit, (outputs, inputs)).to(torch.int8)
    points = torch.randint(-limit, limit, (outputs, groups)).to(torch.int8) if zeros else None
    scales = (torch.rand(outputs, groups) + 0.5) / (limit * inputs**0.5)
    return QuantizedWeight(
        pack_halves(integers) if bits == 4 else integers,
        scales,
        points,
        torch.randperm(inputs) if order else None,
        bits,
        activation_bits,
        -limit * scales * (torch.rand(outputs, groups) + 0.5) if minima else None,
    )
