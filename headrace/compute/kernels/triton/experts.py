"""Mixtures of experts on the device: a router, its pairs of token and expert sorted by expert, and grouped products.

```
 x [T, hidden] ── logits ── choose ──▶ ids, weights [T, K] ── sort_pairs ──▶ order [T * K], counts and begins of experts
   rows of an expert, a tile at a time ── grouped (gate, up, activation) ──▶ inner ── grouped (down) ──▶ [T * K, hidden]
   combine: the weighted sum of a token's results in the order of its experts, and the norm behind it
 of tokens with an adapter: sort_pairs by adapter and expert ── list_tiles ──▶ tiles of `adapters`
```
No shape depends on which experts are chosen, so the host never waits, and a graph may hold all of it. There are as
many tiles as there can be. A program finds the expert of its tile from the counts; one beyond the last tile does
nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from headrace.compute.kernels.triton.elementwise import activated, summed_norm
from headrace.compute.kernels.triton.linear import added, finish

_BEYOND = tl.constexpr(1 << 30)


# fmt: off
@triton.jit(do_not_specialize=["rows"])
def logits(x, weight, bias, out, rows, outputs, inputs, BIAS: tl.constexpr, EVEN: tl.constexpr, ROWS: tl.constexpr,
           COLUMNS: tl.constexpr, KEYS: tl.constexpr, DOT: tl.constexpr):
    """Logits float32 [rows, outputs] of a router."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    used, real = row < rows, column < outputs
    key = tl.arange(0, KEYS)
    line = x + row.to(tl.int64)[:, None] * inputs
    matrix = weight + column.to(tl.int64)[None, :] * inputs
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for begin in range(0, inputs, KEYS):
        there = begin + key < (_BEYOND if EVEN else inputs)
        near = tl.load(line + (begin + key)[None, :], mask=used[:, None] & there[None, :], other=0.0)
        part = tl.load(matrix + (begin + key)[:, None], mask=real[None, :] & there[:, None], other=0.0)
        total = tl.dot(near.to(DOT), part.to(DOT), total, input_precision="ieee")
    if BIAS:
        total += tl.load(bias + column, mask=real, other=0.0)[None, :]
    place = out + row.to(tl.int64)[:, None] * outputs + column[None, :]
    tl.store(place, total, mask=used[:, None] & real[None, :])


@triton.jit
def _within_groups(ranked, inside, KEPT: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr):
    """Which of [GROUPS * SIZE] are in the best groups, by the sum of the two highest numbers of each."""
    each = tl.reshape(tl.where(inside, ranked, float("-inf")), [GROUPS, SIZE])
    there = tl.sum(tl.reshape(inside.to(tl.int32), [GROUPS, SIZE]), 1)
    member = tl.arange(0, SIZE)[None, :]
    best = tl.max(each, 1)
    first = tl.min(tl.where(each == best[:, None], member, SIZE), 1)
    second = tl.max(tl.where(member == first[:, None], float("-inf"), each), 1)
    score = best + tl.where(there > 1, second, 0.0)
    group = tl.arange(0, GROUPS)
    kept = group < 0
    for _ in range(KEPT):
        open_ = (there > 0) & (kept == 0)
        most = tl.max(tl.where(open_, score, float("-inf")), 0)
        kept = kept | (group == tl.min(tl.where(open_ & (score == most), group, GROUPS), 0))
    return tl.reshape(tl.broadcast_to(kept.to(tl.int32)[:, None], [GROUPS, SIZE]), [GROUPS * SIZE]) > 0


@triton.jit(do_not_specialize_on_alignment=["slots"])
def choose(logits, correction, slots, ids, weights, outputs, least, scale, EXPERTS: tl.constexpr, CHOSEN: tl.constexpr,
           COLUMNS: tl.constexpr, SIGMOID: tl.constexpr, NORMALIZED: tl.constexpr, CORRECTED: tl.constexpr,
           GROUPS: tl.constexpr, KEPT: tl.constexpr, GATED: tl.constexpr, PADDED: tl.constexpr,
           BLOCK_GROUPS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """The experts of a token in ascending order, and their weights; one behind them that computes every token if there
    are more ``COLUMNS`` than are ``CHOSEN``. A token whose slot is below zero has none."""
    token = tl.program_id(0).to(tl.int64)
    flat = tl.arange(0, BLOCK_GROUPS * BLOCK_SIZE)
    size: tl.constexpr = EXPERTS // GROUPS
    expert = flat // BLOCK_SIZE * size + flat % BLOCK_SIZE
    inside = (flat % BLOCK_SIZE < size) & (expert < EXPERTS)
    logit = tl.load(logits + token * outputs + expert, mask=inside, other=float("-inf"))
    if SIGMOID:
        score = tl.sigmoid(logit)
    else:
        score = tl.exp(logit - tl.max(logit, 0))
        score = score / tl.sum(score, 0)
    score = tl.where(inside, score, 0.0)
    ranked = score
    if CORRECTED:
        ranked += tl.load(correction + expert, mask=inside, other=0.0)
    ranked = tl.where(ranked != ranked, float("inf"), ranked)  # what is not a number is chosen
    open_ = inside
    if GROUPS > 1:
        open_ = inside & _within_groups(ranked, inside, KEPT, BLOCK_GROUPS, BLOCK_SIZE)
    taken = flat < 0
    for _ in range(CHOSEN):
        most = tl.max(tl.where(open_ & (taken == 0), ranked, float("-inf")), 0)
        equal = open_ & (taken == 0) & (ranked == most)
        taken = taken | (flat == tl.min(tl.where(equal, flat, _BEYOND), 0))
    weight = tl.where(taken, score, 0.0)
    if NORMALIZED:
        weight = weight / (tl.sum(weight, 0) + least)
    there = True
    if PADDED:
        there = tl.load(slots + token) >= 0
    place = token * COLUMNS + tl.cumsum(taken.to(tl.int32), 0) - 1
    tl.store(ids + place, tl.where(there, expert, COLUMNS + EXPERTS).to(tl.int64), mask=taken)
    tl.store(weights + place, weight * scale, mask=taken)
    if COLUMNS > CHOSEN:
        gate = 1.0
        if GATED:
            gate = tl.sigmoid(tl.load(logits + token * outputs + EXPERTS))
        tl.store(ids + token * COLUMNS + CHOSEN, tl.where(there, EXPERTS, COLUMNS + EXPERTS).to(tl.int64))
        tl.store(weights + token * COLUMNS + CHOSEN, gate)


@triton.jit
def _groups(ids, owners, pair, pairs, experts, apart, EACH: tl.constexpr, OWNED: tl.constexpr):
    """The expert of each pair; if tokens are ``OWNED``, its group by the token's owner and the expert, and what is in
    none is beyond them."""
    each = tl.load(ids + pair, mask=pair < pairs, other=_BEYOND)
    if OWNED:
        owner = tl.load(owners + pair // EACH, mask=pair < pairs, other=-1)
        each = tl.where((owner >= 0) & (each < experts), owner * apart + each, _BEYOND)
    return each


@triton.jit(do_not_specialize=["pairs", "experts", "apart"])
def sort_pairs(ids, owners, order, begins, counts, pairs, experts, apart, EACH: tl.constexpr, OWNED: tl.constexpr,
               BLOCK: tl.constexpr):
    """The pairs of one expert in ascending order, behind those of the experts before it. With ``OWNED``, those of one
    of the first ``experts`` among tokens of one owner, with ``EACH`` pairs a token: groups of two owners are ``apart``
    numbers from each other."""
    expert = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    before = tl.zeros([BLOCK], tl.int32)
    own = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, pairs, BLOCK):
        each = _groups(ids, owners, begin + lane, pairs, experts, apart, EACH, OWNED)
        before += (each < expert).to(tl.int32)
        own += (each == expert).to(tl.int32)
    place = tl.sum(before, 0)
    tl.store(begins + expert, place)
    tl.store(counts + expert, tl.sum(own, 0))
    for begin in range(0, pairs, BLOCK):
        each = _groups(ids, owners, begin + lane, pairs, experts, apart, EACH, OWNED)
        mine = (each == expert).to(tl.int32)
        tl.store(order + place + tl.cumsum(mine, 0) - 1, begin + lane, mask=mine > 0)
        place += tl.sum(mine, 0)


@triton.jit
def _tile(order, begins, counts, experts, EXPERTS: tl.constexpr, ROWS: tl.constexpr, SORTED: tl.constexpr):
    """The expert of this program's tile, and where the tile begins among its rows."""
    tile = tl.program_id(1)
    begin = tile * 0
    if SORTED:
        each = tl.arange(0, EXPERTS)
        tiles = (tl.load(counts + each, mask=each < experts, other=0) + ROWS - 1) // ROWS
        expert = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), 0)
        begin = (tile - tl.sum(tl.where(each < expert, tiles, 0), 0)) * ROWS
    else:
        expert = tl.load(order + tile).to(tl.int32)
    return expert, begin


@triton.jit(do_not_specialize=["groups"])
def list_tiles(begins, counts, tiles, groups, GROUPS: tl.constexpr, ROWS: tl.constexpr):
    """A tile of the pairs of a group: the group, where the tile begins and where the group ends. Group -1: no tile."""
    group, begin = _tile(begins, begins, counts, groups, GROUPS, ROWS, True)
    there = group < groups
    first = tl.load(begins + group, mask=there, other=0)
    end = first + tl.load(counts + group, mask=there, other=0)
    place = tiles + tl.program_id(1) * 3
    tl.store(place, tl.where(there, group, -1).to(tl.int64))
    tl.store(place + 1, (first + begin).to(tl.int64))
    tl.store(place + 2, end.to(tl.int64))


@triton.jit
def _inputs(line, used, key, inputs, BITS: tl.constexpr, KEYS: tl.constexpr, EVEN: tl.constexpr):
    """Some inputs of rows as `linear.added` reads them."""
    step = key + tl.arange(0, KEYS if BITS > 4 else KEYS // 2) * (1 if BITS > 4 else 2)
    there = used[:, None]
    if not EVEN:
        there = there & (step < inputs)[None, :]
    near = tl.load(line + step[None, :], mask=there, other=0.0)
    far = near
    if BITS == 4:
        far = tl.load(line + (step + 1)[None, :], mask=there, other=0.0)
    return near, far


@triton.jit
def grouped(x, order, begins, counts, values, scales, zeros, row_scales, bias, out, outputs, inputs, groups, experts,
            BITS: tl.constexpr, FP4: tl.constexpr, INTEGERS: tl.constexpr, ZEROS: tl.constexpr, MINIMA: tl.constexpr,
            GROUP: tl.constexpr, EXPERTS: tl.constexpr, EACH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
            KEYS: tl.constexpr, EVEN: tl.constexpr, DOT: tl.constexpr, SORTED: tl.constexpr, KIND: tl.constexpr,
            SCALED: tl.constexpr, BIAS: tl.constexpr):
    """Some outputs of the rows of one expert: a row of ``out`` is a pair's, and ``x`` has a row for ``EACH`` of them.
    With a ``KIND`` of `activated` (-1: none) the weight has twice the ``outputs``, and ``out`` their activation.

    If the pairs are not ``SORTED``, ``order`` has the expert of each instead, and a tile is one pair."""
    expert, begin = _tile(order, begins, counts, experts, EXPERTS, ROWS, SORTED)
    if expert >= experts:
        return
    lane = tl.arange(0, ROWS)
    used = lane < 1
    pair = tl.program_id(1) + lane
    if SORTED:
        used = begin + lane < tl.load(counts + expert)
        pair = tl.load(order + tl.load(begins + expert) + begin + lane, mask=used, other=0)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    real = column < outputs
    source = pair // EACH
    line = x + source.to(tl.int64)[:, None] * inputs
    of_expert = expert.to(tl.int64) * (outputs * 2 if KIND >= 0 else outputs)
    values += of_expert * (inputs if BITS > 4 else inputs // 2)
    scales += of_expert * groups
    zeros += of_expert * groups
    bias += of_expert
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    second = total
    for key in range(0, inputs, KEYS):
        near, far = _inputs(line, used, key, inputs, BITS, KEYS, EVEN)
        total = added(total, near, far, values, scales, zeros, column, real, key, inputs, groups,
                      BITS, FP4, INTEGERS, ZEROS, MINIMA, GROUP, KEYS, COLUMNS, EVEN, DOT)
        if KIND >= 0:
            second = added(second, near, far, values, scales, zeros, column + outputs, real, key, inputs, groups,
                           BITS, FP4, INTEGERS, ZEROS, MINIMA, GROUP, KEYS, COLUMNS, EVEN, DOT)
    total = finish(total, row_scales, bias, source, column, used, real, SCALED, BIAS)
    kept = out.dtype.element_ty
    if KIND >= 0:
        second = finish(second, row_scales, bias, source, column + outputs, used, real, SCALED, BIAS)
        total = activated(total.to(kept), second.to(kept), KIND)
    place = out + pair.to(tl.int64)[:, None] * outputs + column[None, :]
    tl.store(place, total.to(kept), mask=used[:, None] & real[None, :])


@triton.jit
def combine(parts, ids, weights, beside, residual, norm, out, scales, width, eps, experts, EACH: tl.constexpr,
            BESIDE: tl.constexpr, ADD: tl.constexpr, NORMED: tl.constexpr, LARGEST: tl.constexpr,
            BLOCK: tl.constexpr):
    """The weighted sum of a token's results in the order of its columns, and then what `elementwise.norm` does. The
    expert at ``experts`` has its result ``BESIDE`` the others; what is beyond it counts for nothing."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros([BLOCK], tl.float32)
    for each in range(EACH):
        expert = tl.load(ids + token * EACH + each)
        weight = tl.load(weights + token * EACH + each)
        weight = tl.where(expert < experts, weight, 0.0)
        there = inside & (column + expert < column + experts)
        part = tl.load(parts + (token * EACH + each) * width + column, mask=there, other=0.0)
        total += part.to(tl.float32) * weight
    if BESIDE:
        one = tl.load(beside + token * width + column, mask=inside, other=0.0).to(tl.float32)
        factor = tl.zeros((), tl.float32)
        for each in range(EACH):
            expert = tl.load(ids + token * EACH + each)
            factor += tl.where(expert == experts, tl.load(weights + token * EACH + each), 0.0)
        total += one * factor
    value = total.to(parts.dtype.element_ty)
    summed_norm(value, residual, norm, out, scales, token * width, column, inside, width, eps, ADD, NORMED, LARGEST)
# fmt: on
