"""Products of fp8 by `torch._scaled_mm`, with a scale for each row and each output, or without scales where the device
does not take these.

Neither torch's documentation nor a capability says which of them a build has, so a small product is tried.
"""

from __future__ import annotations

from collections.abc import Callable
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
    if device.type == "cuda" and (
        torch.version.hip or torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY
    ):
        return None
    values = torch.ones((_MULTIPLE, _MULTIPLE), device=device).to(FP8)
    scales = torch.ones((_MULTIPLE, 1), device=device)
    weight = QuantizedWeight(values, scales, None, None, 8, 8)
    ways: dict[Way, Callable[[], Tensor]] = {
        "rows": lambda: scaled(values, scales.view(-1), weight, None),
        "sums": lambda: sums(values, weight),
    }
    for way, product in ways.items():
        try:
            product()
        except (RuntimeError, ValueError):  # the latter where the shapes of scales are not known
            continue
        return way
    return None


def fits(weight: QuantizedWeight) -> bool:
    """Whether the library takes a weight of this shape."""
    return all(size % _MULTIPLE == 0 for size in weight.shape)


def scaled(x: Tensor, scales: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias`` in bfloat16, the only type that every build takes, for rows in fp8 [T, in] with
    ``scales`` [T].
    """
    factors = scales[:, None], weight.scales.t()
    return torch._scaled_mm(x, weight.values.t(), *factors, bias, out_dtype=torch.bfloat16)


def sums(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """The sums of products [T, out] in float32, without any scale."""
    one = torch.ones((), dtype=torch.float32, device=x.device)
    return torch._scaled_mm(x, weight.values.t(), one, one, out_dtype=torch.float32)
