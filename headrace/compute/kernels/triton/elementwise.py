"""Norms, rotations, activations and gathers on the device, each fused with what stands beside it.

Where a product follows that reads activations in bytes, they are rounded before they are stored: ``LARGEST`` is 127
for integers, 448 for fp8, and 0 where they stay as they are. ``scales`` then has one number for each row.
"""

from __future__ import annotations

import triton
import triton.language as tl

SMALLEST = tl.constexpr(1e-30)
SWIGLU_ALPHA = tl.constexpr(1.702)
SWIGLU_LIMIT = tl.constexpr(7.0)
_ROUNDING = tl.constexpr(12582912.0)
"""1.5 · 2²³: adding it to a float32 below 2²² and subtracting it again rounds to the nearest integer, ties to even."""


_FINE = tl.constexpr(24576.0)
"""1.5 · 2¹⁴, which rounds in the same way to multiples of 2⁻⁹: the numbers of e4m3 below 2⁻⁶."""


# fmt: off
@triton.jit
def _nearest(wide, LARGEST: tl.constexpr):
    """The nearest number that a byte holds: an integer, or one of e4m3. A conversion of these is exact, while that of
    other numbers to fp8 loses carries in Triton's interpreter."""
    if LARGEST == 127:
        wide = (wide + _ROUNDING) - _ROUNDING
    if LARGEST == 448:
        wide = tl.minimum(tl.maximum(wide, -LARGEST), LARGEST)
        bits = wide.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000  # three bits of its fraction stay
        small = (wide + _FINE) - _FINE
        wide = tl.where(tl.abs(wide) < 0.015625, small, bits.to(tl.float32, bitcast=True))
    return wide


@triton.jit
def _keep(out, scales, place, value, inside, LARGEST: tl.constexpr):
    """The row of this program, whose elements are zero beyond its width: as it is, or as bytes with their scale."""
    if LARGEST == 0:
        tl.store(out + place, value.to(out.dtype.element_ty), mask=inside)
    else:
        wide = value.to(tl.float32)
        scale = tl.max(tl.abs(wide), 0) / LARGEST
        wide = _nearest(tl.div_rn(wide, tl.where(scale > 0, scale, 1.0)), LARGEST)
        tl.store(out + place, wide.to(out.dtype.element_ty), mask=inside)
        tl.store(scales + tl.program_id(0), scale)


@triton.jit
def rounded(x, out, scales, width, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    """A row in bytes."""
    column = tl.arange(0, BLOCK)
    inside = column < width
    place = tl.program_id(0).to(tl.int64) * width + column
    _keep(out, scales, place, tl.load(x + place, mask=inside, other=0.0), inside, LARGEST)


@triton.jit
def summed_norm(value, residual, weight, out, scales, row, column, inside, width, eps, ADD: tl.constexpr,
                NORMED: tl.constexpr, LARGEST: tl.constexpr):
    """Keep the norm of a row's ``value``; with ``ADD`` that of its sum with ``residual``, which becomes the sum.
    Without ``NORMED`` the row itself, or the sum."""
    if ADD:
        before = tl.load(residual + row + column, mask=inside, other=0.0)
        value = (before.to(tl.float32) + value.to(tl.float32)).to(before.dtype)
        tl.store(residual + row + column, value, mask=inside)
    if NORMED:
        wide = value.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
        factor = tl.load(weight + column, mask=inside, other=0.0)
        value = (wide * scale * factor).to(value.dtype)
    _keep(out, scales, row + column, value, inside, LARGEST)


@triton.jit
def norm(x, residual, weight, out, scales, width, eps, ADD: tl.constexpr, NORMED: tl.constexpr,
         LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    """A row's norm; with ``ADD`` that of its sum with ``residual``: see `summed_norm`."""
    row = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row + column, mask=inside, other=0.0)
    summed_norm(value, residual, weight, out, scales, row, column, inside, width, eps, ADD, NORMED, LARGEST)


@triton.jit(do_not_specialize_on_alignment=["tokens"])
def embed_norm(tokens, table, weight, residual, out, scales, width, scale, eps, SCALED: tl.constexpr,
               NORMED: tl.constexpr, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    """The embedding of a token, and its norm; without ``NORMED`` the embedding twice."""
    row = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    inside = column < width
    token = tl.load(tokens + tl.program_id(0)).to(tl.int64)
    value = tl.load(table + token * width + column, mask=inside, other=0.0).to(residual.dtype.element_ty)
    if SCALED:
        value = (value.to(tl.float32) * scale).to(value.dtype)
    tl.store(residual + row + column, value, mask=inside)
    if NORMED:
        wide = value.to(tl.float32)
        inverse = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
        factor = tl.load(weight + column, mask=inside, other=0.0)
        value = (wide * inverse * factor).to(value.dtype)
    _keep(out, scales, row + column, value, inside, LARGEST)


@triton.jit
def activated(gate, up, KIND: tl.constexpr):
    """The activation of ``gate``, times ``up``: 0 silu, 1 gelu_tanh, 2 clamped_swiglu."""
    wide = gate.to(tl.float32)
    if KIND == 2:
        wide = tl.where(wide > SWIGLU_LIMIT, SWIGLU_LIMIT, wide)
        other = up.to(tl.float32)
        other = tl.where(other > SWIGLU_LIMIT, SWIGLU_LIMIT, tl.where(other < -SWIGLU_LIMIT, -SWIGLU_LIMIT, other))
        active = wide * tl.sigmoid(wide * SWIGLU_ALPHA) * (other + 1)
    else:
        if KIND == 0:
            active = wide * tl.sigmoid(wide)
        else:  # tanh(x) is 2 sigmoid(2x) - 1
            active = wide * tl.sigmoid(1.5957691216057308 * (wide + 0.044715 * wide * wide * wide))
        active = active.to(gate.dtype).to(tl.float32) * up.to(tl.float32)
    return active


@triton.jit
def gated(gate_up, out, scales, width, KIND: tl.constexpr, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    """`activated` for the first half of a row and the second one; in bytes only by one program for the row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside, other=0.0)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=inside, other=0.0)
    _keep(out, scales, row * width + column, activated(gate, up, KIND).to(gate.dtype), inside, LARGEST)


@triton.jit
def _write(pages, scales, value, inside, slot, head, block_stride, scale_stride,
           KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr,
           LARGEST: tl.constexpr):
    """Heads [H, D] of a token into its slot; with ``LARGEST`` each scaled to that number at most. A slot below zero is
    nowhere."""
    block = slot // PAGE
    offset = slot % PAGE
    feature = tl.arange(0, BLOCK_D)
    there = inside & (head[:, None] + slot >= head[:, None])
    place = pages + block * block_stride + (offset * KV_HEADS + head[:, None]) * D + feature[None, :]
    if LARGEST == 0:
        tl.store(place, value.to(pages.dtype.element_ty), mask=there)
    else:
        wide = value.to(tl.float32)
        most = tl.max(tl.where(inside, tl.abs(wide), 0.0), 1)
        wide = _nearest(wide * tl.where(most > SMALLEST, LARGEST / most, 0.0)[:, None], LARGEST)
        tl.store(place, wide.to(pages.dtype.element_ty), mask=there)
        tl.store(scales + block * scale_stride + head * PAGE + offset, most / LARGEST, mask=head + slot >= head)


@triton.jit(do_not_specialize_on_alignment=["positions", "slots"])
def rope_write(qkv, queries, keys, values, key_scales, value_scales, rotation, positions, norms, slots,
               block_stride, scale_stride, eps, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr,
               BLOCK_D: tl.constexpr, ROTARY: tl.constexpr, PAGE: tl.constexpr, GATHERED: tl.constexpr,
               NORM: tl.constexpr, LARGEST: tl.constexpr, TOGETHER: tl.constexpr):
    """Some heads of one token, all of the same kind: normed, rotated, and written where they belong. ``NORM``: 0 none,
    1 each head, 2 all heads of a kind as one, 3 each head after its rotation, 4 each head and those of values."""
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * TOGETHER
    head = first + tl.arange(0, TOGETHER)
    feature = tl.arange(0, BLOCK_D)
    inside = (feature < D)[None, :] & (head >= 0)[:, None]
    line = qkv + (token * (HEADS + 2 * KV_HEADS) + head[:, None]) * D
    queried = head < HEADS + KV_HEADS  # queries and keys, which are normed and rotated
    turned = feature < ROTARY
    turns = turned[None, :] & queried[:, None]
    other = tl.where(feature < ROTARY // 2, feature + ROTARY // 2, feature - ROTARY // 2)
    x = tl.load(line + feature[None, :], mask=inside, other=0.0)
    y = tl.load(line + other[None, :], mask=turns, other=0.0)
    normed = head < HEADS + KV_HEADS + KV_HEADS * (NORM == 4)
    if NORM == 1 or NORM == 2 or NORM == 4:
        wide = x.to(tl.float32)
        if NORM != 2:
            scale = tl.rsqrt(tl.sum(wide * wide, 1) / D + eps)
        else:
            of_keys = (first >= HEADS).to(tl.int32)
            count = HEADS + of_keys * (KV_HEADS - HEADS)
            total = tl.zeros((), tl.float32)
            for begin in range(0, count, TOGETHER):
                others = of_keys * HEADS + begin + tl.arange(0, TOGETHER)
                place = qkv + (token * (HEADS + 2 * KV_HEADS) + others[:, None]) * D
                part = tl.load(place + feature[None, :], mask=inside, other=0.0).to(tl.float32)
                total += tl.sum(tl.sum(part * part, 1), 0)
            scale = tl.rsqrt(total / (count * D) + eps)
        scale = tl.where(normed, scale, 1.0)[:, None]
        weight = norms + head[:, None] * D
        factor = tl.load(weight + feature[None, :], mask=inside & normed[:, None], other=1.0)
        x = (wide * scale * factor).to(x.dtype)
        factor = tl.load(weight + other[None, :], mask=turns, other=1.0)
        y = (y.to(tl.float32) * scale * factor).to(y.dtype)
    at = tl.load(positions + token) if GATHERED else token
    if first < HEADS + KV_HEADS:
        cosine = tl.load(rotation + at * 2 * ROTARY + feature, mask=turned, other=1.0)
        sine = tl.load(rotation + at * 2 * ROTARY + ROTARY + feature, mask=turned, other=0.0)
        x = (x.to(tl.float32) * cosine[None, :] + y.to(tl.float32) * sine[None, :]).to(x.dtype)
        if NORM == 3:
            wide = x.to(tl.float32)
            scale = tl.rsqrt(tl.sum(wide * wide, 1) / D + eps)[:, None]
            factor = tl.load(norms + head[:, None] * D + feature[None, :], mask=inside, other=1.0)
            x = (wide * scale * factor).to(x.dtype)
    if first < HEADS:
        tl.store(queries + (token * HEADS + head[:, None]) * D + feature[None, :], x, mask=inside)
    else:
        slot = tl.load(slots + token)
        if first < HEADS + KV_HEADS:
            _write(keys, key_scales, x, inside, slot, head - HEADS, block_stride, scale_stride,
                   KV_HEADS, D, BLOCK_D, PAGE, LARGEST)
        else:
            _write(values, value_scales, x, inside, slot, head - HEADS - KV_HEADS, block_stride, scale_stride,
                   KV_HEADS, D, BLOCK_D, PAGE, LARGEST)
# fmt: on
