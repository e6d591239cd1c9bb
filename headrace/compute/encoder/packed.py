"""A batch of inputs packed without padding, and attention over it.

```
 rows, short ones first   [a b] [c d] [e f g]        lengths (2, 2, 3)
 packed                   [ a b c d e f g ]          groups  2 rows of 2, 1 row of 3
```
Linear layers and norms see all tokens of the batch as one matrix. Attention takes the rows of equal length together,
so that no token of padding is computed and no mask is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.core.embedding import TokenRow

_QUERIES = 512
"""Queries of local attention that are computed at once: more would mostly be masked."""


class Group(NamedTuple):
    """``rows`` rows of equal ``length``, whose first token is at ``start``."""

    start: int
    rows: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.rows * self.length


class Packed(NamedTuple):
    """The tokens of a batch. ``positions`` count from 0 in each row; ``second`` is 1 for tokens of a second text."""

    tokens: Tensor
    positions: Tensor
    second: Tensor
    lengths: tuple[int, ...]
    groups: tuple[Group, ...]

    @property
    def starts(self) -> list[int]:
        """Where each row starts."""
        return [0, *accumulate(self.lengths)][:-1]


def pack(rows: Sequence[TokenRow], device: torch.device) -> Packed:
    """Pack rows, which must be sorted by length."""
    lengths = tuple(len(row.tokens) for row in rows)
    groups: list[Group] = []
    start = 0
    for length, equal in groupby(lengths):
        groups.append(Group(start, len(list(equal)), length))
        start = groups[-1].end
    longest = torch.arange(max(lengths))
    second = [index >= row.second > 0 for row in rows for index in range(len(row.tokens))]
    return Packed(
        torch.tensor([token for row in rows for token in row.tokens], device=device),
        torch.cat([longest[: group.length].repeat(group.rows) for group in groups]).to(device),
        torch.tensor(second, dtype=torch.int64, device=device),
        lengths,
        tuple(groups),
    )


def attend(
    qkv: Tensor, groups: Sequence[Group], bias: Tensor | None = None, reach: int | None = None
) -> Tensor:
    """Attention of each row over itself: packed [T, 3, heads, size] to [T, heads * size].

    ``bias`` [heads, L, L] is added to the scores of a query and a key. ``reach`` is how far to each side a token
    attends.
    """
    out = qkv.new_empty((len(qkv), *qkv.shape[2:]))
    for group in groups:
        rows = qkv[group.start : group.end].view(group.rows, group.length, *qkv.shape[1:])
        query, key, value = rows.permute(2, 0, 3, 1, 4)
        if reach is not None and group.length > reach + 1:
            attended = _local(query, key, value, reach)
        else:
            mask = None if bias is None else bias[None, :, : group.length, : group.length]
            attended = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        out[group.start : group.end].view(group.rows, group.length, *qkv.shape[2:]).copy_(
            attended.transpose(1, 2)
        )
    return out.view(len(qkv), -1)


def _local(query: Tensor, key: Tensor, value: Tensor, reach: int) -> Tensor:
    """Attention to keys at a distance of at most ``reach``; for each part of the queries only the keys in reach."""
    length = query.shape[2]
    parts = []
    for begin in range(0, length, _QUERIES):
        end = min(length, begin + _QUERIES)
        low, high = max(0, begin - reach), min(length, end + reach)
        at = torch.arange(begin, end, device=query.device)[:, None]
        mask = (at - torch.arange(low, high, device=query.device)).abs() <= reach
        keys, values = key[:, :, low:high], value[:, :, low:high]
        parts.append(F.scaled_dot_product_attention(query[:, :, begin:end], keys, values, attn_mask=mask))
    return torch.cat(parts, 2)


def slices(packed: Packed) -> Iterator[slice]:
    """The tokens of each row."""
    for start, length in zip(packed.starts, packed.lengths, strict=True):
        yield slice(start, start + length)
