"""Linear layers with quantized weights: which of them the device's kernels multiply, and how."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headrace.compute.kernels import linear
from headrace.compute.kernels.triton import linear as device
from headrace.compute.kernels.triton.target import Target, power
from headrace.compute.quantization.weight import QuantizedWeight

MOST_ROWS = 256
"""With more rows the weight is dequantized, and the product is that of the device's library."""
_COLUMNS = 64
_MOST_KEYS = 128


class Packed(NamedTuple):
    """A quantized weight whose kernels read ``keys`` inputs at once, all of one group."""

    weight: QuantizedWeight
    keys: int


def prepare(weight: Tensor | QuantizedWeight) -> linear.Prepared | Packed:
    """The weight as `multiply` or `linear.apply` take it."""
    if not isinstance(weight, QuantizedWeight):
        return linear.prepare(weight)
    keys = weight.group_size & -weight.group_size  # the largest power of two that divides it
    least = 64 if weight.bits == 4 and weight.activation_bits == 8 else 32
    if keys < least or (weight.bits == 8 and weight.zeros is not None):
        return weight
    return Packed(weight, min(keys, _MOST_KEYS))


def multiply(x: Tensor, packed: Packed, bias: Tensor | None, target: Target) -> Tensor:
    """``x @ weight.T + bias``: [T, in] to [T, out]."""
    weight, keys = packed
    rows, (outputs, inputs) = len(x), weight.shape
    if rows > MOST_ROWS or not rows:
        return linear.apply(x, weight, bias)
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    x = x.contiguous()
    out = x.new_empty((rows, outputs))
    in_bytes = weight.activation_bits == 8
    given, scales = x, x
    if in_bytes:
        given, scales = torch.empty_like(x, dtype=torch.int8), x.new_empty(rows, dtype=torch.float32)
        device.round_rows[(rows,)](x, given, scales, inputs, BLOCK=power(inputs), num_warps=8)
    size = min(power(rows), 64)
    tiles = (-(-outputs // _COLUMNS), -(-rows // size))
    steps = inputs // keys
    splits = max(1, min(2 * target.processors // (tiles[0] * tiles[1]), steps // 4))
    each = -(-steps // splits)
    splits = -(-steps // each)
    parts = x.new_empty((splits, rows, outputs), dtype=torch.float32)
    device.multiply[(tiles[0], splits, tiles[1])](
        given,
        weight.values,
        weight.scales,
        weight.scales if weight.zeros is None else weight.zeros,
        parts,
        rows,
        outputs,
        inputs,
        weight.scales.shape[1],
        each,
        BITS=weight.bits,
        BYTES=in_bytes,
        ZEROS=weight.zeros is not None,
        GROUP=weight.group_size,
        ROWS=size,
        COLUMNS=_COLUMNS,
        KEYS=keys,
        DOT=target.dot(given.dtype),
        num_warps=4,
        num_stages=3,
    )
    given_bias = out if bias is None else bias
    device.add_parts[(rows, -(-outputs // 1024))](
        parts,
        scales,
        given_bias,
        out,
        rows,
        outputs,
        splits,
        BYTES=in_bytes,
        BIAS=bias is not None,
        BLOCK=1024,
    )
    return out
