"""The pages: keys and values of all layers, in blocks, allocated once.

Knows nothing of who owns a block or why it moves; `core` decides that. Next on the road: kernels write and read
single layers, the runner executes a plan's moves; `mover` carries whole blocks to other tiers and back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from headrace.compute.model.spec import DecoderSpec

ALIGNMENT = 64
"""Bytes: a cache line, and the widest vector register."""


def bytes_per_block(spec: DecoderSpec, block_size: int, dtype: torch.dtype) -> int:
    """Bytes that one block takes over all layers, keys and values: the one formula for sizing the pool."""
    return 2 * spec.num_layers * block_size * spec.num_kv_heads * spec.head_dim * dtype.itemsize


class PagedKV:
    """Key and value pages, one tensor of shape [layers, 2, num_blocks, block_size, kv_heads, head_dim].

    Tokens come before heads within a block (arXiv:2309.06180 leaves it open). So a token's write is one
    contiguous run, gathering blocks by index yields [rows, tokens, heads, head_dim] with no second copy, it is
    the order that paged flash attention on CUDA reads, and a loop over one head still streams whole cache
    lines (head_dim × 2..4 bytes). One tensor for all layers, so that moving a block is a single operation.

    Pages start as zeros, so that nothing ever reads an uninitialized NaN.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        shape = (spec.num_layers, 2, num_blocks, block_size, spec.num_kv_heads, spec.head_dim)
        self._pages = untouched_zeros(shape, dtype, torch.device(device))
        self.keys: tuple[Tensor, ...] = tuple(layer[0] for layer in self._pages)
        self.values: tuple[Tensor, ...] = tuple(layer[1] for layer in self._pages)

    @property
    def nbytes(self) -> int:
        return self._pages.nbytes

    @property
    def device(self) -> torch.device:
        return self._pages.device

    @property
    def dtype(self) -> torch.dtype:
        return self._pages.dtype

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Of one block: [layers, 2, block_size, kv_heads, head_dim]."""
        return (*self._pages.shape[:2], *self._pages.shape[3:])

    def read_blocks(self, blocks: Sequence[int]) -> Sequence[Tensor]:
        """Each block in `block_shape`: on a CPU as it lies there, elsewhere gathered, so that it can be sent whole."""
        if self.device.type == "cpu":
            return [self._pages[:, :, block] for block in blocks]
        index = torch.tensor(blocks, dtype=torch.int64, device=self.device)
        return self._pages.index_select(2, index).permute(2, 0, 1, 3, 4, 5).contiguous().unbind()

    def write_blocks(self, blocks: Sequence[int], contents: Sequence[Tensor]) -> None:
        """Fill distinct blocks with contents in `block_shape`, of wherever."""
        if self.device.type == "cpu":
            for block, content in zip(blocks, contents, strict=True):
                self._pages[:, :, block].copy_(content)
            return
        whole = torch.empty((len(blocks), *self.block_shape), dtype=self.dtype, device=self.device)
        for place, content in zip(whole, contents, strict=True):
            place.copy_(content, non_blocking=True)
        index = torch.tensor(blocks, dtype=torch.int64, device=self.device)
        self._pages.index_copy_(2, index, whole.permute(1, 2, 0, 3, 4, 5))

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy block ``sources[i]`` to block ``targets[i]``, all layers, as if one after the other."""
        if len(sources) != len(targets):
            raise ValueError(f"{len(sources)} sources for {len(targets)} targets")
        pages = self._pages
        if len(set(targets)) == len(targets) and set(targets).isdisjoint(sources):
            device = pages.device
            source = torch.tensor(sources, dtype=torch.int64, device=device)
            target = torch.tensor(targets, dtype=torch.int64, device=device)
            pages.index_copy_(2, target, pages.index_select(2, source))
        else:
            for one, other in zip(sources, targets, strict=True):
                pages[:, :, other].copy_(pages[:, :, one])


def untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU pages that the operating system clears when they are first touched.

    `torch.zeros` would write gigabytes at start-up, of which a short life may use little.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.zeros(nbytes + ALIGNMENT, dtype=np.uint8)
    begin = -raw.ctypes.data % ALIGNMENT
    return torch.from_numpy(raw[begin : begin + nbytes]).view(dtype).view(shape)
