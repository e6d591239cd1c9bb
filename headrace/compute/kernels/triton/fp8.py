"""Products of fp8 by `torch._scaled_mm`, with a scale for each row and each output, or without scales where the device
does not take these.

Neither torch's documentation nor a capability says which of them a build has, so a small product is tried.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from headrace.compute.quantization.weight import FP8, QuantizedWeight

Way = Literal["rows", "sums"]
_LEAST_CAPABILITY = (8, 9)
_MULTIPLE = 16
"""Both sides of a weight must be multiples of it."""


def way_of(device: torch.device) -> Way | None:
    """How ``device`` multiplies fp8: with the scales of rows and outputs, to sums without scales, or not at all."""
    if device.type == "cuda" and (torch.version.hip or torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY):
        return None
    values = torch.ones((_MULTIPLE, _MULTIPLE), device=device).to(FP8)
    weight = QuantizedWeight(values, torch.ones((_MULTIPLE, 1), device=device), None, None, 8, 8)
    ways: tuple[Way, Way] = ("rows", "sums")
    for way in ways:
        try:
            multiply(values, weight.scales.view(-1), weight, None, torch.bfloat16, way)
        except RuntimeError:
            continue
        return way
    return None


def fits(weight: QuantizedWeight) -> bool:
    """Whether the library takes a weight of this shape."""
    return all(size % _MULTIPLE == 0 for size in weight.shape)


def multiply(
    x: Tensor, scales: Tensor, weight: QuantizedWeight, bias: Tensor | None, dtype: torch.dtype, way: Way | None
) -> Tensor:
    """The product of ``x`` fp8 [T, in], whose rows have ``scales`` [T], with the weight: in ``dtype``; or sums in
    float32 that still need scales and bias.
    """
    if way == "rows" and dtype == torch.bfloat16:  # the only type that every build takes
        return torch._scaled_mm(
            x, weight.values.t(), scales[:, None], weight.scales.t(), bias, out_dtype=torch.bfloat16
        )
    one = torch.ones((), dtype=torch.float32, device=x.device)
    return torch._scaled_mm(x, weight.values.t(), one, one, out_dtype=torch.float32)
