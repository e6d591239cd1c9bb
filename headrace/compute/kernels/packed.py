"""Weights in the layout of the C++ linear layers: panels of outputs, side by side.

The layouts are those of `csrc/matrix.h`, `csrc/coded.h` and `csrc/quantized.h`; the width of a panel depends on the
registers of a level.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from headrace.compute.device import discard, huge_memory
from headrace.compute.kernels.screen import Screen, copy_in_bytes
from headrace.compute.quantization.weight import QuantizedWeight

_PLANES = {torch.float32: 3, torch.bfloat16: 2, torch.float16: 2}
_CHUNK_BYTES = 64 << 20
_PIECE_BYTES = 4 << 20
"""Bytes of a weight that are packed at once."""
_NEVER = -1e30
"""The error of outputs that only fill the last panel of a screen: their bound is below all others."""
_COMMON, _UNCOMMON_BYTES, _WORD_BYTES = 16, 8, 3
"""Of coded weights (`csrc/coding.h`): exponents with a code, bytes of an element in the list, and of a coded word."""
_COMMON_SHARE = 2048
"""A weight is coded if at most one of so many elements has another exponent: each costs as much as a row."""
_FP4, _MXFP4 = 5, 6
"""The ``bits`` of `PackedIntegers` whose halves of bytes are codes of fp4 (see csrc/operations.h)."""


class WeightMemory:
    """Memory for packed weights, in huge pages if the system has them.

    A decode step reads all weights once, so pages of 4 KiB would cause many TLB misses. Small weights share chunks,
    of at least ``chunk_bytes`` because a huge page holds several of them.
    """

    def __init__(self, chunk_bytes: int = _CHUNK_BYTES) -> None:
        self._chunk_bytes = chunk_bytes
        self._chunk = torch.empty(0, dtype=torch.uint8)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialized tensor that starts at a multiple of 64 bytes."""
        used = math.prod(shape) * dtype.itemsize
        size = -(-used // 64) * 64
        if size > len(self._chunk):
            self._chunk = huge_memory(max(size, self._chunk_bytes))
        taken, self._chunk = self._chunk[:used], self._chunk[size:]
        return taken.view(dtype).view(shape)

    def keep(self, tensor: Tensor) -> Tensor:
        """A contiguous copy of ``tensor`` in this memory."""
        return self.take(tuple(tensor.shape), tensor.dtype).copy_(tensor)


class PackedWeight(NamedTuple):
    """A weight [outputs, inputs] in panels of ``panel`` columns, for activations of ``dtype``; ``packed`` owns the
    memory at ``address``.

    ``narrow``: its elements are kept in bfloat16, though ``dtype`` is float32. ``screen``: of a head whose likeliest
    outputs are asked for, its copy in 8 bits. ``codes``: what coded words need beside ``packed``, see `code`.
    """

    packed: Tensor
    address: int
    inputs: int
    outputs: int
    dtype: torch.dtype
    panel: int
    narrow: bool = False
    screen: Screen | None = None
    codes: Tensor | None = None

    @property
    def saved(self) -> int:
        """Bytes that a narrow or coded form saves."""
        if self.codes is None and not self.narrow:
            return 0
        held = self.packed.nbytes + (0 if self.codes is None else self.codes.nbytes)
        return self.inputs * self.outputs * self.dtype.itemsize - held

    @property
    def codes_at(self) -> int:
        """The address of the codes, 0 if there are none."""
        return 0 if self.codes is None else self.codes.data_ptr()

    @property
    def weights(self) -> tuple[int, int, bool]:
        """The arguments of the extension that say where and what the weights are: `read_weights` in csrc/module.cpp."""
        return self.address, self.codes_at, self.narrow


class PackedIntegers(NamedTuple):
    """A quantized weight [outputs, inputs] in panels of ``panel`` columns; ``parts`` own the memory at the addresses.

    ``addresses`` are those of values, scales, offsets, minima and order of inputs; 0 means that there is none.
    """

    parts: tuple[Tensor, ...]
    addresses: tuple[int, int, int, int, int]
    inputs: int
    outputs: int
    group_size: int
    bits: int
    activation_bits: int
    panel: int

    def planes(self, dtype: torch.dtype) -> int:
        """Number of bytes per activation of a type, and so byte products per multiplication."""
        return 1 if self.activation_bits == 8 else _PLANES[dtype]


def pack(weight: Tensor, panel: int, memory: WeightMemory, *, consume: bool = False) -> PackedWeight | None:
    """``weight`` [out, in] in panels of ``panel`` outputs, or None for a dtype that the kernels do not support.

    ``consume``: parts of the weight are freed as soon as they are packed, if its memory is all its own.
    """
    outputs, inputs = weight.shape
    if not weight.is_cpu:
        return None
    if weight.dtype == torch.float32:
        words = weight.contiguous()
    elif weight.dtype == torch.bfloat16 and inputs % 2 == 0:
        words = weight.contiguous().view(torch.int32)
    else:
        return None
    packed = memory.take((-(-outputs // panel), words.shape[1], panel), words.dtype)
    for panels, rows in _pieces(words, panel):
        packed[panels] = _panels(rows, panel)
        if consume and _alone(words):
            discard(rows)
    return PackedWeight(packed, packed.data_ptr(), inputs, outputs, weight.dtype, panel)


def narrowed(cpu: Any, weight: Tensor, *, consume: bool = False) -> Tensor | None:
    """``weight`` float32 [out, in] in bfloat16, if that loses nothing: the weights of a checkpoint in bfloat16 that is
    computed in float32. None for others. ``cpu``: the extension. ``consume``: as in `pack`.
    """
    if not weight.is_cpu or weight.dtype != torch.float32 or weight.shape[1] % 2 or not weight.numel():
        return None
    words = weight.contiguous()
    narrow = torch.empty(words.shape, dtype=torch.bfloat16)
    if not cpu.narrow(words.data_ptr(), words.numel(), narrow.data_ptr()):
        return None
    if consume and _alone(words):
        discard(words)
    return narrow


def code(
    cpu: Any, level: int, weight: Tensor, panel: int, memory: WeightMemory, *, consume: bool = False
) -> PackedWeight | None:
    """`pack` in 12 bits an element, without loss: of a weight in bfloat16 whose exponents are nearly all among sixteen.

    None for others. ``cpu``: the extension, with a ``level`` that multiplies them. Rows of panels are uint8 [panels,
    words, 3 * panel] as in `csrc/coded.h`; codes are the exponents, where the list of each panel begins, and the list.
    """
    outputs, inputs = weight.shape
    if not weight.is_cpu or weight.dtype != torch.bfloat16 or inputs % 2 or not weight.numel():
        return None
    words, panels = weight.contiguous().view(torch.int32), -(-outputs // panel)
    counts = torch.zeros(256, dtype=torch.int64)
    cpu.count_exponents(words.data_ptr(), weight.numel(), counts.data_ptr())
    common = counts.argsort(descending=True, stable=True)[:_COMMON]
    uncommon = weight.numel() - int(counts[common].sum())
    if uncommon * _COMMON_SHARE > weight.numel():
        return None
    begins_at, list_at = _COMMON, _COMMON + (panels + 1) * torch.int32.itemsize
    codes = memory.take((list_at + uncommon * _UNCOMMON_BYTES,), torch.uint8)
    codes[:list_at] = 0
    codes[:begins_at] = common.to(torch.uint8)
    coded, at = memory.take((panels, words.shape[1], _WORD_BYTES * panel), torch.uint8), codes.data_ptr()
    for some, rows in _pieces(words, panel):
        piece, to = _panels(rows, panel).contiguous(), coded[some]
        sizes = len(to), words.shape[1], len(rows)
        begins = at + begins_at + some.start * torch.int32.itemsize
        listed = at + list_at if uncommon else 0
        cpu.code(level, piece.data_ptr(), *sizes, at, to.data_ptr(), begins, listed, uncommon)
        if consume and _alone(words):
            discard(rows)
    return PackedWeight(coded, coded.data_ptr(), inputs, outputs, weight.dtype, panel, codes=codes)


def _pieces(rows: Tensor, panel: int) -> Iterator[tuple[slice, Tensor]]:
    """Some panels at a time, and the rows [out, n] that are theirs."""
    step = max(1, _PIECE_BYTES // max(1, panel * rows[:1].nbytes))
    for begin in range(0, -(-len(rows) // panel), step):
        yield slice(begin, begin + step), rows[begin * panel : (begin + step) * panel]


def _alone(tensor: Tensor) -> bool:
    """Whether no other part of the tensor's memory is that of another one."""
    return tensor.untyped_storage().nbytes() == tensor.nbytes


def pack_integers(
    weight: QuantizedWeight, panel: int, memory: WeightMemory, *, consume: bool = False
) -> PackedIntegers:
    """``weight`` in panels of ``panel`` outputs, each group of inputs padded to a multiple of 8 with zeros.

    ``consume``: as in `pack`.
    """
    outputs, inputs = weight.shape
    _check(weight)
    middle = 1 << (weight.bits - 1)
    padded = inputs // weight.group_size * -(-weight.group_size // 8) * 8
    shape = -(-outputs // panel), padded // 8, *(() if weight.bits == 4 else (2,)), panel, 4
    values = memory.take(shape, torch.uint8)
    for panels, rows in _pieces(weight.values, panel):
        values[panels] = _panels_of_values(replace(weight, values=rows), panel)
        if consume and _alone(weight.values):
            discard(rows)
    scales = memory.keep(_panels(weight.scales, panel))
    offsets = None  # zeros above the lowest value, 0 to 255
    if weight.zeros is not None:
        offsets = memory.keep(_panels(weight.zeros.view(torch.uint8) + middle, panel))
    minima = None if weight.minima is None else memory.keep(_panels(weight.minima, panel))
    parts = (values, scales, offsets, minima, weight.order)
    at = [0 if part is None else part.data_ptr() for part in parts]
    return PackedIntegers(
        tuple(part for part in parts if part is not None),
        (at[0], at[1], at[2], at[3], at[4]),
        inputs,
        outputs,
        weight.group_size,
        _form(weight) if weight.fp4 else weight.bits,
        weight.activation_bits,
        panel,
    )


def pack_screen(weight: Tensor, panel: int, memory: WeightMemory) -> Screen | None:
    """The copy of a head [out, in] by which its likeliest outputs are found; None if there is none."""
    copy = copy_in_bytes(weight)
    if copy is None:
        return None
    more = 0, -len(weight) % panel
    errors, norms = functional.pad(copy.errors, more, value=_NEVER), functional.pad(copy.norms, more)
    values, scales = pack_integers(copy.weight, panel, memory, consume=True).parts
    return Screen((values, scales, memory.keep(errors), memory.keep(norms)))


def _panels_of_values(weight: QuantizedWeight, panel: int) -> Tensor:
    """The values above their lowest, in panels: [panels, words, panel, 4], with 8 bits [panels, words, 2, panel, 4]."""
    if weight.fp4:
        unsigned = torch.stack((weight.values & 15, weight.values >> 4), -1)
    elif weight.bits == 4:
        unsigned = (weight.integers() + (1 << (weight.bits - 1))).to(torch.uint8)
    else:
        unsigned = weight.integers() ^ -128
    outputs = len(weight.values)
    grouped = unsigned.view(torch.uint8).view(outputs, -1, weight.group_size)
    values = functional.pad(grouped, (0, -weight.group_size % 8, 0, 0, 0, -outputs % panel))
    values = values.view(-1, panel, values[0].numel() // 8, 2, 4).permute(0, 2, 3, 1, 4)
    return values[:, :, 0] | (values[:, :, 1] << 4) if weight.bits == 4 else values


def _form(weight: QuantizedWeight) -> int:
    """`_MXFP4` if the weight is what csrc/operations.h says of it, else `_FP4`."""
    mantissa, exponent = torch.frexp(weight.scales)
    powers = bool((mantissa == 0.5).all()) and bool(((exponent >= -125) & (exponent <= 120)).all())
    ordered = weight.order is None and weight.group_size % 32 == 0 and weight.activation_bits == 16
    return _MXFP4 if powers and ordered else _FP4


def _check(weight: QuantizedWeight) -> None:
    """Raise ValueError unless the parts have the types and sizes of `QuantizedWeight`: the kernels follow them."""
    outputs, inputs = weight.shape
    groups = weight.scales.shape[-1]
    order = weight.order
    fits = (
        (weight.bits, weight.values.dtype) in ((8, torch.int8), (4, torch.uint8))
        and weight.scales.dtype == torch.float32
        and groups >= 1
        and inputs % groups == 0
        and all(
            part.shape == (outputs, groups)
            for part in (weight.scales, weight.zeros, weight.minima)
            if part is not None
        )
        and not (weight.fp4 and (weight.bits != 4 or weight.zeros is not None or weight.minima is not None))
        and (weight.zeros is None or weight.zeros.dtype == torch.int8)
        and (weight.minima is None or (weight.minima.dtype == torch.float32 and weight.zeros is None))
        and (
            order is None
            or (order.dtype == torch.int64 and order.shape == (inputs,) and order.is_contiguous())
        )
        and all(part.is_cpu for part in weight.tensors())
    )
    if not fits:
        raise ValueError(
            f"parts of a weight [{outputs}, {inputs}] in {weight.bits} bits do not fit each other"
        )
    if order is not None and inputs and not 0 <= int(order.min()) <= int(order.max()) < inputs:
        raise ValueError(f"the order of {inputs} inputs names others")


def _panels(rows: Tensor, panel: int) -> Tensor:
    """Rows [out, n], of words or of groups, as [panels, n, panel], padded with zeros."""
    padded = functional.pad(rows, (0, 0, 0, -len(rows) % panel)) if len(rows) % panel else rows
    return padded.reshape(-1, panel, rows.shape[1]).transpose(1, 2)
