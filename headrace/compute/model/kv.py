"""Paged KV memory: keys and values of all layers in blocks, allocated once.

`core` decides which request owns a block and when it moves. Kernels write and read single layers, the runner executes a
plan's moves, and `mover` copies whole blocks to and from other tiers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from headrace.compute.device import huge_memory, populate
from headrace.compute.kernels import HeadShape, Pages
from headrace.compute.model.shape import ModelShape
from headrace.compute.transfer import upload

ALIGNMENT = 64
"""In bytes: a cache line, and the widest vector register."""

KV_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""By the names of ``--kv-cache-dtype``; for other names it is the dtype of the computation."""

SCALE = torch.float32
"""The dtype of the scales of pages in 8 bits."""


def bytes_per_block(shape: ModelShape, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers, keys and values: the only formula for sizing the pool."""
    return 2 * shape.num_layers * _widest_half(shape, block_size, dtype)


def _widest_half(shape: ModelShape, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of a block's keys in the layer with the widest; every layer takes as many, for keys and for values."""
    return max(sum(_half_block(layer.heads, block_size, dtype)) for layer in shape.layers)


def _half_block(shape: HeadShape, block_size: int, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes of the elements and of the scales of a block's keys in one layer; its values take as many.

    Elements of 8 bits have a scale for each token and head. Both parts are then whole cache lines, so that each starts
    at one.
    """
    heads = block_size * shape.kv_heads
    elements = heads * shape.head_dim * dtype.itemsize
    if dtype.itemsize > 1:
        return elements, 0
    return -(-elements // ALIGNMENT) * ALIGNMENT, -(-heads * SCALE.itemsize // ALIGNMENT) * ALIGNMENT


class PagedKV:
    """Key and value pages, one tensor of shape [layers, 2, num_blocks, block_size, kv_heads, head_dim].

    The kernels decide in which order the elements of a block are stored (`Kernels.layout`). In torch's it is the
    shape's order: gathering blocks by index yields [rows, tokens, heads, head_dim] without a second copy, as paged
    flash attention on CUDA reads it. One tensor holds all layers, so that moving a block is a single operation.

    In int8 and fp8 the shape is [layers, 2, num_blocks, bytes]: a block's elements, then its scales [kv_heads,
    block_size]. So moving a block moves its scales too, and a head's scales of one block are adjacent.

    If layers have different heads, the shape is [layers, 2, num_blocks, elements] of the widest, and the others use the
    first ones. So moving a block remains a single operation, and only narrow layers waste memory.

    Pages start as zeros, so that an uninitialized NaN is never read.
    """

    def __init__(
        self,
        shape: ModelShape,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        # Bytes in fp8 are moved as integers, which every operation takes.
        stored = torch.int8 if dtype.itemsize == 1 else dtype
        block: tuple[int, ...] = (_widest_half(shape, block_size, dtype) // stored.itemsize,)
        if dtype.itemsize > 1 and len({layer.heads[1:] for layer in shape.layers}) == 1:
            block = (block_size, *shape.heads[1:])
        self._pages = untouched_zeros((shape.num_layers, 2, num_blocks, *block), stored, torch.device(device))
        self._block_bytes = self._pages[0, 0, 0].nbytes
        on_cpu = self._pages.device.type == "cpu"
        self._parts = [part.data_ptr() for part in self._pages.flatten(0, 1).unbind()] if on_cpu else []
        # A numpy view of the same memory: torch's threads, woken to copy one block, would spin on a core that
        # kernels need.
        self._bytes = self._pages.view(torch.uint8).numpy() if on_cpu else None
        self.layers: tuple[Pages, ...] = tuple(
            self._layer(pages, layer.heads) for pages, layer in zip(self._pages, shape.layers, strict=True)
        )

    def _layer(self, pages: Tensor, shape: HeadShape) -> Pages:
        """Views of one layer's keys and values, and of their scales, of its stored blocks [2, num_blocks, ...]."""
        block = (self.block_size, shape.kv_heads, shape.head_dim)
        flat, each = pages.flatten(2), (2, self.num_blocks)
        elements = flat[..., : math.prod(block)].view(self.dtype).view(*each, *block)
        begin, scales = _half_block(shape, self.block_size, self.dtype)
        if not scales:
            return Pages(*elements)
        count = self.block_size * shape.kv_heads * SCALE.itemsize
        factors = flat[..., begin : begin + count].view(SCALE).view(*each, shape.kv_heads, self.block_size)
        return Pages(*elements, *factors)

    @property
    def pages(self) -> Tensor:
        """All pages, as one tensor."""
        return self._pages

    @property
    def nbytes(self) -> int:
        return self._pages.nbytes

    @property
    def device(self) -> torch.device:
        return self._pages.device

    @property
    def stored(self) -> torch.dtype:
        """The type in which blocks are moved: int8 for all elements of 8 bits, else `dtype`."""
        return self._pages.dtype

    @property
    def block_shape(self) -> tuple[int, ...]:
        """The shape of one block: `pages` without its third dimension."""
        return (*self._pages.shape[:2], *self._pages.shape[3:])

    def populate(self, first: int, end: int) -> bool:
        """Fault in the untouched memory of blocks [first, end); returns whether the system supports it.

        It does not call torch: the calling thread may end with the interpreter, and ending inside torch aborts the
        process.
        """
        size = self._block_bytes
        parts = self._parts
        return bool(parts) and all(populate(part + first * size, (end - first) * size) for part in parts)

    def read_blocks(self, blocks: Sequence[int]) -> Sequence[Tensor]:
        """Each block in `block_shape`: on a CPU as a view, elsewhere gathered, so that it can be sent whole."""
        if self.device.type == "cpu":
            return [self._pages[:, :, block] for block in blocks]
        (index,) = upload(self.device, np.array(blocks, dtype=np.int64))
        return self._pages.index_select(2, index).movedim(2, 0).contiguous().unbind()

    def copy_out(self, block: int, target: memoryview) -> None:
        """Copy one block's bytes, in the order of `block_shape`, concurrently with steps; thread-safe.

        The calling code must check whether the block's content changed meanwhile.
        """
        place = np.frombuffer(target, dtype=np.uint8)
        if self._bytes is not None:
            page = self._bytes[:, :, block]
            np.copyto(place.reshape(page.shape), page)
        else:
            np.copyto(place, self._pages[:, :, block].contiguous().view(torch.uint8).flatten().cpu().numpy())

    def write_blocks(self, blocks: Sequence[int], contents: Sequence[Tensor]) -> None:
        """Fill distinct blocks with contents in `block_shape`, from any device."""
        if self.device.type == "cpu":
            for block, content in zip(blocks, contents, strict=True):
                self._pages[:, :, block].copy_(content)
            return
        whole = torch.empty((len(blocks), *self.block_shape), dtype=self.stored, device=self.device)
        for place, content in zip(whole, contents, strict=True):
            place.copy_(content, non_blocking=True)
        (index,) = upload(self.device, np.array(blocks, dtype=np.int64))
        self._pages.index_copy_(2, index, whole.movedim(0, 2))

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy block ``sources[i]`` to block ``targets[i]``, all layers, as if one after the other.

        A GPU does it in two launches; a CPU copies slices several times faster than it gathers and scatters them.
        """
        if len(sources) != len(targets):
            raise ValueError(f"{len(sources)} sources for {len(targets)} targets")
        pages = self._pages
        if self._bytes is not None:
            for one, other in zip(sources, targets, strict=True):
                self._bytes[:, :, other] = self._bytes[:, :, one]
        elif len(set(targets)) == len(targets) and set(targets).isdisjoint(sources):
            source, target = upload(pages.device, np.array(sources), np.array(targets))
            pages.index_copy_(2, target, pages.index_select(2, source))
        else:
            for one, other in zip(sources, targets, strict=True):
                pages[:, :, other].copy_(pages[:, :, one])


def untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU, memory pages that the operating system clears on first use.

    `torch.zeros` would write gigabytes at start-up, of which a short run may use little.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return huge_memory(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)
