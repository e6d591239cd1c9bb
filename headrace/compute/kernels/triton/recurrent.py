"""Mixers with a recurrent state on the device: short convolutions, the gated delta rule, Mamba-2.

```
 rows of one token    convolve (and keep) ──▶ one_token ──────────────────────▶ finish: gate and norm
 any rows             convolve ── keep ──▶ correct (delta rule) ── scan ──────▶ finish
```
All is float32 between the inputs and the result. `kernels.mixers` defines it. A chunk is some tokens of one row; what
a chunk needs of itself alone is computed for all chunks at once, and `scan` carries the state from chunk to chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl

_NORM_EPS = tl.constexpr(1e-6)
"""Added to the square of a key's or query's length, as in `mixers`."""


# fmt: off
@triton.jit
def _softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def _input(x, factors, place, mask, PRODUCT: tl.constexpr):
    """What is convolved: inputs, or their products with ``factors``."""
    value = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    if PRODUCT:
        value = value * tl.load(factors + place, mask=mask, other=0.0).to(tl.float32)
    return value


@triton.jit(do_not_specialize_on_alignment=["slots", "contexts"])
def convolve(x, factors, gates, weight, bias, states, slots, contexts, owners, starts, out, width, channels,
             state_stride,
             TAPS: tl.constexpr, BIAS: tl.constexpr, PRODUCT: tl.constexpr, ONE: tl.constexpr, BLOCK: tl.constexpr):
    """The convolution of some channels of a token: times its gate with ``PRODUCT``, else behind silu. If all rows have
    ``ONE`` token, the states become those behind it."""
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    row = token
    offset = 0
    if not ONE:
        row = tl.load(owners + token).to(tl.int64)
        offset = (token - tl.load(starts + row)).to(tl.int32)
    context = tl.load(contexts + row)  # 0: padding, 1: the row begins its sequence
    state = states + tl.load(slots + row) * state_stride + channel
    total = tl.zeros([BLOCK], tl.float32)
    if BIAS:
        total += tl.load(bias + channel, mask=inside, other=0.0)
    for tap in tl.static_range(TAPS):
        back = TAPS - 1 - tap
        within = offset - back
        kept = inside & (channel + within < channel) & (channel + context > channel + 1)
        value = tl.load(state + (TAPS - 1 + within) * channels, mask=kept, other=0.0)
        there = inside & (channel + within >= channel)
        value += _input(x, factors, (token - back) * width + channel, there, PRODUCT)
        total += value * tl.load(weight + tap * channels + channel, mask=inside, other=0.0)
        if ONE and tap > 0:
            tl.store(state + (tap - 1) * channels, value, mask=inside & (channel + context > channel))
    if PRODUCT:
        total = total * tl.load(gates + token * width + channel, mask=inside, other=0.0).to(tl.float32)
    else:
        total = total * tl.sigmoid(total)
    tl.store(out + token * channels + channel, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def keep(x, factors, states, slots, contexts, starts, kept, width, channels, state_stride,
         TAPS: tl.constexpr, BLOCK_TAPS: tl.constexpr, PRODUCT: tl.constexpr, BLOCK: tl.constexpr):
    """The last inputs of some channels behind the ``kept`` tokens of a row become its state."""
    row = tl.program_id(0).to(tl.int64)
    channel = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]
    tap = tl.arange(0, BLOCK_TAPS)[:, None]
    inside = (channel < channels) & (tap < TAPS - 1)
    count = tl.load(kept + row)
    first = tl.load(starts + row)
    state = states + tl.load(slots + row) * state_stride + channel
    within = count + tap - (TAPS - 1)
    older = inside & (within < 0) & (tap + tl.load(contexts + row) > tap + 1)
    value = tl.load(state + (count + tap) * channels, mask=older, other=0.0)
    value += _input(x, factors, (first + within) * width + channel, inside & (within >= 0), PRODUCT)
    tl.debug_barrier()  # all are read before any is written
    tl.store(state + tap * channels, value, mask=inside & (tap + count > tap))


@triton.jit
def _vectors(convolved, token, used, at, size, channels, BLOCK: tl.constexpr):
    """Vectors [tokens, BLOCK] of ``size`` at a place of what was convolved."""
    element = tl.arange(0, BLOCK)
    place = convolved + token[:, None] * channels + at + element[None, :]
    return tl.load(place, mask=used[:, None] & (element < size)[None, :], other=0.0)


@triton.jit
def _unit(x):
    """Vectors of length 1."""
    return x * tl.rsqrt(tl.sum(x * x, 1) + _NORM_EPS)[:, None]


@triton.jit
def _steps(steps, rate, step_bias, token, used, head, heads, step_stride, step_scale, least, most,
           DELTA: tl.constexpr):
    """The logarithms of decays of some tokens, and the factors of their values."""
    each = steps + token * step_stride
    bias = tl.load(step_bias + head)
    if DELTA:
        factor = tl.sigmoid(tl.load(each + head, mask=used, other=0.0).to(tl.float32))
        step = _softplus(tl.load(each + heads + head, mask=used, other=0.0).to(tl.float32) + bias)
    else:
        step = _softplus(tl.load(each + head, mask=used, other=0.0).to(tl.float32) * step_scale + bias)
        step = tl.minimum(tl.maximum(step, least), most)
        factor = step
    return tl.where(used, tl.load(rate + head) * step, 0.0), tl.where(used, factor, 0.0)


@triton.jit(do_not_specialize_on_alignment=["slots", "contexts"])
def one_token(convolved, steps, rate, step_bias, skip, states, slots, contexts, out, channels, state_stride,
              step_stride,
              query_at, key_at, value_at, scale, step_scale, least, most,
              HEADS: tl.constexpr, SHARED: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr,
              BLOCK_V: tl.constexpr, DELTA: tl.constexpr):
    """A head of a row of one token, for some features of its values: the state and the result behind it."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    context = tl.load(contexts + row)
    if context == 0:
        return
    key, value = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    line = convolved + row * channels
    k = tl.load(line + key_at + head // SHARED * K + key, mask=key < K, other=0.0)
    q = tl.load(line + query_at + head // SHARED * K + key, mask=key < K, other=0.0)
    v = tl.load(line + value_at + head * V + value, mask=value < V, other=0.0)
    if DELTA:
        k = k * tl.rsqrt(tl.sum(k * k, 0) + _NORM_EPS)
        q = q * tl.rsqrt(tl.sum(q * q, 0) + _NORM_EPS)
    token = row + tl.arange(0, 1)
    decays, factors = _steps(steps, rate, step_bias, token, token >= 0, head, HEADS, step_stride, step_scale, least,
                             most,
                             DELTA)
    factor = tl.sum(factors, 0)
    place = states + tl.load(slots + row) * state_stride + (head * K + key[:, None]) * V + value[None, :]
    inside = (key < K)[:, None] & (value < V)[None, :]
    state = tl.load(place, mask=inside & (value[None, :] + context > value[None, :] + 1), other=0.0)
    state = state * tl.exp(tl.sum(decays, 0))
    given = v * factor
    if DELTA:
        given = factor * (v - tl.sum(state * k[:, None], 0))
    state += k[:, None] * given[None, :]
    result = tl.sum(state * q[:, None], 0) * scale
    if not DELTA:
        result += tl.load(skip + head) * v
    tl.store(place, state, mask=inside)
    tl.store(out + (row * HEADS + head) * V + value, result, mask=value < V)


@triton.jit
def _between(decays, CHUNK: tl.constexpr):
    """The decays from each token of a chunk to each later one and itself, and those since its beginning."""
    total = tl.cumsum(decays, 0)
    place = tl.arange(0, CHUNK)
    later = place[:, None] >= place[None, :]
    return tl.where(later, tl.exp(tl.where(later, total[:, None] - total[None, :], 0.0)), 0.0), total


@triton.jit
def correct(convolved, steps, rate, step_bias, chunk_starts, chunk_counts, values, keys, channels, step_stride,
            key_at, value_at, HEADS: tl.constexpr, SHARED: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
            BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """The values of a chunk in a head as the delta rule corrects them by those before in the chunk, and the keys by
    which the state before the chunk corrects them: ``(1 + A)^-1`` times both, row by row."""
    head = tl.program_id(1)
    place = tl.arange(0, CHUNK)
    count = tl.load(chunk_counts + tl.program_id(0))
    used = place < count
    token = tl.load(chunk_starts + tl.program_id(0)).to(tl.int64) + place
    k = _unit(_vectors(convolved, token, used, key_at + head // SHARED * K, K, channels, BLOCK_K))
    v = _vectors(convolved, token, used, value_at + head * V, V, channels, BLOCK_V)
    decays, betas = _steps(steps, rate, step_bias, token, used, head, HEADS, step_stride, 1.0, 0.0, 0.0, True)
    between, total = _between(decays, CHUNK)
    system = tl.dot(k, tl.trans(k), input_precision=PRECISION) * between * betas[:, None]
    system = tl.where(place[:, None] > place[None, :], system, 0.0)
    inverse = tl.where(place[:, None] == place[None, :], 1.0, 0.0)
    for row in range(1, count):
        line = tl.sum(tl.where(place[:, None] == row, system, 0.0), 0)
        before = tl.sum(line[:, None] * inverse, 0)
        inverse -= tl.where(place[:, None] == row, before[None, :], 0.0)
    new = tl.dot(inverse, v * betas[:, None], input_precision=PRECISION)
    own = tl.dot(inverse, k * (betas * tl.exp(total))[:, None], input_precision=PRECISION)
    key, value = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    line = (token * HEADS + head)[:, None]
    tl.store(values + line * V + value[None, :], new, mask=used[:, None] & (value < V)[None, :])
    tl.store(keys + line * K + key[None, :], own, mask=used[:, None] & (key < K)[None, :])


@triton.jit
def _chunk(state, number, convolved, values, keys, steps, rate, step_bias, skip, out, chunk_starts, chunk_counts,
           head, value, channels, step_stride, query_at, key_at, value_at, scale, step_scale, least, most,
           HEADS: tl.constexpr, SHARED: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr,
           DELTA: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """The results of a chunk, and the state behind it."""
    place, key = tl.arange(0, CHUNK), tl.arange(0, BLOCK_K)
    used = place < tl.load(chunk_counts + number)
    token = tl.load(chunk_starts + number).to(tl.int64) + place
    k = _vectors(convolved, token, used, key_at + head // SHARED * K, K, channels, BLOCK_K)
    q = _vectors(convolved, token, used, query_at + head // SHARED * K, K, channels, BLOCK_K)
    decays, factors = _steps(steps, rate, step_bias, token, used, head, HEADS, step_stride, step_scale, least, most,
                             DELTA)
    between, total = _between(decays, CHUNK)
    inside = used[:, None] & (value < V)[None, :]
    line = (token * HEADS + head)[:, None]
    if DELTA:
        k, q = _unit(k), _unit(q)
        given = tl.load(values + line * V + value[None, :], mask=inside, other=0.0)
        own = tl.load(keys + line * K + key[None, :], mask=used[:, None] & (key < K)[None, :], other=0.0)
        given -= tl.dot(own, state, input_precision=PRECISION)
    else:
        v = tl.load(convolved + token[:, None] * channels + value_at + head * V + value[None, :], mask=inside,
                    other=0.0)
        given = v * factors[:, None]
    result = tl.dot(q, state, input_precision=PRECISION) * tl.exp(total)[:, None]
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * between
    result = (result + tl.dot(scores, given, input_precision=PRECISION)) * scale
    if not DELTA:
        result += v * tl.load(skip + head)
    tl.store(out + line * V + value[None, :], result, mask=inside)
    last = tl.sum(decays, 0)
    left = k * tl.exp(last - total)[:, None]
    return state * tl.exp(last) + tl.dot(tl.trans(left), given, input_precision=PRECISION)


@triton.jit
def scan(convolved, values, keys, steps, rate, step_bias, skip, states, slots, contexts, firsts, middles, chunk_starts,
         chunk_counts, out, channels, state_stride, step_stride, query_at, key_at, value_at, scale, step_scale, least,
         most, HEADS: tl.constexpr, SHARED: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_K: tl.constexpr,
         BLOCK_V: tl.constexpr, DELTA: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """A head of a row over its chunks, for some features of its values. The state behind the chunks before its middle
    one stays in its slot."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    key, value = tl.arange(0, BLOCK_K), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    place = states + tl.load(slots + row) * state_stride + (head * K + key[:, None]) * V + value[None, :]
    inside = (key < K)[:, None] & (value < V)[None, :]
    begun = value[None, :] + tl.load(contexts + row) > value[None, :] + 1
    state = tl.load(place, mask=inside & begun, other=0.0)
    first, middle, end = tl.load(firsts + row), tl.load(middles + row), tl.load(firsts + row + 1)
    for number in range(first, end):
        state = _chunk(state, number, convolved, values, keys, steps, rate, step_bias, skip, out, chunk_starts,
                       chunk_counts, head, value, channels, step_stride, query_at, key_at, value_at, scale,
                       step_scale, least, most, HEADS, SHARED, K, V, BLOCK_K, DELTA, CHUNK, PRECISION)
        last = value[None, :] + number + 1 == value[None, :] + middle
        tl.store(place, state, mask=inside & last)


@triton.jit
def finish(results, gates, norm, out, inner, gate_stride, norm_stride, eps, gate_scale, SIZE: tl.constexpr,
           NORMED: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr):
    """Results of a token in a group of ``SIZE``, gated by silu and normed: the norm ``FIRST``, or behind the gate."""
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    place = group * SIZE + column
    value = tl.load(results + token * inner + place, mask=inside, other=0.0)
    gate = tl.load(gates + token * gate_stride + place, mask=inside, other=0.0).to(tl.float32) * gate_scale
    gate = gate * tl.sigmoid(gate)
    if not FIRST:
        value = value * gate
    if NORMED:
        scale = tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)
        value = value * scale * tl.load(norm + group * norm_stride + column, mask=inside, other=0.0)
    if FIRST:
        value = value * gate
    tl.store(out + token * inner + place, value.to(out.dtype.element_ty), mask=inside)
# fmt: on
