"""Launches of paged attention: which tiles a step has, and the size of a tile.

Rows of few tokens (decoding, drafts to verify) take a small tile, and share the keys of a row between programs if the
rows alone do not fill the device. Longer rows take larger tiles, which tensor cores multiply faster. A plan in which
all rows have one token needs nothing from the host but numbers that its batch fixes, so a graph can replay it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.compute.batch import Batch
from headrace.compute.kernels import Pages
from headrace.compute.kernels.triton import attention
from headrace.compute.kernels.triton.target import Target, power
from headrace.compute.transfer import upload

SHORT_TOKENS = 8
"""Rows of at most so many tokens are decoded: one, or a draft of up to 7 behind it."""
CHUNK_TOKENS = 64
_MOST_SPLITS = 32
_LEAST_KEYS = 256
"""Keys of a row that are worth a program."""
_KINDS = {"decode": (16, 4), "mixed": (32, 4), "prefill": (128, 8)}
"""Lines of a tile, and the warps that compute it."""


class Shape(NamedTuple):
    """A tile of ``rows`` lines by ``keys`` keys, computed by ``warps``, with ``stages`` of keys in shared memory."""

    rows: int
    keys: int
    warps: int
    stages: int


class Tiles(NamedTuple):
    """Tiles of one kind: ``table`` int32 [2 * count] has each one's row and the row's tokens before it.

    Without a table, row ``i`` is tile ``i``. ``splits`` programs share the keys of a tile.
    """

    shape: Shape
    table: Tensor | None
    programs: int
    splits: int


def shape_of(kind: str, group: int, head_dim: int, itemsize: int, target: Target) -> Shape:
    """The tile of a kind of rows that fits the target's shared memory; ``group`` heads of queries share one of keys."""
    width = power(head_dim) * itemsize
    rows, warps = _KINDS[kind]
    keys = 64
    if kind == "prefill" and width > 256:
        rows, warps, keys = 64, 4, 32  # larger tiles do not fit a program's registers
    rows = max(rows, power(group))
    while keys > 16 and (rows + 2 * keys) * width > target.shared_bytes:
        keys //= 2
    room = (target.shared_bytes - rows * width) // (2 * keys * width)
    return Shape(rows, keys, warps, max(1, min(3, room)))


class AttentionPlan:
    """The rows of a step for layers of one window; the first layer makes its tiles."""

    def __init__(self, batch: Batch, window: int | None, target: Target) -> None:
        self._batch = batch
        self._window = window
        self._target = target
        self._tiles: dict[tuple[int, int, int, int], tuple[Tiles, ...]] = {}

    def attend(self, queries: Tensor, pages: Pages, scale: float, softcap: float | None) -> Tensor:
        """See `Kernels.paged_attention`."""
        tokens, heads, head_dim = queries.shape
        kv_heads = pages.keys.shape[2]
        key = (kv_heads, heads // kv_heads, head_dim, queries.itemsize)
        if key not in self._tiles:
            self._tiles[key] = self._cut(*key)
        out = queries.new_empty((tokens, heads * head_dim))
        for tiles in self._tiles[key]:
            self._launch(queries, pages, tiles, scale, softcap, out)
        return out

    def _cut(self, kv_heads: int, group: int, head_dim: int, itemsize: int) -> tuple[Tiles, ...]:
        """All rows as tiles, by kind."""
        batch, target, parts = self._batch, self._target, []
        if batch.decode_rows == len(batch.lengths):
            shape = shape_of("decode", group, head_dim, itemsize, target)
            count = batch.decode_rows
            return (Tiles(shape, None, count, self._splits(max(batch.contexts), count * kv_heads)),)
        lengths = np.array(batch.lengths)
        kinds = np.where(lengths <= SHORT_TOKENS, 0, np.where(lengths <= CHUNK_TOKENS, 1, 2))
        for number, kind in enumerate(_KINDS):
            rows = np.flatnonzero(kinds == number)
            if not rows.size:
                continue
            shape = shape_of(kind, group, head_dim, itemsize, target)
            step = shape.rows // group
            table = [(row, begin) for row in rows.tolist() for begin in range(0, int(lengths[row]), step)]
            (flat,) = upload(batch.tokens.device, np.array(table, dtype=np.int32).reshape(-1))
            longest = max(batch.contexts[row] for row in rows.tolist())
            splits = self._splits(longest, len(table) * kv_heads) if kind == "decode" else 1
            parts.append(Tiles(shape, flat, len(table), splits))
        return tuple(parts)

    def _splits(self, longest: int, programs: int) -> int:
        """How many programs share the keys of a tile: a power of two."""
        keys = longest if self._window is None else min(longest, self._window)
        wanted = min(2 * self._target.processors // programs, keys // _LEAST_KEYS, _MOST_SPLITS)
        return 1 << (max(1, wanted).bit_length() - 1)

    def _launch(
        self,
        queries: Tensor,
        pages: Pages,
        tiles: Tiles,
        scale: float,
        softcap: float | None,
        out: Tensor,
    ) -> None:
        tokens, heads, head_dim = queries.shape
        _, page, kv_heads, _ = pages.keys.shape
        batch, shape, splits = self._batch, tiles.shape, tiles.splits
        parts, sums = out, out
        if splits > 1:
            parts = out.new_empty((tokens * heads * splits * head_dim,), dtype=torch.float32)
            sums = out.new_empty((tokens * heads * splits,), dtype=torch.float32)
        sizes: dict[str, Any] = {
            "KV_HEADS": kv_heads,
            "GROUP": heads // kv_heads,
            "D": head_dim,
            "BLOCK_D": power(head_dim),
            "ROWS": shape.rows,
            "TABLED": tiles.table is not None,
        }
        options = {
            "PAGE": page,
            "KEYS": shape.keys,
            "WINDOWED": self._window is not None,
            "CAPPED": softcap is not None,
            "SCALED": pages.key_scales is not None,
            "SPLIT": splits > 1,
            "DOT": self._target.dot(queries.dtype),
            "num_warps": shape.warps,
            "num_stages": shape.stages,
        }
        table = batch.query_starts if tiles.table is None else tiles.table
        rows = (table, batch.query_starts, batch.context_lens)
        tables = (batch.block_tables, batch.block_tables.stride(0))
        numbers = (scale, softcap or 0.0, self._window or 0, splits)
        grid = (tiles.programs, kv_heads, splits)
        attention.attend[grid](
            queries,
            parts,
            sums,
            *_planes(pages),
            *rows,
            *tables,
            *_strides(pages),
            *numbers,
            **sizes,
            **options,
        )
        if splits > 1:
            attention.join[grid[:2]](parts, sums, out, *rows, splits, **sizes, num_warps=4)


def _planes(pages: Pages) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys, values and their scales; without scales other tensors, which are not read."""
    if pages.key_scales is None or pages.value_scales is None:
        return pages.keys, pages.values, pages.keys, pages.values
    return pages.keys, pages.values, pages.key_scales, pages.value_scales


def _strides(pages: Pages) -> tuple[int, int]:
    """Elements from block to block, of keys and of their scales."""
    return pages.keys.stride(0), 0 if pages.key_scales is None else pages.key_scales.stride(0)
