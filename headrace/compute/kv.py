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
from headrace.compute.kernels import Pages
from headrace.compute.model.spec import DecoderSpec
from headrace.compute.transfer import upload

ALIGNMENT = 64
"""In bytes: a cache line, and the widest vector register."""

KV_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""By the names of ``--kv-cache-dtype``; for other names it is the dtype of the computation."""

SCALE = torch.float32
"""The dtype of the scales of pages in 8 bits."""


def bytes_per_block(spec: DecoderSpec, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block over all layers, keys and values: the only formula for sizing the pool."""
    return 2 * spec.num_layers * sum(_half_block(spec, block_size, dtype))


def _half_block(spec: DecoderSpec, block_size: int, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes of the elements and of the scales of a block's keys in one layer; its values take as many.

    Elements of 8 bits have a scale for each token and head. Both parts are then whole cache lines, so that each starts
    at one.
    """
    heads = block_size * spec.num_kv_heads
    elements = heads * spec.head_dim * dtype.itemsize
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

    Pages start as zeros, so that an uninitialized NaN is never read.
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
        heads = (spec.num_kv_heads, spec.head_dim)
        elements, scales = _half_block(spec, block_size, dtype)
        block = (elements + scales,) if scales else (block_size, *heads)
        self.dtype = dtype
        # Bytes in fp8 are moved as integers, which every operation takes.
        stored = torch.int8 if scales else dtype
        self._pages = untouched_zeros((spec.num_layers, 2, num_blocks, *block), stored, torch.device(device))
        self._block_bytes = self._pages[0, 0, 0].nbytes
        on_cpu = self._pages.device.type == "cpu"
        self._parts = [part.data_ptr() for part in self._pages.flatten(0, 1).unbind()] if on_cpu else []
        # A numpy view of the same memory: torch's threads, woken to copy one block, would spin on a core that
        # kernels need.
        self._bytes = self._pages.view(torch.uint8).numpy() if on_cpu else None
        self.layers: tuple[Pages, ...]
        if not scales:
            self.layers = tuple(Pages(layer[0], layer[1]) for layer in self._pages)
            return
        count = block_size * spec.num_kv_heads
        each = self._pages.shape[:3]
        integers = self._pages[..., : count * spec.head_dim].view(dtype).view(*each, block_size, *heads)
        words = self._pages[..., elements : elements + count * SCALE.itemsize].view(SCALE)
        factors = words.view(*each, spec.num_kv_heads, block_size)
        self.layers = tuple(
            Pages(*elements, *scales) for elements, scales in zip(integers, factors, strict=True)
        )

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
        """The shape of one block: [layers, 2, block_size, kv_heads, head_dim], or in 8 bits [layers, 2, bytes]."""
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
