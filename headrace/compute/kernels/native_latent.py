"""Attention over latents in one call of the extension `_cpu`: the arguments of ``latent`` in `csrc/module.cpp`."""

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headrace.compute.kernels.cpp_checks import ALL_KEYS, DTYPES, check_blocks, check_cpu, shown
from headrace.compute.kernels.latent import FewTokens
from headrace.compute.kernels.packed import WeightMemory, pack


class NativeExpansion(NamedTuple):
    """The matrices that expand latents, of each head in panels of ``panel`` columns.

    ``keys`` give ``rank`` features of ``plain`` ones of a query, ``values`` as many as a head has of ``rank``.
    """

    keys: Tensor
    values: Tensor
    heads: int
    plain: int
    rank: int
    value: int
    dtype: torch.dtype
    panel: int


def expansion_of(keys: Tensor, values: Tensor, panel: int, memory: WeightMemory) -> NativeExpansion | None:
    """``keys`` [H, plain, rank] and ``values`` [H, value, rank] for the extension, or None where it has no products."""
    heads, plain, rank = keys.shape
    packed = [_packed(each, panel, memory) for each in (keys.transpose(1, 2), values)]
    if packed[0] is None or packed[1] is None:
        return None
    return NativeExpansion(packed[0], packed[1], heads, plain, rank, values.shape[1], keys.dtype, panel)


def _packed(each: Tensor, panel: int, memory: WeightMemory) -> Tensor | None:
    """Matrices [H, out, in] in panels, one head after the other."""
    heads: list[Tensor] = []
    for matrix in each:
        own = pack(matrix, panel, WeightMemory(1))
        if own is None:
            return None
        heads.append(own.packed)
    return memory.keep(torch.stack(heads))


def attend_natively(
    cpu: Any, level: int, query: Tensor, of: NativeExpansion, pages: Tensor, rows: FewTokens, scale: float
) -> Tensor:
    """See `Kernels.attend_latents`."""
    tokens, heads, width = query.shape
    blocks, size, _, kept = pages.shape
    rotary = width - of.plain
    check_cpu(query, pages, rows.tables)
    if (heads, query.dtype, pages.dtype) != (of.heads, of.dtype, of.dtype) or not scale > 0:
        raise ValueError(f"{shown(query)} and latents {shown(pages)} of {of.heads} heads, scale {scale}")
    if (
        rotary < 0
        or kept != of.rank + rotary
        or pages.stride()[1:] != (kept, kept, 1)
        or sum(rows.lengths) != tokens
    ):
        raise ValueError(
            f"queries {list(query.shape)} and latents {list(pages.shape)} with {of.rank} of rank"
        )
    query, tables = query.contiguous(), rows.tables.to(torch.int32).contiguous()
    starts = torch.tensor([0, *accumulate(rows.lengths)], dtype=torch.int32)
    contexts = torch.tensor(rows.contexts, dtype=torch.int32)
    lines = (starts.data_ptr(), contexts.data_ptr(), tables.data_ptr(), *tables.shape)
    check_blocks(cpu.check_rows(*lines, size, ALL_KEYS, tokens), size, blocks, size)
    out = query.new_empty((tokens, heads, of.value))
    addresses = (each.data_ptr() for each in (query, of.keys, of.values, pages, out))
    sizes = (size, pages.stride(0), heads, of.plain, of.rank, rotary, of.value)
    cpu.latent(level, *addresses, *lines, *sizes, DTYPES[query.dtype], scale)
    return out
