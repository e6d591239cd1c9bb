"""Rows of a step that begin with the same keys: attention on a GPU reads these once for each group of rows.

```
 row  blocks of its table                groups                         rows    keys
  0   a b c d  …                         the first                      0 2 4   4 blocks
  1   e f  …                             the second                     1 3     2 blocks
  2   a b c d  …                         the last: rows that share      5       none
  3   e f  …                             nothing
  4   a b c d  …
  5   a g  …
```
Row 5 begins with `a` too. Whether it belongs to the first group, which would then share one block, is decided by how
many reads of keys are spared.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

MOST_GROUPS = 8
"""Groups of a step, with that of the rows that share nothing. A constant, because graphs are recorded for it."""

MOST_DIVISIONS = 8
"""How often the rows of a group are divided into smaller ones by their further blocks."""

LEAST_SHARED = 256
LEAST_SPARED = 8192
"""Minimum number of saved key reads for which sharing is worth two more launches: an estimate, not measured."""

SHARED_TILE = 64
"""Shared keys are read in whole tiles, of which this is the largest."""

Ints = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
Blocks = np.ndarray[tuple[int, ...], np.dtype[np.int32]]
Small = np.ndarray[tuple[int, ...], np.dtype[np.int32]]


class SharedKeys(NamedTuple):
    """The groups of a packed batch of R rows and T tokens, on its device.

    ``keys`` int32 [R]: how many leading keys of a row are read by its group. ``order`` int32 [T]: the packed tokens,
    group after group. ``groups`` int32 [MOST_GROUPS * 4]: of each group its first place in the order, its number of
    tokens and of keys, and the row in whose block table they are found.
    """

    keys: Tensor
    order: Tensor
    groups: Tensor


class RowGroups(NamedTuple):
    """The groups of R rows on the host: ``keys`` [R] that a row shares, and the number [R] of its ``group``."""

    keys: Ints
    group: Ints

    def arrange(self, owners: Ints, rows: Ints) -> tuple[Small, Small]:
        """``order`` and ``groups`` of `SharedKeys` for packed tokens: the row here that owns each [T], and the row of
        attention that it belongs to [T].
        """
        number = self.group[owners]
        order = np.argsort(number, kind="stable")
        counts = np.bincount(number, minlength=MOST_GROUPS)
        begins = np.cumsum(counts) - counts
        first = order[np.minimum(begins, order.size - 1)]
        keys = np.where(number[first] == np.arange(MOST_GROUPS), self.keys[owners[first]], 0)
        groups = np.stack((begins, counts, keys, rows[first]), 1)
        return order.astype(np.int32), groups.reshape(-1).astype(np.int32)


class _Group(NamedTuple):
    spared: int
    keys: int
    rows: Ints


def find_groups(tables: Blocks, most: Ints, tokens: Ints, block_size: int) -> RowGroups | None:
    """The groups of rows that spare the most reads of keys; None if they are not worth it.

    Args:
        tables: the block tables of R rows [R, W].
        most: how many blocks of each row [R] lie before its first token of the step.
        tokens: of each row [R] in this step.
        block_size: tokens of a block.
    """
    if len(most) < 2 or int(most.max()) * block_size < LEAST_SHARED:
        return None
    found = _divide(tables, most, tokens, block_size, np.arange(len(most)), 0, MOST_DIVISIONS)
    chosen = sorted(found, key=lambda group: -group.spared)[: MOST_GROUPS - 1]
    if not chosen or sum(group.spared for group in chosen) < LEAST_SPARED:
        return None
    keys, number = np.zeros(len(most), dtype=np.int64), np.full(len(most), MOST_GROUPS - 1)
    for place, group in enumerate(chosen):
        keys[group.rows], number[group.rows] = group.keys, place
    return RowGroups(keys, number)


def _divide(
    tables: Blocks, most: Ints, tokens: Ints, block_size: int, rows: Ints, depth: int, divisions: int
) -> list[_Group]:
    """The groups of ``rows``, whose first ``depth`` blocks are the same: all of them, or those that share more."""
    common = depth + shared_blocks(tables[rows, depth:], int(most[rows].min()) - depth)
    keys = common * block_size // SHARED_TILE * SHARED_TILE
    whole = [_Group(keys * (int(tokens[rows].sum()) - 1), keys, rows)] if keys >= LEAST_SHARED else []
    further = rows[most[rows] > common]
    if not divisions or further.size < 2:
        return whole
    _, kinds, counts = np.unique(tables[further, common], return_inverse=True, return_counts=True)
    parts = [
        group
        for kind in np.flatnonzero(counts > 1)
        for group in _divide(
            tables, most, tokens, block_size, further[kinds == kind], common + 1, divisions - 1
        )
    ]
    return max(whole, parts, key=lambda groups: sum(group.spared for group in groups))


def shared_blocks(tables: Blocks, most: int) -> int:
    """Number of leading blocks of ``tables`` [R, W] that are the same in all rows, at most ``most``."""
    if most <= 0 or (tables[:, 0] != tables[0, 0]).any():
        return 0
    different = np.flatnonzero((tables[:, :most] != tables[0, :most]).any(0))
    return int(different[0]) if different.size else most
