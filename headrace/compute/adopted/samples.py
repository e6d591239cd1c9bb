"""Sample inputs for modules, and whether two of them compute the same."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 4e-2}
_ROUGH = 0.15
"""More tolerance for products whose activations are rounded to 8 bits."""
_SCALES = (1.0, 30.0)
"""Sizes of sample inputs: at the second, gates are saturated and clamps clamp."""


def sample(width: int, weight: Tensor, scales: tuple[float, ...] = _SCALES) -> Tensor:
    """Inputs [scales, 3, width] in the type and on the device of ``weight``, the same at each call."""
    noise = torch.randn((len(scales), 3, width), generator=torch.Generator().manual_seed(width))
    return (noise * torch.tensor(scales)[:, None, None]).to(weight.device, weight.dtype)


def agree(ours: Tensor, theirs: object, *, rough: bool = False) -> bool:
    """Whether two results for `sample` inputs are equal up to rounding, for each index of the first dimension."""
    if not isinstance(theirs, Tensor) or ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    if ours.dtype not in TOLERANCES:
        return False
    largest = theirs.float().flatten(1).abs().amax(1)
    apart = (ours.float() - theirs.float()).flatten(1).abs().amax(1)
    limit = TOLERANCES[ours.dtype] + (_ROUGH if rough else 0.0)
    return bool((apart <= limit * largest).all())  # NaN is never smaller


def result(call: Callable[[Tensor], object], x: Tensor) -> object:
    """What a module computes for inputs of that shape; None if it does not take them."""
    try:
        return call(x)
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError, AssertionError):
        return None


def nothing_like(weight: Tensor) -> nn.Parameter:
    """NaNs in the shape of ``weight``, in the memory of one element."""
    one = torch.full((1,) * weight.dim(), float("nan"), dtype=weight.dtype, device=weight.device)
    return nn.Parameter(one.expand(weight.shape), requires_grad=False)
