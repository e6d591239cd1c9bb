"""Launches of paged attention: which tiles a step has, and the size of a tile.

Rows of few tokens (decoding, drafts to verify) take a small tile, and share the keys of a row between programs if the
rows alone do not fill the device. Longer rows take larger tiles, which tensor cores multiply faster. A plan in which
all rows have one token needs nothing from the host but numbers that its batch fixes, so a graph can replay it. If
groups of such rows begin with the same keys, and these are many, tiles of many rows read them.
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
from headrace.compute.shared_keys import MOST_GROUPS, SHARED_TILE
from headrace.compute.transfer import upload

SHORT_TOKENS = 8
"""Rows of at most so many tokens are decoded: one, or a draft of up to 7 behind it."""
CHUNK_TOKENS = 64
_MOST_SPLITS = 32
_LEAST_KEYS = 256
"""Keys of a row that are worth a program."""
_KINDS = {"decode": (16, 2), "mixed": (32, 4), "prefill": (128, 8)}
"""Lines of a tile, and the warps that compute it."""


_WHOLE_LINES = 64
"""Tiles of so many lines read the keys that all of their queries see without masks, by code of its own."""
_PARTS = 16
"""Parts of a line that are added at once."""


class Shape(NamedTuple):
    """A tile of ``rows`` lines by ``keys`` keys, computed by ``warps``, with ``stages`` of keys in shared memory."""

    rows: int
    keys: int
    warps: int
    stages: int


class Scores(NamedTuple):
    """What becomes of products of queries and keys: see `Kernels.paged_attention`."""

    scale: float
    softcap: float | None
    sinks: Tensor | None


class Tiles(NamedTuple):
    """Tiles of one kind: ``table`` int32 [2 * count] has each one's row and the row's tokens before it.

    Without a table, row ``i`` is tile ``i``. ``splits`` programs share the keys of a tile. With ``prefix`` 1 the tiles
    have tokens of many rows and attend to the keys that these share; with 2 to the others.
    """

    shape: Shape
    table: Tensor | None
    programs: int
    splits: int
    prefix: int = 0


def shape_of(kind: str, group: int, head_dim: int, itemsize: int, target: Target) -> Shape:
    """The tile of a kind of rows that fits the target's shared memory; ``group`` heads of queries share one of keys."""
    width = power(head_dim) * itemsize
    rows, warps = _KINDS[kind]
    keys = 128 if kind == "prefill" else 64
    if width > 256:  # larger tiles do not fit a program's registers
        rows, warps, keys = (64, 4, 32) if kind == "prefill" else (rows, 4, keys)
    rows = max(rows, power(group))
    while keys > 16 and (rows + 2 * keys) * width > target.shared_bytes:
        keys //= 2
    room = (target.shared_bytes - rows * width) // (2 * keys * width)
    return Shape(rows, keys, warps, max(1, min(3, room)))


def _kind(lines: int) -> str:
    """The smallest tile that holds so many lines, or the largest."""
    return next((name for name, (rows, _) in _KINDS.items() if lines <= rows), "prefill")


class AttentionPlan:
    """The rows of a step for layers of one window; the first layer makes its tiles."""

    def __init__(self, batch: Batch, window: int | None, target: Target) -> None:
        self._batch = batch
        self._window = window
        self._target = target
        self._tiles: dict[tuple[int, int, int, int], tuple[Tiles, ...]] = {}

    def attend(self, queries: Tensor, pages: Pages, scores: Scores) -> Tensor:
        """See `Kernels.paged_attention`."""
        tokens, heads, head_dim = queries.shape
        kv_heads = pages.keys.shape[2]
        key = (kv_heads, heads // kv_heads, head_dim, queries.itemsize)
        if key not in self._tiles:
            self._tiles[key] = self._cut(*key)
        out = queries.new_empty((tokens, heads * head_dim))
        cut = self._tiles[key]
        if cut[0].prefix:
            self._cascade(queries, pages, cut, scores, out)
            return out
        for tiles in cut:
            parts = self._parts(out, tokens * heads, tiles.splits, head_dim)
            self._launch(queries, pages, tiles, scores, out, parts, tiles.splits, 0)
            if tiles.splits > 1:
                self._join(queries, pages, tiles, scores, parts, tiles.splits, out)
        return out

    def _cascade(
        self,
        queries: Tensor,
        pages: Pages,
        cut: tuple[Tiles, ...],
        scores: Scores,
        out: Tensor,
    ) -> None:
        """Shared keys for all rows, the other keys for each row, and the sum of all parts."""
        tokens, heads, head_dim = queries.shape
        total = sum(tiles.splits for tiles in cut)
        parts = self._parts(out, tokens * heads, total, head_dim)
        earlier = 0
        for tiles in cut:
            self._launch(queries, pages, tiles, scores, out, parts, total, earlier)
            earlier += tiles.splits
        self._join(queries, pages, cut[-1], scores, parts, total, out)

    def _parts(self, out: Tensor, lines: int, count: int, head_dim: int) -> tuple[Tensor, Tensor]:
        """Memory for ``count`` means and sums of each line; for one, the result itself."""
        if count == 1:
            return out, out
        means = out.new_empty((lines * count * head_dim,), dtype=torch.float32)
        return means, out.new_empty((lines * count,), dtype=torch.float32)

    def _cut(self, kv_heads: int, group: int, head_dim: int, itemsize: int) -> tuple[Tiles, ...]:
        """All rows as tiles, by kind."""
        batch, target, parts = self._batch, self._target, []
        if batch.decode_rows == len(batch.lengths):
            kind = "decode" if batch.most_tokens == 1 else _kind(batch.most_tokens * group)
            shape = shape_of(kind, group, head_dim, itemsize, target)
            count, longest = batch.decode_rows, max(batch.contexts)
            rest = Tiles(shape, None, count, self._splits(longest, count * kv_heads), 2)
            if batch.shared is None or self._window is not None:
                return (rest._replace(prefix=0),)
            tokens = len(batch.tokens)
            shape = shape_of(_kind(tokens * group), group, head_dim, itemsize, target)
            shape = shape._replace(keys=min(shape.keys, SHARED_TILE))
            tiles = -(-tokens // (shape.rows // group))
            # Each group but one may leave a part of a tile, also that of rows that share nothing.
            programs, splits = tiles + MOST_GROUPS - 1, self._splits(longest, tiles * kv_heads)
            return Tiles(shape, None, programs, splits, 1), rest
        lengths = np.array(batch.lengths)
        kinds = np.where(lengths <= SHORT_TOKENS, 0, np.where(lengths <= CHUNK_TOKENS, 1, 2))
        for number, kind in enumerate(_KINDS):
            rows = np.flatnonzero(kinds == number)
            if not rows.size:
                continue
            shape = shape_of(kind, group, head_dim, itemsize, target)
            step = shape.rows // group
            # The last tiles of a row see the most keys: they begin first, so that none of them is left for the end.
            begins = {row: range(0, int(lengths[row]), step)[::-1] for row in rows.tolist()}
            table = [(row, begin) for row, each in begins.items() for begin in each]
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
        scores: Scores,
        out: Tensor,
        parts: tuple[Tensor, Tensor],
        total: int,
        earlier: int,
    ) -> None:
        """One launch; if there are several ``parts``, its results are those after ``earlier`` ones of ``total``."""
        kv_heads = pages.keys.shape[2]
        batch, shape, splits = self._batch, tiles.shape, tiles.splits
        options = {
            "PAGE": pages.keys.shape[1],
            "KEYS": shape.keys,
            "WINDOWED": self._window is not None,
            "CAPPED": scores.softcap is not None,
            "SINKS": scores.sinks is not None,
            "SCALED": pages.key_scales is not None,
            "SPLIT": total > 1,
            "PREFIX": tiles.prefix,
            "GROUPS": MOST_GROUPS,
            "DOT": self._target.dot(queries.dtype),
            "WHOLE": shape.rows >= _WHOLE_LINES and self._window is None and not tiles.prefix,
            "num_warps": shape.warps,
            "num_stages": shape.stages,
        }
        shared = (batch.query_starts,) * 3 if batch.shared is None else batch.shared
        tables = (batch.block_tables, *shared, batch.block_tables.stride(0))
        numbers = (
            scores.scale,
            scores.softcap or 0.0,
            self._window or 0,
            splits,
            total,
            earlier,
        )
        attention.attend[(tiles.programs, kv_heads, splits)](
            queries,
            *(parts if total > 1 else (out, out)),
            *_planes(pages),
            out if scores.sinks is None else scores.sinks,
            *self._rows(tiles),
            *tables,
            *_strides(pages),
            *numbers,
            **_sizes(queries, kv_heads, tiles),
            **options,
        )

    def _join(
        self,
        queries: Tensor,
        pages: Pages,
        tiles: Tiles,
        scores: Scores,
        parts: tuple[Tensor, Tensor],
        total: int,
        out: Tensor,
    ) -> None:
        """Add the ``total`` parts of the lines of ``tiles``."""
        kv_heads = pages.keys.shape[2]
        sizes = _sizes(queries, kv_heads, tiles)
        tokens = tiles.shape.rows // sizes["GROUP"]
        if tiles.table is None:
            tokens = min(tokens, self._batch.most_tokens)
        grid = (tiles.programs, kv_heads, tokens * sizes["GROUP"])
        attention.join[grid](
            *parts,
            out,
            out if scores.sinks is None else scores.sinks,
            *self._rows(tiles),
            total,
            **sizes,
            PARTS=_PARTS,
            SINKS=scores.sinks is not None,
            num_warps=4,
        )

    def _rows(self, tiles: Tiles) -> tuple[Tensor, Tensor, Tensor]:
        table = self._batch.query_starts if tiles.table is None else tiles.table
        return table, self._batch.query_starts, self._batch.context_lens


def _sizes(queries: Tensor, kv_heads: int, tiles: Tiles) -> dict[str, Any]:
    """Constants of both kernels."""
    _, heads, head_dim = queries.shape
    return {
        "KV_HEADS": kv_heads,
        "GROUP": heads // kv_heads,
        "D": head_dim,
        "BLOCK_D": power(head_dim),
        "ROWS": tiles.shape.rows,
        "TABLED": tiles.table is not None,
    }


def _planes(pages: Pages) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys, values and their scales; without scales other tensors, which are not read."""
    if pages.key_scales is None or pages.value_scales is None:
        return pages.keys, pages.values, pages.keys, pages.values
    return pages.keys, pages.values, pages.key_scales, pages.value_scales


def _strides(pages: Pages) -> tuple[int, int]:
    """Elements from block to block, of keys and of their scales."""
    return pages.keys.stride(0), 0 if pages.key_scales is None else pages.key_scales.stride(0)
