"""Products of few rows with a quantized weight: 4 or 8 bits, activations as they are or as bytes.

Integers are multiplied as they are, and the product of a group is multiplied by its scale: nothing is dequantized in
memory. The inputs of an output are divided between programs, so that a single row occupies the whole device; their
sums are added in a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl

_ROUNDING = tl.constexpr(12582912.0)


# fmt: off
@triton.jit
def round_rows(x, out, scales, width, BLOCK: tl.constexpr):
    """Activations of a row as integers of at most 127, and their scale."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    wide = tl.load(x + row * width + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.max(tl.abs(wide), 0) / 127
    wide = tl.div_rn(wide, tl.where(scale > 0, scale, 1.0))
    tl.store(out + row * width + column, ((wide + _ROUNDING) - _ROUNDING).to(tl.int8), mask=inside)
    tl.store(scales + row, scale)


@triton.jit
def _halves(values, zero, DOT: tl.constexpr):
    """Values of even and of odd inputs, less their zeros."""
    even = (values & 15).to(tl.int32) - 8 - zero
    odd = (values >> 4).to(tl.int32) - 8 - zero
    return even.to(DOT), odd.to(DOT)


@triton.jit(do_not_specialize=["rows", "each"])
def multiply(x, values, scales, zeros, parts, rows, outputs, inputs, groups, each,
             BITS: tl.constexpr, BYTES: tl.constexpr, ZEROS: tl.constexpr, GROUP: tl.constexpr,
             ROWS: tl.constexpr, COLUMNS: tl.constexpr, KEYS: tl.constexpr, DOT: tl.constexpr):
    """``x`` [rows, inputs] by some outputs, over ``each`` steps of ``KEYS`` inputs: a part of the sum."""
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    used, real = row < rows, column < outputs
    step = tl.arange(0, KEYS * BITS // 8)
    line = row.to(tl.int64)[:, None] * inputs
    weight = column.to(tl.int64)[None, :] * (inputs * BITS // 8)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    first = tl.program_id(1) * each
    for part in range(first, tl.minimum(first + each, inputs // KEYS)):
        begin = part * KEYS
        group = column * groups + begin // GROUP
        scale = tl.load(scales + group, mask=real, other=0.0)
        byte = tl.load(values + weight + (begin * BITS // 8 + step)[:, None], mask=real[None, :], other=0)
        if BITS == 4:
            zero = column * 0
            if ZEROS:
                zero = tl.load(zeros + group, mask=real, other=0).to(tl.int32)
            even, odd = _halves(byte, zero[None, :], DOT)
            place = x + line + (begin + 2 * step)[None, :]
            near = tl.load(place, mask=used[:, None], other=0)
            far = tl.load(place + 1, mask=used[:, None], other=0)
            if BYTES:
                product = (tl.dot(near, even) + tl.dot(far, odd)).to(tl.float32)
            else:
                product = tl.dot(near.to(DOT), even, input_precision="ieee")
                product = tl.dot(far.to(DOT), odd, product, input_precision="ieee")
        else:
            near = tl.load(x + line + (begin + step)[None, :], mask=used[:, None], other=0)
            if BYTES:
                product = tl.dot(near, byte).to(tl.float32)
            else:
                product = tl.dot(near.to(DOT), byte.to(DOT), input_precision="ieee")
        total += product * scale[None, :]
    place = (tl.program_id(1) * rows + row).to(tl.int64)[:, None] * outputs + column[None, :]
    tl.store(parts + place, total, mask=used[:, None] & real[None, :])


@triton.jit(do_not_specialize=["rows", "count"])
def add_parts(parts, row_scales, bias, out, rows, outputs, count, BYTES: tl.constexpr, BIAS: tl.constexpr,
              BLOCK: tl.constexpr):
    """The sum of all parts, by the row's scale, with the bias."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < outputs
    total = tl.zeros([BLOCK], tl.float32)
    for part in range(count):
        total += tl.load(parts + (part * rows + row) * outputs + column, mask=inside, other=0.0)
    if BYTES:
        total = total * tl.load(row_scales + row)
    if BIAS:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * outputs + column, total.to(out.dtype.element_ty), mask=inside)
# fmt: on
