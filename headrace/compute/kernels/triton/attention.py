"""Paged attention on the device: one source for decode, drafts, chunks and prompts.

A program computes one tile of queries of one row and one head of keys. The lines of a tile are the query heads that
share this head of keys, token after token, so that decoding fills a tensor core's tile too. Several programs may
share the keys of a tile (``SPLIT``); `join` then adds their results.

Where groups of rows begin with the same keys, one launch (``PREFIX`` 1) attends to these for the tokens of many rows
at once, so that they are read once. The groups are read from the device (`SharedKeys`), so that a graph may be replayed
for any. A second one (``PREFIX`` 2) attends to the other keys row by row. Both write parts; of tokens without a group
the first writes empty ones.

Triton compiles a variant for arguments of 1 and for those divisible by 16. What differs from step to step is left out
of that, here and in the other files, so that serving does not wait for the compiler.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _together(groups, TOKENS: tl.constexpr, GROUPS: tl.constexpr):
    """`_tile` of tokens of different rows that see the keys of one row: that row, the first place in the order of
    tokens, their number, and the number of keys. The last programs may have none.
    """
    tile = tl.program_id(0)
    row = tile * 0
    place = row
    count = row
    keys = row
    before = row
    for group in tl.static_range(GROUPS):  # unrolled: the loads wait for each other otherwise
        size = tl.load(groups + 4 * group + 1)
        tiles = tl.cdiv(size, TOKENS)
        offset = (tile - before) * TOKENS
        mine = (tile >= before) & (tile < before + tiles)
        place = tl.where(mine, tl.load(groups + 4 * group) + offset, place)
        count = tl.where(mine, tl.minimum(size - offset, TOKENS), count)
        keys = tl.where(mine, tl.load(groups + 4 * group + 2), keys)
        row = tl.where(mine, tl.load(groups + 4 * group + 3), row)
        before += tiles
    return row, place, count, keys


@triton.jit
def _tile(tiles, starts, contexts, TABLED: tl.constexpr, TOKENS: tl.constexpr):
    """Row, first packed token, number of tokens and first position of this program's tile."""
    row = tl.program_id(0)
    offset = row * 0
    if TABLED:
        offset = tl.load(tiles + 2 * row + 1)
        row = tl.load(tiles + 2 * row)
    begin = tl.load(starts + row)
    length = tl.load(starts + row + 1) - begin
    position = tl.load(contexts + row) - length + offset
    return row, begin + offset, tl.minimum(length - offset, TOKENS), position


@triton.jit
def _lines(
    token,
    count,
    order,
    ROWS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ORDERED: tl.constexpr,
):
    """Of each line of a tile: its token in the tile, whether it is used, and its place among all heads of queries."""
    line = tl.arange(0, ROWS)
    used = line // GROUP < count
    packed = token + line // GROUP
    if ORDERED:
        packed = tl.load(order + packed, mask=used, other=0)
    place = (packed * KV_HEADS + tl.program_id(1)) * GROUP + line % GROUP
    return line // GROUP, used, place.to(tl.int64)


@triton.jit
def _span(
    position, count, window, splits, shared, WINDOWED: tl.constexpr, PREFIX: tl.constexpr, KEYS: tl.constexpr
):
    """The keys that this program reads: the first one, and one after the last."""
    first = position * 0
    if WINDOWED:
        first = tl.maximum(position + 1 - window, 0) // KEYS
    end = position + count
    if PREFIX == 1:
        end = tl.where(count > 0, position, 0)
    if PREFIX == 2:
        first += shared // KEYS
    each = tl.cdiv(tl.cdiv(end, KEYS) - first, splits)
    begin = (first + tl.program_id(2) * each) * KEYS
    return begin, tl.minimum(begin + each * KEYS, end)


# fmt: off
@triton.jit
def _scores(q, k, key_scale, key, at, scale, cap, window,
            WINDOWED: tl.constexpr, CAPPED: tl.constexpr, SCALED: tl.constexpr, MASKED: tl.constexpr):
    """Scores of a tile; minus infinity where a query does not see a key."""
    score = tl.dot(q, k, input_precision="ieee")
    if SCALED:
        score = score * key_scale[None, :]
    if CAPPED:
        score = cap * (2 * tl.sigmoid(2 * score * scale / cap) - 1)
    if MASKED:
        seen = key[None, :] <= at[:, None]
        if WINDOWED:
            seen = seen & (key[None, :] > at[:, None] - window)
        score = tl.where(seen, score, float("-inf"))
    return score


@triton.jit
def _read(q, at, peak, total, mean, begin, end, row, head,
          keys, values, key_scales, value_scales, tables, table_width, block_stride, scale_stride,
          scale, cap, window,
          KV_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr,
          WINDOWED: tl.constexpr, CAPPED: tl.constexpr, SCALED: tl.constexpr, DOT: tl.constexpr,
          MASKED: tl.constexpr):
    """A tile's peaks, sums and means after the keys from ``begin`` to ``end``.

    Unless ``MASKED``, these are whole tiles of keys, and all queries see them.
    """
    feature = tl.arange(0, BLOCK_D)
    real = feature < D
    unit = scale * LOG2E
    if CAPPED:
        unit = scale * 0 + LOG2E
    for start in range(begin, end, KEYS):
        key = start + tl.arange(0, KEYS)
        inside = key < end
        if MASKED:
            block = tl.load(tables + row * table_width + key // PAGE, mask=inside, other=0).to(tl.int64)
        else:
            block = tl.load(tables + row * table_width + key // PAGE).to(tl.int64)
        where = block * block_stride + ((key % PAGE) * KV_HEADS + head) * D
        key_scale = key
        value_scale = key
        if SCALED:
            factor = block * scale_stride + head * PAGE + key % PAGE
            key_scale = tl.load(key_scales + factor, mask=inside, other=0.0)
            value_scale = tl.load(value_scales + factor, mask=inside, other=0.0)
        if MASKED:
            k = tl.load(keys + where[None, :] + feature[:, None], mask=inside[None, :] & real[:, None], other=0.0)
        elif BLOCK_D == D:
            k = tl.load(keys + where[None, :] + feature[:, None])
        else:
            k = tl.load(keys + where[None, :] + feature[:, None], mask=real[:, None], other=0.0)
        score = _scores(q, k.to(DOT), key_scale, key, at, scale, cap, window, WINDOWED, CAPPED, SCALED, MASKED)
        new = tl.maximum(peak, tl.max(score, 1) * unit)
        finite = new
        if MASKED:
            finite = tl.where(new == float("-inf"), 0.0, new)  # a line may see none of these keys
        p = tl.exp2(score * unit - finite[:, None])
        shrink = tl.exp2(peak - finite)
        total = total * shrink + tl.sum(p, 1)
        if MASKED:
            v = tl.load(values + where[:, None] + feature[None, :], mask=inside[:, None] & real[None, :], other=0.0)
        elif BLOCK_D == D:
            v = tl.load(values + where[:, None] + feature[None, :])
        else:
            v = tl.load(values + where[:, None] + feature[None, :], mask=real[None, :], other=0.0)
        if SCALED:
            p = p * value_scale[None, :]
        mean = tl.dot(p.to(DOT), v.to(DOT), mean * shrink[:, None], input_precision="ieee")
        peak = new
    return peak, total, mean


@triton.jit
def _sunk(peak, total, sink):
    """What a mean is multiplied with if ``sink`` is one more score, whose value is zero; ``peak`` is a power of two."""
    own = sink * LOG2E
    new = tl.maximum(peak, own)
    kept = total * tl.exp2(peak - new)
    return kept / (kept + tl.exp2(own - new))


@triton.jit(
    do_not_specialize=["table_width", "window", "splits", "parts", "earlier"],
    do_not_specialize_on_alignment=["tiles", "starts", "contexts", "tables", "common", "order", "groups"],
)
def attend(queries, out, sums, keys, values, key_scales, value_scales, sinks, tiles, starts, contexts, tables, common,
           order, groups, table_width, block_stride, scale_stride, scale, cap, window, splits, parts, earlier,
           KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
           PAGE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, TABLED: tl.constexpr,
           WINDOWED: tl.constexpr, CAPPED: tl.constexpr, SCALED: tl.constexpr, SPLIT: tl.constexpr,
           PREFIX: tl.constexpr, GROUPS: tl.constexpr, DOT: tl.constexpr, WHOLE: tl.constexpr, SINKS: tl.constexpr):
    """One tile of queries over (a part of) the keys that it sees; of its ``parts``, so many are ``earlier`` ones. With
    ``SPLIT`` it is `join` that adds the ``sinks``."""
    shared = tl.program_id(0) * 0
    if PREFIX == 1:
        row, token, count, position = _together(groups, ROWS // GROUP, GROUPS)
        if count == 0:
            return
    else:
        row, token, count, position = _tile(tiles, starts, contexts, TABLED, ROWS // GROUP)
    if PREFIX == 2:
        shared = tl.load(common + row)
    of_token, used, place = _lines(token, count, order, ROWS, KV_HEADS, GROUP, PREFIX == 1)
    head = tl.program_id(1)
    feature = tl.arange(0, BLOCK_D)
    real = feature < D
    spot = place[:, None] * D + feature[None, :]
    q = tl.load(queries + spot, mask=used[:, None] & real[None, :], other=0.0).to(DOT)
    at = position + of_token
    begin, end = _span(position, count, window, splits, shared, WINDOWED, PREFIX, KEYS)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mean = tl.zeros([ROWS, BLOCK_D], tl.float32)
    whole = begin
    if WHOLE:  # all queries of the tile see the keys before its first one
        whole = tl.maximum(begin, tl.minimum(end, position + 1) // KEYS * KEYS)
        peak, total, mean = _read(
            q, at, peak, total, mean, begin, whole, row, head,
            keys, values, key_scales, value_scales, tables, table_width, block_stride, scale_stride,
            scale, cap, window, KV_HEADS, D, BLOCK_D, PAGE, KEYS, WINDOWED, CAPPED, SCALED, DOT, False)
    peak, total, mean = _read(
        q, at, peak, total, mean, whole, end, row, head,
        keys, values, key_scales, value_scales, tables, table_width, block_stride, scale_stride,
        scale, cap, window, KV_HEADS, D, BLOCK_D, PAGE, KEYS, WINDOWED, CAPPED, SCALED, DOT, True)
    mean = mean / tl.where(total > 0, total, 1.0)[:, None]
    if SINKS and not SPLIT:
        of_line = tl.load(sinks + head * GROUP + tl.arange(0, ROWS) % GROUP)
        mean = mean * _sunk(peak, total, of_line)[:, None]
    if SPLIT:
        part = place * parts + earlier + tl.program_id(2)
        tl.store(sums + part, tl.where(total > 0, peak + tl.log2(total), float("-inf")), mask=used)
        spot = part[:, None] * D + feature[None, :]
    tl.store(out + spot, mean.to(out.dtype.element_ty), mask=used[:, None] & real[None, :])


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=["tiles", "starts", "contexts"])
def join(parts, sums, out, sinks, tiles, starts, contexts, splits,
         KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
         ROWS: tl.constexpr, TABLED: tl.constexpr, PARTS: tl.constexpr, SINKS: tl.constexpr):
    """The attention of a line of a tile from the means and logarithmic sums of its parts, ``PARTS`` at once."""
    _, token, count, _ = _tile(tiles, starts, contexts, TABLED, ROWS // GROUP)
    line = tl.program_id(2)
    used = line // GROUP < count
    limit = tl.where(used, splits, 0)
    place = (((token + line // GROUP) * KV_HEADS + tl.program_id(1)) * GROUP + line % GROUP).to(tl.int64)
    feature = tl.arange(0, BLOCK_D)
    real = feature < tl.where(used, D, 0)
    peak = float("-inf")
    total = 0.0
    mean = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, splits, PARTS):
        split = first + tl.arange(0, PARTS)
        part = place * splits + split
        held = split < limit
        weight = tl.load(sums + part, mask=held, other=float("-inf"))
        each = tl.load(parts + part[:, None] * D + feature[None, :], mask=held[:, None] & real[None, :], other=0.0)
        new = tl.maximum(peak, tl.max(weight, 0))
        finite = tl.where(new == float("-inf"), 0.0, new)
        share, shrink = tl.exp2(weight - finite), tl.exp2(peak - finite)
        mean = mean * shrink + tl.sum(each * share[:, None], 0)
        total = total * shrink + tl.sum(share, 0)
        peak = new
    mean = mean / tl.where(total > 0, total, 1.0)
    if SINKS:
        mean = mean * _sunk(peak, total, tl.load(sinks + tl.program_id(1) * GROUP + line % GROUP))
    tl.store(out + place * D + feature, mean.to(out.dtype.element_ty), mask=real)
# fmt: on
