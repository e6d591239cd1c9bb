"""Linear layers with quantized weights: which product the device uses for a weight and a number of rows.

| weight | rows | product |
|---|---|---|
| W4A16, W4A8, W8A16 | up to 256 | kernel, inputs divided between programs |
| | more | dequantized, then the device's library |
| W8A8 | up to 64 | kernel |
| | more | `torch._int_mm`, then scales |
| fp8 W8A8 | up to 16 | kernel |
| | more | `torch._scaled_mm` |

The kernel reads the weight once for every 64 rows. These numbers of rows are estimates: they are not measured.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headrace.compute.kernels import linear
from headrace.compute.kernels.triton import elementwise
from headrace.compute.kernels.triton import linear as device
from headrace.compute.kernels.triton.target import Target, fits, power, scaled, sums
from headrace.compute.quantization.weight import FP8, FP8_LARGEST, QuantizedWeight

MOST_ROWS = 256
MOST_INTEGER_ROWS = 64
MOST_FP8_ROWS = 16
"""Of the kernel; see above."""
_COLUMNS = 64
_MOST_KEYS = 128
_WIDEST = 1 << 14
"""Elements of a row, with as many of its gate, that a program holds in its registers."""
_EXPANDED = 1 << 25
"""Elements of a weight that are dequantized at once: 64 MiB in 16 bits."""


class Packed(NamedTuple):
    """A quantized weight whose kernels read ``keys`` inputs at once: all of one group, or of several where these have
    scales that are powers of two (MXFP4).
    """

    weight: QuantizedWeight
    keys: int

    def keys_for(self, dtype: torch.dtype) -> int:
        """The inputs at once beside activations of ``dtype``: scaled floats of several groups need its exponents."""
        return min(self.keys, self.weight.group_size) if dtype == torch.float16 else self.keys

    @property
    def largest(self) -> int:
        """The largest number of its activations in bytes, or 0 if they are not rounded."""
        if self.weight.activation_bits == 16:
            return 0
        return int(FP8_LARGEST) if self.weight.in_fp8 else 127


class Rounded(NamedTuple):
    """Activations in bytes [T, in], int8 or fp8, with the scale of each row, float32 [T]; ``dtype`` is theirs before
    that, and the product's.
    """

    values: Tensor
    scales: Tensor
    dtype: torch.dtype

    def wide(self) -> Tensor:
        """The activations [T, in] again."""
        return (self.values.float() * self.scales[:, None]).to(self.dtype)


def prepare(weight: Tensor | QuantizedWeight) -> linear.Prepared | Packed:
    """The weight as `multiply` or `linear.apply` take it."""
    if not isinstance(weight, QuantizedWeight):
        return weight
    of = weight.shape[1] if _in_powers(weight) else weight.group_size
    keys = of & -of  # the largest power of two that divides it
    rounded = weight.activation_bits == 8
    least = {(4, True): 64, (8, False): 16}.get((weight.bits, rounded), 32)
    if (
        keys < least
        or (weight.bits == 8 and weight.zeros is not None)
        or (weight.minima is not None and rounded)
    ):
        return weight
    return Packed(weight, min(keys, _MOST_KEYS))


def _in_powers(weight: QuantizedWeight) -> bool:
    """Whether a weight has floats of 4 bits and scales that are powers of two, whose products are exact."""
    mantissas = torch.frexp(weight.scales).mantissa if weight.fp4 else weight.scales[:0]
    return weight.fp4 and weight.activation_bits == 16 and bool((mantissas == 0.5).all())


def room(x: Tensor, width: int, largest: int) -> tuple[Tensor, Tensor]:
    """New memory for rows of ``width``: like ``x``, or for bytes up to ``largest``; and for their scales."""
    if not largest:
        out = x.new_empty((len(x), width))
        return out, out
    dtype = torch.int8 if largest == 127 else FP8
    return torch.empty((len(x), width), dtype=dtype, device=x.device), x.new_empty(
        len(x), dtype=torch.float32
    )


def round_rows(x: Tensor, largest: int) -> Rounded:
    """Activations [T, in] in bytes."""
    x = x.contiguous()
    rows, width = x.shape
    out, scales = room(x, width, largest)
    block = power(width)
    elementwise.rounded[(rows,)](
        x, out, scales, width, LARGEST=largest, BLOCK=block, num_warps=min(16, max(4, block // 512))
    )
    return Rounded(out, scales, x.dtype)


def gated(gate_up: Tensor, kind: int, largest: int) -> Tensor | Rounded:
    """The activations [T, in] of a ``kind`` of `elementwise.activated`, in bytes up to ``largest`` (0: as they are, and
    also where no program can hold a row).
    """
    gate_up = gate_up.contiguous()
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    block = power(width)
    if largest == 0 or block > _WIDEST:  # programs share a row, and none knows its largest number
        block, largest = 1024, 0
    out, scales = room(gate_up, width, largest)
    elementwise.gated[(rows, -(-width // block))](
        gate_up,
        out,
        scales,
        width,
        KIND=kind,
        LARGEST=largest,
        BLOCK=block,
        num_warps=4 if largest == 0 else max(1, min(16, block // 512)),
    )
    return Rounded(out, scales, gate_up.dtype) if largest else out


def multiply(x: Tensor | Rounded, packed: Packed, bias: Tensor | None, target: Target) -> Tensor:
    """``x @ weight.T + bias``: [T, in] to [T, out]. ``x`` is rounded here if the weight wants bytes."""
    weight = packed.weight
    given = x.values if isinstance(x, Rounded) else x
    rows, dtype = len(given), x.dtype
    if not rows:
        return given.new_empty((0, weight.shape[0]), dtype=dtype)
    if packed.largest and isinstance(x, Tensor):
        x = round_rows(x, packed.largest)
    if weight.order is not None:
        x = x._replace(values=x.values[:, weight.order]) if isinstance(x, Rounded) else x[:, weight.order]
    if isinstance(x, Rounded) and _in_library(rows, weight):
        if not weight.in_fp8:
            return _finished(torch._int_mm(x.values, weight.values.t()), x, weight, bias)
        if target.fp8 == "rows" and dtype == torch.bfloat16:
            return scaled(x.values, x.scales, weight, bias)
        return _finished(sums(x.values, weight), x, weight, bias)
    if rows > MOST_ROWS:
        return _expanded(x.wide() if isinstance(x, Rounded) else x, weight, bias)
    return _divided(x, packed, bias, target)


def _in_library(rows: int, weight: QuantizedWeight) -> bool:
    """Whether torch multiplies so many rows of bytes with this weight, which must have one scale for each output."""
    if weight.bits == 4 or weight.scales.shape[1] > 1:
        return False
    if weight.in_fp8:
        return rows > MOST_FP8_ROWS and fits(weight)
    return rows > MOST_INTEGER_ROWS and all(size % 8 == 0 for size in weight.shape)


def _finished(sums: Tensor, x: Rounded, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """Sums of products in bytes by their scales, with the bias."""
    rows, outputs = sums.shape
    out = torch.empty((rows, outputs), dtype=x.dtype, device=sums.device)
    grid = (rows, -(-outputs // 1024))
    device.scale_sums[grid](
        sums,
        x.scales,
        weight.scales,
        out if bias is None else bias,
        out,
        rows,
        outputs,
        BIAS=bias is not None,
        BLOCK=1024,
    )
    return out


def _expanded(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    """The product with a weight that is dequantized to the type of ``x``, some outputs after others."""
    outputs, inputs = weight.shape
    out = x.new_empty((len(x), outputs))
    step = max(1, _EXPANDED // inputs)
    for begin in range(0, outputs, step):
        part = weight.rows(begin, min(begin + step, outputs))
        wide = x.new_empty(part.shape)
        device.expand[(len(wide), -(-inputs // 1024))](
            part.values,
            part.scales,
            bases(part),
            wide,
            inputs,
            part.scales.shape[1],
            BITS=part.bits,
            FP4=part.fp4,
            ZEROS=part.zeros is not None,
            MINIMA=part.minima is not None,
            GROUP=part.group_size,
            BLOCK=1024,
        )
        torch.mm(x, wide.t(), out=out[:, begin : begin + step])
    return out if bias is None else out.add_(bias)


def _divided(x: Tensor | Rounded, packed: Packed, bias: Tensor | None, target: Target) -> Tensor:
    """The product by the kernel, whose programs divide the inputs if the outputs do not occupy the device."""
    weight, keys = packed.weight, packed.keys_for(x.dtype)
    (outputs, inputs), dtype = weight.shape, x.dtype
    in_bytes = isinstance(x, Rounded)
    given = (x.values if isinstance(x, Rounded) else x).contiguous()
    rows = len(given)
    out = torch.empty((rows, outputs), dtype=dtype, device=given.device)
    scales = x.scales if isinstance(x, Rounded) else out
    size = min(power(rows), 64)
    tiles = (-(-outputs // _COLUMNS), -(-rows // size))
    steps = inputs // keys
    splits = max(1, min(2 * target.processors // (tiles[0] * tiles[1]), steps // 4))
    each = -(-steps // splits)
    splits = -(-steps // each)
    parts = out if splits == 1 else out.new_empty((splits, rows, outputs), dtype=torch.float32)
    ends = {"SCALED": in_bytes, "BIAS": bias is not None}
    device.multiply[(tiles[0], splits, tiles[1])](
        given,
        weight.values,
        weight.scales,
        bases(weight),
        scales,
        out if bias is None else bias,
        parts,
        rows,
        outputs,
        inputs,
        weight.scales.shape[1],
        each,
        BITS=weight.bits,
        FP4=weight.fp4,
        INTEGERS=in_bytes and not weight.in_fp8,
        ZEROS=weight.zeros is not None,
        MINIMA=weight.minima is not None,
        GROUP=weight.group_size,
        ROWS=size,
        COLUMNS=_COLUMNS,
        KEYS=keys,
        DOT=target.dot(torch.bfloat16 if given.dtype == FP8 else given.dtype),
        WHOLE=splits == 1,
        num_warps=4,
        num_stages=3,
        **ends,
    )
    if splits > 1:
        given_bias = out if bias is None else bias
        grid = (rows, -(-outputs // 1024))
        device.add_parts[grid](parts, scales, given_bias, out, rows, outputs, splits, **ends, BLOCK=1024)
    return out


def bases(weight: QuantizedWeight) -> Tensor:
    """The zeros or minima of the groups; without both, any tensor."""
    if weight.zeros is not None:
        return weight.zeros
    return weight.scales if weight.minima is None else weight.minima
