"""AWQ, activation-aware scaling (arXiv:2306.00978): large inputs get finer weights.

The weights of an input are multiplied by a factor, and the producer of the input is divided by it. The model stays the
same, but its quantization grid changes. The exponent of the input sizes is chosen by search: it minimizes the error of
the outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.compute.quantization.scheme import Scheme, round_to_nearest

_TRIED = 20
"""Exponents between 0 (all factors 1) and 1 (as large as the inputs)."""


def best_factors(weight: Tensor, moments: Tensor, scheme: Scheme) -> Tensor:
    """Factors [in] for the inputs of a weight [out, in], given the moments [in, in] of its inputs.

    The error is that of the outputs over the calibration text, squared and summed. With the weight's error E and
    moments M it is the trace of E M Eᵀ.
    """
    size = moments.diagonal().sqrt().clamp(min=1e-4)
    found, least = torch.ones_like(size), float("inf")
    for step in range(_TRIED):
        factors = size ** (step / _TRIED)
        factors /= (factors.max() * factors.min()).sqrt()
        error = round_to_nearest(weight * factors, scheme).dequantized() / factors - weight
        loss = float((error @ moments).mul_(error).sum())
        if loss < least:
            found, least = factors, loss
    return found
