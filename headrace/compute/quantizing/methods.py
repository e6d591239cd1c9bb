"""Better values than the nearest ones, by the inputs that linear layers see: GPTQ and AWQ.

GPTQ (arXiv:2210.17323): inputs that are rounded later compensate the rounding error of each input.

The second moments of the inputs, which `calibration` computes from a text, say how: of two correlated inputs, one can
compensate the error of the other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.compute.quantization.scheme import Scheme, round_to_nearest
from headrace.compute.quantization.weight import QuantizedWeight

_DAMPING = 0.01
"""Added to the moments' diagonal, as a share of its mean, because a short text leaves directions without any input."""
_BLOCK = 128
"""Number of inputs after which all later ones receive the errors at once: one large product instead of many small
ones."""


def gptq(weight: Tensor, moments: Tensor, scheme: Scheme, scale_dtype: torch.dtype) -> QuantizedWeight:
    """Quantize a weight [out, in] to the grid of ``scheme``, given the ``moments`` [in, in] of its inputs, all
    float32.
    """
    outputs, inputs = weight.shape
    group = scheme.group(inputs)
    remaining = weight.clone()
    remaining[:, moments.diagonal() == 0] = 0  # an input that is always 0 needs no weight
    factors = _inverse_factors(moments)
    integers = torch.empty_like(weight)
    scales = torch.empty(outputs, inputs // group)
    zeros = torch.empty_like(scales)
    for begin in range(0, inputs, _BLOCK):
        end = min(begin + _BLOCK, inputs)
        errors = torch.empty(outputs, end - begin)
        for column in range(begin, end):
            which, within = divmod(column, group)
            chosen = slice(which, which + 1)
            if within == 0:  # use the weights as corrected so far
                members = _settled(remaining, errors, factors, begin, column, end, column + group)
                scales[:, chosen], zeros[:, chosen] = scheme.grid(members, scale_dtype)
            values = remaining[:, column : column + 1]
            rounded = scheme.round(values, scales[:, chosen], zeros[:, chosen])
            integers[:, column : column + 1] = rounded
            error = (values - (rounded - zeros[:, chosen]) * scales[:, chosen]) / factors[column, column]
            remaining[:, column + 1 : end] -= error * factors[column, column + 1 : end]
            errors[:, column - begin : column - begin + 1] = error
        remaining[:, end:] -= errors @ factors[begin:end, end:]
    return scheme.pack(integers, scales, zeros, None)


def _settled(
    remaining: Tensor, errors: Tensor, factors: Tensor, begin: int, column: int, end: int, last: int
) -> Tensor:
    """The weights from ``column`` to ``last``; those beyond this block get its errors so far."""
    members = remaining[:, column:last].clone()
    if last > end and column > begin:
        members[:, end - column :] -= errors[:, : column - begin] @ factors[begin:column, end:last]
    return members


def _inverse_factors(moments: Tensor) -> Tensor:
    """The upper triangular factor of the inverse moments: row ``i`` says how later inputs compensate input ``i``."""
    damped = moments.clone()
    diagonal = damped.diagonal()
    diagonal[diagonal == 0] = 1.0
    diagonal += _DAMPING * diagonal.mean()
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    factors: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factors


# AWQ, activation-aware scaling (arXiv:2306.00978): large inputs get finer weights.
#
# The weights of an input are multiplied by a factor, and the producer of the input is divided by it. The model stays
# the same, but its quantization grid changes. The exponent of the input sizes is chosen by search: it minimizes the
# error of the outputs.

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
