"""Products with a quantized weight: 4 or 8 bits, activations as they are or in bytes.

With few rows the values are multiplied as they are, and the product of a group is multiplied by its scale: nothing is
dequantized in memory. The inputs of an output are divided between programs, so that a single row occupies the whole
device; their sums are added in a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl


# fmt: off
@triton.jit
def _halves(values, zero, DOT: tl.constexpr):
    """Values of even and of odd inputs, counted from the lowest, less their zeros."""
    even = (values & 15).to(tl.int32) - zero
    odd = (values >> 4).to(tl.int32) - zero
    return even.to(DOT), odd.to(DOT)


@triton.jit
def _finish(total, row_scales, bias, row, column, used, real, SCALED: tl.constexpr, BIAS: tl.constexpr):
    """Sums of products [rows, columns] by the scales of their rows, with the bias."""
    if SCALED:
        total = total * tl.load(row_scales + row, mask=used, other=0.0)[:, None]
    if BIAS:
        total += tl.load(bias + column, mask=real, other=0.0).to(tl.float32)[None, :]
    return total


@triton.jit(do_not_specialize=["rows", "each"])
def multiply(x, values, scales, zeros, row_scales, bias, out, rows, outputs, inputs, groups, each,
             BITS: tl.constexpr, INTEGERS: tl.constexpr, ZEROS: tl.constexpr, MINIMA: tl.constexpr, GROUP: tl.constexpr,
             ROWS: tl.constexpr, COLUMNS: tl.constexpr, KEYS: tl.constexpr, DOT: tl.constexpr,
             WHOLE: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr):
    """``x`` [rows, inputs] by some outputs, over ``each`` steps of ``KEYS`` inputs: the result if these are ``WHOLE``,
    else a part of its sum. ``zeros`` are those of the groups, or their minima."""
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
        byte = tl.load(values + weight + (begin * BITS // 8 + step)[:, None], mask=real[None, :], other=0.0)
        if BITS == 4:
            zero = column * 0
            if not MINIMA:
                zero += 8
            if ZEROS:
                zero += tl.load(zeros + group, mask=real, other=0).to(tl.int32)
            even, odd = _halves(byte, zero[None, :], DOT)
            place = x + line + (begin + 2 * step)[None, :]
            near = tl.load(place, mask=used[:, None], other=0.0)
            far = tl.load(place + 1, mask=used[:, None], other=0.0)
            if INTEGERS:
                product = (tl.dot(near, even) + tl.dot(far, odd)).to(tl.float32)
            else:
                product = tl.dot(near.to(DOT), even, input_precision="ieee")
                product = tl.dot(far.to(DOT), odd, product, input_precision="ieee")
            sums = tl.sum(near.to(tl.float32), 1) + tl.sum(far.to(tl.float32), 1)
        else:
            near = tl.load(x + line + (begin + step)[None, :], mask=used[:, None], other=0.0)
            if MINIMA:
                product = tl.dot(near.to(DOT), (byte.to(tl.int32) + 128).to(DOT), input_precision="ieee")
            elif INTEGERS:
                product = tl.dot(near, byte).to(tl.float32)
            else:
                product = tl.dot(near.to(DOT), byte.to(DOT), input_precision="ieee")
            sums = tl.sum(near.to(tl.float32), 1)
        total += product * scale[None, :]
        if MINIMA:
            total += sums[:, None] * tl.load(zeros + group, mask=real, other=0.0)[None, :]
    if WHOLE:
        total = _finish(total, row_scales, bias, row, column, used, real, SCALED, BIAS)
    place = (tl.program_id(1) * rows + row).to(tl.int64)[:, None] * outputs + column[None, :]
    tl.store(out + place, total.to(out.dtype.element_ty), mask=used[:, None] & real[None, :])


@triton.jit(do_not_specialize=["rows", "count"])
def add_parts(parts, row_scales, bias, out, rows, outputs, count, SCALED: tl.constexpr, BIAS: tl.constexpr,
              BLOCK: tl.constexpr):
    """The sum of all parts, by the row's scale, with the bias."""
    row = tl.program_id(0) + tl.arange(0, 1)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    used, real = row < rows, column < outputs
    place = row.to(tl.int64)[:, None] * outputs + column[None, :]
    total = tl.zeros([1, BLOCK], tl.float32)
    for part in range(count):
        before = (part * rows).to(tl.int64) * outputs
        total += tl.load(parts + before + place, mask=real[None, :], other=0.0)
    total = _finish(total, row_scales, bias, row, column, used, real, SCALED, BIAS)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=real[None, :])


@triton.jit(do_not_specialize=["rows"])
def scale_sums(sums, row_scales, scales, bias, out, rows, outputs, BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """Sums of products in bytes, by the scales of their rows and of their outputs, with the bias."""
    row = tl.program_id(0) + tl.arange(0, 1)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    used, real = row < rows, column < outputs
    place = row.to(tl.int64)[:, None] * outputs + column[None, :]
    total = tl.load(sums + place, mask=real[None, :], other=0.0).to(tl.float32)
    total = total * tl.load(scales + column, mask=real, other=0.0)[None, :]
    total = _finish(total, row_scales, bias, row, column, used, real, True, BIAS)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=real[None, :])


@triton.jit
def expand(values, scales, zeros, out, inputs, groups, BITS: tl.constexpr, ZEROS: tl.constexpr, MINIMA: tl.constexpr,
           GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """The dequantized weight of an output."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inputs
    group = row * groups + column // GROUP
    value = tl.load(values + row * (inputs * BITS // 8) + column * BITS // 8, mask=inside, other=0.0)
    if BITS == 4:
        value = ((value.to(tl.int32) >> (column % 2 * 4)) & 15) - 8
    wide = value.to(tl.float32)
    if ZEROS:
        wide -= tl.load(zeros + group, mask=inside, other=0).to(tl.float32)
    if MINIMA:
        wide += 1 << (BITS - 1)
    wide *= tl.load(scales + group, mask=inside, other=0.0)
    if MINIMA:
        wide += tl.load(zeros + group, mask=inside, other=0.0)
    tl.store(out + row * inputs + column, wide.to(out.dtype.element_ty), mask=inside)
# fmt: on
