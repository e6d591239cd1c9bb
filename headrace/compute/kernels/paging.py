"""The plan of the reference attention: which pages are gathered together, and which keys each query attends to.

Rows of one token are gathered in groups of similar length, so that padding stays small and calls stay few. Longer
rows are processed one by one, in tiles of bounded length, which bounds the memory of a mask. A plan is made once per
step and shared by all layers of the same window.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.compute.batch import Batch

TILE_TOKENS = 512
GROUP_TOKENS = {"cpu": 4096, "cuda": 65536}
"""Tokens gathered at once: on a CPU as many as fit in its cache, on CUDA few and large operations."""


class DecodeGroup(NamedTuple):
    """Rows of one token whose attention is computed together.

    ``rows`` int64 [B] (None: the first ``size`` rows in order), ``pages`` int64 [B * blocks]. A single row is cut
    exactly by ``span``; several rows are padded to the longest and masked, [B, 1, 1, blocks * block_size].
    ``padding`` int64 [P] are the gathered tokens after their row's context, which belong to other sequences. They are
    overwritten, because a weight of zero does not remove a NaN.
    """

    size: int
    rows: Tensor | None
    pages: Tensor
    span: tuple[int, int] | None
    mask: Tensor | None
    padding: Tensor | None


class PrefillTile(NamedTuple):
    """Packed tokens ``[begin, end)`` of one row, its ``pages``, and the ``span`` of their slots that is attended to.

    ``mask`` [Q, L] is added to the scores; None: the lower triangle of a square.
    """

    begin: int
    end: int
    pages: Tensor
    span: tuple[int, int]
    mask: Tensor | None


class AttentionPlan(NamedTuple):
    """All rows of one step, for layers of one window."""

    groups: tuple[DecodeGroup, ...]
    tiles: tuple[PrefillTile, ...]


def plan(batch: Batch, window: int | None, dtype: torch.dtype) -> AttentionPlan:
    """See `Kernels.plan_attention`."""
    groups = tuple(_group(batch, rows, window, dtype) for rows in _similar(batch, window))
    tiles: list[PrefillTile] = []
    begin = batch.decode_rows
    for row in range(batch.decode_rows, len(batch.lengths)):
        tiles += _tiles(batch, row, begin, window, dtype)
        begin += batch.lengths[row]
    return AttentionPlan(groups, tuple(tiles))


def _first_key(position: int, window: int | None) -> int:
    return 0 if window is None else max(0, position + 1 - window)


def _blocks(context: int, window: int | None, block_size: int) -> int:
    """Number of blocks that a row of one token reads."""
    return (context - 1) // block_size + 1 - _first_key(context - 1, window) // block_size


def _seen_end(context: int, window: int | None, block_size: int) -> int:
    """The end of a row's context among its gathered tokens."""
    return context - _first_key(context - 1, window) // block_size * block_size


def _similar(batch: Batch, window: int | None) -> list[list[int]]:
    """Rows of one token, grouped so that none is padded by more than half and a gather stays in cache."""
    blocks = [_blocks(context, window, batch.block_size) for context in batch.contexts[: batch.decode_rows]]
    if not blocks:
        return []
    most = GROUP_TOKENS[batch.tokens.device.type]
    if len(blocks) * max(blocks) * batch.block_size <= most and max(blocks) <= 2 * min(blocks):
        return [list(range(len(blocks)))]
    parts: list[list[int]] = []
    for row in sorted(range(len(blocks)), key=blocks.__getitem__):
        part = parts[-1] if parts else []
        fits = (len(part) + 1) * blocks[row] * batch.block_size <= most
        if part and fits and 2 * blocks[row] <= 3 * blocks[part[0]] + 4:
            part.append(row)
        else:
            parts.append([row])
    return parts


def _group(batch: Batch, rows: list[int], window: int | None, dtype: torch.dtype) -> DecodeGroup:
    size = batch.block_size
    if len(rows) == 1:
        row = rows[0]
        first = _first_key(batch.contexts[row] - 1, window)
        skip = first // size
        pages = batch.block_tables[row, skip : (batch.contexts[row] - 1) // size + 1]
        span = (first - skip * size, batch.contexts[row] - skip * size)
        index = None if row == 0 else torch.arange(row, row + 1, device=pages.device)
        return DecodeGroup(1, index, pages.long(), span, None, None)

    device = batch.block_tables.device
    width = max(_blocks(batch.contexts[row], window, size) for row in rows)
    in_order = rows == list(range(len(rows)))
    index = None if in_order else torch.tensor(rows, device=device)
    context = batch.context_lens[: len(rows)] if index is None else batch.context_lens[index]
    table = batch.block_tables[: len(rows)] if index is None else batch.block_tables[index]
    offsets = torch.arange(width * size, device=device)
    if window is None:
        table = table[:, :width]
        hidden = offsets >= context[:, None]
    else:
        skipped = (context - window).clamp_(min=0) // size
        columns = (skipped[:, None] + offsets[:width]).clamp_(max=table.shape[1] - 1)
        table = table.gather(1, columns.long())
        positions = skipped[:, None] * size + offsets
        hidden = (positions >= context[:, None]) | (positions < context[:, None] - window)
    mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf"))
    ends = np.array([_seen_end(batch.contexts[row], window, size) for row in rows])
    behind = np.flatnonzero(np.arange(width * size) >= ends[:, None])
    padding = torch.from_numpy(behind).to(device) if behind.size else None
    return DecodeGroup(len(rows), index, table.flatten().long(), None, mask[:, None, None], padding)


def _tiles(batch: Batch, row: int, begin: int, window: int | None, dtype: torch.dtype) -> list[PrefillTile]:
    size = batch.block_size
    length, context = batch.lengths[row], batch.contexts[row]
    start = context - length
    table = batch.block_tables[row]
    if start == 0 and (window is None or window >= length):
        pages = table[: (length - 1) // size + 1].long()
        return [PrefillTile(begin, begin + length, pages, (0, length), None)]
    tiles = []
    for offset in range(0, length, TILE_TOKENS):
        count = min(TILE_TOKENS, length - offset)
        position, end = start + offset, start + offset + count
        first = _first_key(position, window)
        skip = first // size
        pages = table[skip : (end - 1) // size + 1].long()
        seen = torch.arange(first, end, device=table.device)
        query = torch.arange(position, end, device=table.device)[:, None]
        hidden = seen > query if window is None else (seen > query) | (seen <= query - window)
        mask = torch.zeros(hidden.shape, dtype=dtype, device=table.device).masked_fill_(hidden, float("-inf"))
        span = (first - skip * size, end - skip * size)
        tiles.append(PrefillTile(begin + offset, begin + offset + count, pages, span, mask))
    return tiles
