"""LoRA adapters on the device: what they add to a linear layer, for the tokens of all adapters of a step at once.

```
 tokens of adapters, a tile of one adapter at a time ── shrink: down ──▶ [tokens, ranks] ── expand: up ──▶ + outputs
```
Adapters are where they were loaded. A line of ``table`` has the addresses of one adapter's tensors for the linear
layer, with their sizes; zeros if it leaves the layer as it is. Tokens without an adapter are in no tile. Of experts,
rows are pairs of token and expert, and a line is that of an adapter and an expert.
"""

from __future__ import annotations

import triton
import triton.language as tl

LINE = tl.constexpr(17)
"""Numbers of a line: the address of ``down`` and its ranks, then five for each of three parts."""
ALIGNED = tl.constexpr(16)
"""Bytes of which each tensor begins at a multiple."""
RANK = tl.constexpr(8)
"""Ranks of a part are a multiple of it, so that rows of ``up`` begin like tensors."""


# fmt: off
@triton.jit
def _line(tile, table, apart):
    """Where the line of a tile is, and whether there is such a tile with a change."""
    number = tl.load(tile)
    line = table + number * apart
    return line, tl.load(line, mask=number >= 0, other=0) != 0


@triton.jit(do_not_specialize_on_alignment=["tokens", "tiles", "table"], do_not_specialize=["apart"])
def shrink(x, tokens, tiles, table, inner, inputs, stride, apart, EACH: tl.constexpr, ROWS: tl.constexpr,
           RANKS: tl.constexpr, KEYS: tl.constexpr, EVEN: tl.constexpr, DOT: tl.constexpr):
    """Some ranks of a tile of rows, which have one adapter: ``x`` times its ``down`` [ranks, inputs]. ``x`` has a row
    for ``EACH`` of the ``tokens``, and lines are ``apart`` numbers from each other."""
    tile = tiles + tl.program_id(0) * 3
    line, changed = _line(tile, table, apart)
    if not changed:
        return
    address, ranks = tl.load(line), tl.load(line + 1)
    rank = tl.program_id(1) * RANKS + tl.arange(0, RANKS)
    if tl.program_id(1) * RANKS < ranks:
        at = tl.load(tile + 1) + tl.arange(0, ROWS)
        used, real = at < tl.load(tile + 2), rank < ranks
        token = tl.load(tokens + at, mask=used, other=0).to(tl.int64) // EACH
        down = tl.multiple_of(address.to(tl.pointer_type(x.dtype.element_ty)), ALIGNED)
        key = tl.arange(0, KEYS)
        total = tl.zeros([ROWS, RANKS], tl.float32)
        for begin in range(0, inputs, KEYS):
            there = begin + key < (inputs if not EVEN else begin + KEYS)
            near = tl.load(x + token[:, None] * inputs + (begin + key)[None, :], mask=used[:, None] & there[None, :],
                           other=0.0)
            part = tl.load(down + rank[None, :] * inputs + (begin + key)[:, None], mask=real[None, :] & there[:, None],
                           other=0.0)
            total = tl.dot(near.to(DOT), part.to(DOT), total, input_precision="ieee")
        place = inner + at[:, None] * stride + rank[None, :]
        tl.store(place, total.to(inner.dtype.element_ty), mask=used[:, None] & real[None, :])


@triton.jit(do_not_specialize_on_alignment=["tokens", "tiles", "table"], do_not_specialize=["apart"])
def expand(inner, tokens, tiles, table, out, outputs, stride, apart, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
           RANKS: tl.constexpr, DOT: tl.constexpr):
    """Some columns of one part of the outputs of a tile of rows: ``inner`` times the part's ``up`` [columns, ranks]
    is added."""
    tile = tiles + tl.program_id(0) * 3
    line, changed = _line(tile, table, apart)
    if not changed:
        return
    line += 2 + tl.program_id(2) * 5
    address, offset, columns = tl.load(line), tl.load(line + 1), tl.load(line + 2)
    first, ranks = tl.load(line + 3), tl.multiple_of(tl.load(line + 4), RANK)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real = column < columns
    if (address != 0) & (tl.program_id(1) * COLUMNS < columns):
        at = tl.load(tile + 1) + tl.arange(0, ROWS)
        used = at < tl.load(tile + 2)
        token = tl.load(tokens + at, mask=used, other=0).to(tl.int64)
        up = tl.multiple_of(address.to(tl.pointer_type(out.dtype.element_ty)), ALIGNED)
        rank = tl.arange(0, RANKS)
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for begin in range(0, ranks, RANKS):
            there = begin + rank < ranks
            near = tl.load(inner + at[:, None] * stride + (first + begin + rank)[None, :],
                           mask=used[:, None] & there[None, :], other=0.0)
            part = tl.load(up + column[None, :] * ranks + (begin + rank)[:, None], mask=real[None, :] & there[:, None],
                           other=0.0)
            total = tl.dot(near.to(DOT), part.to(DOT), total, input_precision="ieee")
        place = out + token[:, None] * outputs + (offset + column)[None, :]
        inside = used[:, None] & real[None, :]
        before = tl.load(place, mask=inside, other=0.0)
        added = total.to(before.dtype).to(tl.float32)
        tl.store(place, (before.to(tl.float32) + added).to(before.dtype), mask=inside)
# fmt: on
