"""Paged KV memory: keys and values of all layers in blocks, allocated once.

`core` decides which request owns a block and when it moves. Kernels write and read single layers, the runner executes a
plan's moves, and `mover` copies whole blocks to and from other tiers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.compute.device import clear_memory, huge_memory, populate
from headrace.compute.kernels import HeadShape, Pages
from headrace.compute.model.shape import LayerGroups, LayerShape, ModelShape
from headrace.compute.transfer import upload

ALIGNMENT = 64
"""In bytes: a cache line, and the widest vector register."""

KV_DTYPES = {"bfloat16": torch.bfloat16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""By the names of ``--kv-cache-dtype``; for other names it is the dtype of the computation."""

SCALE = torch.float32
"""The dtype of the scales of pages in 8 bits."""


def bytes_per_block(
    shape: ModelShape, block_size: int, dtype: torch.dtype, groups: LayerGroups | None = None
) -> int:
    """Bytes of one block over all layers, or those of any of its groups, keys and values: the only formula for sizing
    the pool.
    """

    def layer_bytes(layer: LayerShape) -> int:
        return (1 if layer.latent else 2) * sum(_half_block(layer.heads, block_size, dtype))

    if groups is None:
        return sum(layer_bytes(layer) for layer in shape.layers if layer.shares is None)
    full, limited = shape.layers[groups.first_full], shape.layers[groups.first_limited]
    return max(groups.full * layer_bytes(full), groups.limited * layer_bytes(limited))


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


class _Part(NamedTuple):
    """The pages [layers, 2, num_blocks, ...] of all layers of one shape; [layers, 1, num_blocks, ...] of latents.

    In a block outside of the device, they are the elements from ``begin`` to ``end``. On a CPU, ``bytes`` is a numpy
    view of the same memory: torch's threads, woken to copy one block, would spin on a core that kernels need.
    """

    pages: Tensor
    begin: int
    end: int
    bytes: np.ndarray[tuple[int, ...], np.dtype[np.uint8]] | None

    def block(self, number: int) -> Tensor:
        """One block [layers, 2, ...]."""
        return self.pages[:, :, number]

    def of(self, content: Tensor) -> Tensor:
        """Its part [layers, 2, ...] of the content of a block."""
        shape = self.pages.shape
        return content[self.begin : self.end].view(*shape[:2], *shape[3:])


class PagedKV:
    """Key and value pages: for each distinct shape of layers one tensor [layers, 2, num_blocks, block_size, kv_heads,
    head_dim]. A block has the same number in all of them.

    The kernels decide in which order the elements of a block are stored (`Kernels.layout`). In torch's it is the
    shape's order: gathering blocks by index yields [rows, tokens, heads, head_dim] without a second copy, as paged
    flash attention on CUDA reads it. Moving a block is one operation for each shape, and most models have one.

    In int8 and fp8 a tensor is [layers, 2, num_blocks, bytes]: a block's elements, then its scales [kv_heads,
    block_size]. So moving a block moves its scales too, and a head's scales of one block are adjacent.

    Latents [layers, 1, num_blocks, block_size, 1, features] are keys and values as one: the values of `Pages` are the
    keys.

    A layer that shares the keys and values of an earlier one has the same pages. Outside of the device a block is one
    row of ``block_elements``: those of each tensor after the other.

    With ``groups``, a block is that of any group: the tensor has as many layers as a group, and a layer has the pages
    at its place in them. If layers with a window have another shape, the tensor is [1, 1, num_blocks, elements of a
    block], and the keys and values of a layer are its part of each block.

    Pages start as zeros, so that an uninitialized NaN is never read.
    """

    def __init__(
        self,
        shape: ModelShape,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        groups: LayerGroups | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.dtype = dtype
        self.device = torch.device(device)
        own: dict[tuple[HeadShape, bool], list[int]] = {}  # the layers of each shape, without their queries
        for index, layer in enumerate(shape.layers):
            if layer.shares is None:
                own.setdefault((layer.heads._replace(heads=0), layer.latent), []).append(index)
        self._parts: list[_Part] = []
        self._untouched: list[
            tuple[int, int]
        ] = []  # on a CPU: where each layer's keys or values begin, and their step
        placed: dict[int, Pages] = {}
        if groups is not None and len(own) > 1:
            placed = self._in_one_block(shape, groups)
            own = {}
        for (heads, latent), indices in own.items():
            count = len(indices) if groups is None else groups.full
            part = self._allocate(heads, count, 1 if latent else 2)
            for place, index in enumerate(indices):
                if groups is not None:
                    place = groups.place[index]
                pages = self._layer(part.pages[place], heads)
                placed[index] = pages if groups is None else pages._replace(group=groups.group[index])
        self.layers: tuple[Pages, ...] = tuple(
            placed[index if layer.shares is None else layer.shares]
            for index, layer in enumerate(shape.layers)
        )

    def _in_one_block(self, shape: ModelShape, groups: LayerGroups) -> dict[int, Pages]:
        """The pages of layers of two shapes, each a part of every block."""
        size = bytes_per_block(shape, self.block_size, self.dtype, groups) // self.stored.itemsize
        blocks = self._add((1, 1, self.num_blocks, size)).pages[0, 0]
        placed = {}
        for index, layer in enumerate(shape.layers):
            if layer.shares is None:
                half = sum(_half_block(layer.heads, self.block_size, self.dtype)) // self.stored.itemsize
                own = blocks.narrow(1, 2 * half * groups.place[index], 2 * half)
                pages = self._layer(own.view(-1, 2, half).movedim(1, 0), layer.heads)
                placed[index] = pages._replace(group=groups.group[index])
        return placed

    def _allocate(self, heads: HeadShape, layers: int, kinds: int) -> _Part:
        """The pages of so many layers, with keys and values, or both as one."""
        block: tuple[int, ...] = (self.block_size, heads.kv_heads, heads.head_dim)
        if self.dtype.itemsize == 1:
            block = (sum(_half_block(heads, self.block_size, self.dtype)),)
        return self._add((layers, kinds, self.num_blocks, *block))

    def _add(self, shape: tuple[int, ...]) -> _Part:
        """A further tensor of zeros [layers, kinds, num_blocks, ...]."""
        pages = untouched_zeros(shape, self.stored, self.device)
        begin = self._parts[-1].end if self._parts else 0
        view = None
        if self.device.type == "cpu":
            view = pages.view(torch.uint8).numpy()
            halves = pages.flatten(0, 1).unbind()
            self._untouched += [(half.data_ptr(), half[0].nbytes) for half in halves]
        part = _Part(pages, begin, begin + math.prod(shape) // self.num_blocks, view)
        self._parts.append(part)
        return part

    def _layer(self, pages: Tensor, shape: HeadShape) -> Pages:
        """Views of one layer's keys and values, and of their scales, of its stored blocks [2 or 1, num_blocks, ...]."""
        block = (self.block_size, shape.kv_heads, shape.head_dim)
        flat, each = pages.flatten(2), pages.shape[:2]
        elements = flat[..., : math.prod(block)].view(self.dtype).view(*each, *block)
        begin, scales = _half_block(shape, self.block_size, self.dtype)
        if len(elements) == 1:
            return Pages(kept := elements[0], kept)
        if not scales:
            return Pages(*elements)
        count = self.block_size * shape.kv_heads * SCALE.itemsize
        factors = flat[..., begin : begin + count].view(SCALE).view(*each, shape.kv_heads, self.block_size)
        return Pages(*elements, *factors)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All pages: one tensor for each shape."""
        return tuple(part.pages for part in self._parts)

    @property
    def nbytes(self) -> int:
        return sum(part.pages.nbytes for part in self._parts)

    @property
    def stored(self) -> torch.dtype:
        """The type in which blocks are moved: int8 for all elements of 8 bits, else `dtype`."""
        # Bytes in fp8 are moved as integers, which every operation takes.
        return torch.int8 if self.dtype.itemsize == 1 else self.dtype

    @property
    def block_elements(self) -> int:
        """The elements of one block in all layers, of the dtype `stored`."""
        return self._parts[-1].end

    def populate(self, first: int, end: int) -> bool:
        """Fault in the untouched memory of blocks [first, end); returns whether the system supports it.

        It does not call torch: the calling thread may end with the interpreter, and ending inside torch aborts the
        process.
        """
        return bool(self._untouched) and all(
            populate(begin + first * size, (end - first) * size) for begin, size in self._untouched
        )

    def clear(self) -> None:
        """Make all blocks zeros again, and give their memory back to the system, on a CPU; no step may be in flight."""
        for part in self._parts:
            clear_memory(part.pages)

    def read_blocks(self, blocks: Sequence[int], targets: Sequence[Tensor]) -> None:
        """Copy each block to its target [block_elements], on any device."""
        if self.device.type == "cpu":
            for block, target in zip(blocks, targets, strict=True):
                for part in self._parts:
                    part.of(target).copy_(part.block(block))
            return
        (index,) = upload(self.device, np.array(blocks, dtype=np.int64))
        parts = [part.pages.index_select(2, index).movedim(2, 0).flatten(1) for part in self._parts]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        for target, content in zip(targets, whole, strict=True):
            target.copy_(content, non_blocking=True)

    def copy_out(self, block: int, target: memoryview) -> None:
        """Copy one block's bytes, as `read_blocks` orders them, concurrently with steps; thread-safe.

        The calling code must check whether the block's content changed meanwhile.
        """
        place, size = np.frombuffer(target, dtype=np.uint8), self.stored.itemsize
        for part in self._parts:
            own = place[part.begin * size : part.end * size]
            if part.bytes is not None:
                page = part.bytes[:, :, block]
                np.copyto(own.reshape(page.shape), page)
            else:
                content = part.block(block).contiguous().view(torch.uint8)
                np.copyto(own, content.flatten().cpu().numpy())

    def write_blocks(self, blocks: Sequence[int], contents: Sequence[Tensor]) -> None:
        """Fill distinct blocks with contents [block_elements], from any device."""
        if self.device.type == "cpu":
            for block, content in zip(blocks, contents, strict=True):
                for part in self._parts:
                    part.block(block).copy_(part.of(content))
            return
        whole = torch.empty((len(blocks), self.block_elements), dtype=self.stored, device=self.device)
        for place, content in zip(whole, contents, strict=True):
            place.copy_(content, non_blocking=True)
        (index,) = upload(self.device, np.array(blocks, dtype=np.int64))
        for part in self._parts:
            shape = part.pages.shape
            own = whole[:, part.begin : part.end].view(len(blocks), *shape[:2], *shape[3:])
            part.pages.index_copy_(2, index, own.movedim(0, 2))

    def copy_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy block ``sources[i]`` to block ``targets[i]``, all layers, as if one after the other.

        A GPU does it in two launches for each shape; a CPU copies slices several times faster than it gathers and
        scatters them.
        """
        if len(sources) != len(targets):
            raise ValueError(f"{len(sources)} sources for {len(targets)} targets")
        for part in self._parts:
            self._copy(part, sources, targets)

    def _copy(self, part: _Part, sources: Sequence[int], targets: Sequence[int]) -> None:
        pages = part.pages
        if part.bytes is not None:
            for one, other in zip(sources, targets, strict=True):
                part.bytes[:, :, other] = part.bytes[:, :, one]
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
