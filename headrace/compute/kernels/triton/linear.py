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
def floats(codes):
    """Twice the values of codes of e2m1, as integers."""
    size = codes & 7
    exponent = size >> 1
    value = tl.where(exponent == 0, size & 1, (2 | (size & 1)) << tl.maximum(exponent - 1, 0))
    return tl.where((codes & 8) > 0, -value, value)


@triton.jit
def _halves(values, zero, FP4: tl.constexpr, DOT: tl.constexpr):
    """Values of even and of odd inputs, counted from the lowest, less their zeros; or codes of floats."""
    even, odd = (values & 15).to(tl.int32), (values >> 4).to(tl.int32)
    if FP4:
        even, odd = floats(even), floats(odd)
    else:
        even, odd = even - zero, odd - zero
    return even.to(DOT), odd.to(DOT)


@triton.jit
def _of_groups(scales, values, HALF: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr, DOT: tl.constexpr):
    """Codes of floats [HALF, COLUMNS] by the scales of their groups [GROUPS, COLUMNS], which are powers of two."""
    each = tl.broadcast_to(scales[:, None, :], [GROUPS, HALF // GROUPS, COLUMNS])
    return (floats(values.to(tl.int32)).to(tl.float32) * tl.reshape(each, [HALF, COLUMNS])).to(DOT)


@triton.jit
def added(total, near, far, values, scales, zeros, column, real, begin, inputs, groups,
          BITS: tl.constexpr, FP4: tl.constexpr, INTEGERS: tl.constexpr, ZEROS: tl.constexpr, MINIMA: tl.constexpr,
          GROUP: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr, EVEN: tl.constexpr, DOT: tl.constexpr):
    """``total`` [rows, COLUMNS] with the product of ``KEYS`` inputs from ``begin`` on. They are ``near``; with 4 bits
    ``near`` are those in even and ``far`` those in odd places. ``EVEN``: none of them is beyond the last one. All are
    of one group; or of several, where these have scales that are powers of two and no zeros."""
    step = tl.arange(0, KEYS if BITS > 4 else KEYS // 2)
    first = begin if BITS > 4 else begin // 2
    width = inputs if BITS > 4 else inputs // 2
    there = real[None, :]
    if not EVEN:
        there = there & (begin + step < inputs)[:, None]
    stored = tl.load(values + column.to(tl.int64)[None, :] * width + (first + step)[:, None], mask=there, other=0.0)
    if BITS == 16:
        total = tl.dot(near.to(DOT), stored.to(DOT), total, input_precision="ieee")
    elif GROUP < KEYS:
        group = begin // GROUP + tl.arange(0, KEYS // GROUP)
        scale = tl.load(scales + column[None, :] * groups + group[:, None], mask=real[None, :], other=0.0)
        even = _of_groups(scale, stored & 15, KEYS // 2, KEYS // GROUP, COLUMNS, DOT)
        odd = _of_groups(scale, stored >> 4, KEYS // 2, KEYS // GROUP, COLUMNS, DOT)
        total = tl.dot(near.to(DOT), even, total, input_precision="ieee")
        total = tl.dot(far.to(DOT), odd, total, input_precision="ieee")
    else:
        group = column * groups + begin // GROUP
        scale = tl.load(scales + group, mask=real, other=0.0)
        if BITS == 4:
            zero = column * 0
            if not MINIMA:
                zero += 8
            if ZEROS:
                zero += tl.load(zeros + group, mask=real, other=0).to(tl.int32)
            even, odd = _halves(stored, zero[None, :], FP4, DOT)
            if INTEGERS:
                product = (tl.dot(near, even) + tl.dot(far, odd)).to(tl.float32)
            else:
                product = tl.dot(near.to(DOT), even, input_precision="ieee")
                product = tl.dot(far.to(DOT), odd, product, input_precision="ieee")
            sums = tl.sum(near.to(tl.float32), 1) + tl.sum(far.to(tl.float32), 1)
        else:
            if MINIMA:
                product = tl.dot(near.to(DOT), (stored.to(tl.int32) + 128).to(DOT), input_precision="ieee")
            elif INTEGERS:
                product = tl.dot(near, stored).to(tl.float32)
            else:
                product = tl.dot(near.to(DOT), stored.to(DOT), input_precision="ieee")
            sums = tl.sum(near.to(tl.float32), 1)
        total += product * scale[None, :]
        if MINIMA:
            total += sums[:, None] * tl.load(zeros + group, mask=real, other=0.0)[None, :]
    return total


@triton.jit
def finish(total, row_scales, bias, row, column, used, real, SCALED: tl.constexpr, BIAS: tl.constexpr):
    """Sums of products [rows, columns] by the scales of their rows, with the bias."""
    if SCALED:
        total = total * tl.load(row_scales + row, mask=used, other=0.0)[:, None]
    if BIAS:
        total += tl.load(bias + column, mask=real, other=0.0).to(tl.float32)[None, :]
    return total


@triton.jit(do_not_specialize=["rows", "each"])
def multiply(x, values, scales, zeros, row_scales, bias, out, rows, outputs, inputs, groups, each,
             BITS: tl.constexpr, FP4: tl.constexpr, INTEGERS: tl.constexpr, ZEROS: tl.constexpr, MINIMA: tl.constexpr,
             GROUP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, KEYS: tl.constexpr, DOT: tl.constexpr,
             WHOLE: tl.constexpr, SCALED: tl.constexpr, BIAS: tl.constexpr):
    """``x`` [rows, inputs] by some outputs, over ``each`` steps of ``KEYS`` inputs: the result if these are ``WHOLE``,
    else a part of its sum. ``zeros`` are those of the groups, or their minima."""
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    used, real = row < rows, column < outputs
    step = tl.arange(0, KEYS * BITS // 8)
    line = row.to(tl.int64)[:, None] * inputs
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    first = tl.program_id(1) * each
    for part in range(first, tl.minimum(first + each, inputs // KEYS)):
        begin = part * KEYS
        place = x + line + (begin + step * (8 // BITS))[None, :]
        near = tl.load(place, mask=used[:, None], other=0.0)
        far = near
        if BITS == 4:
            far = tl.load(place + 1, mask=used[:, None], other=0.0)
        total = added(total, near, far, values, scales, zeros, column, real, begin, inputs, groups,
                      BITS, FP4, INTEGERS, ZEROS, MINIMA, GROUP, KEYS, COLUMNS, True, DOT)
    if WHOLE:
        total = finish(total, row_scales, bias, row, column, used, real, SCALED, BIAS)
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
    total = finish(total, row_scales, bias, row, column, used, real, SCALED, BIAS)
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
    total = finish(total, row_scales, bias, row, column, used, real, True, BIAS)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=real[None, :])


@triton.jit
def expand(values, scales, zeros, out, inputs, groups, BITS: tl.constexpr, FP4: tl.constexpr, ZEROS: tl.constexpr,
           MINIMA: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """The dequantized weight of an output."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < inputs
    group = row * groups + column // GROUP
    value = tl.load(values + row * (inputs * BITS // 8) + column * BITS // 8, mask=inside, other=0.0)
    if BITS == 4:
        value = (value.to(tl.int32) >> (column % 2 * 4)) & 15
        value = floats(value) if FP4 else value - 8
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
