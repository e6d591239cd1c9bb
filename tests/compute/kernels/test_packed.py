from __future__ import annotations

import itertools
import mmap
import struct
from dataclasses import replace
from typing import Literal

import pytest
import torch
from torch import Tensor

from headrace.compute.kernels.cpp import CppKernels
from headrace.compute.kernels.cpp_checks import extension
from headrace.compute.kernels.packed import PackedWeight, WeightMemory, code, narrowed, pack, pack_integers
from tests.compute.kernels.weights import quantized_weight


def test_memory_is_aligned_and_never_given_twice(monkeypatch):
    monkeypatch.setattr("headrace.compute.kernels.packed._CHUNK_BYTES", 1000)
    memory = WeightMemory()
    shapes = [(3, 5), (1, 7), (100, 4), (2, 2), (30, 6)]
    taken = [memory.take(shape, torch.int16).fill_(number) for number, shape in enumerate(shapes)]
    assert [tuple(tensor.shape) for tensor in taken] == shapes
    assert all(tensor.data_ptr() % 64 == 0 for tensor in taken)
    assert [tensor.unique().tolist() for tensor in taken] == [[number] for number in range(len(shapes))]


def test_a_panel_holds_pairs_of_inputs_of_its_outputs_side_by_side():
    weight = torch.arange(24, dtype=torch.bfloat16).view(6, 4)
    packed = pack(weight, 4, WeightMemory())
    pairs = packed.packed.view(torch.bfloat16).view(2, 2, 4, 2)
    assert torch.equal(pairs[0].permute(1, 0, 2).reshape(4, 4), weight[:4])
    assert torch.equal(pairs[1, :, :2].permute(1, 0, 2).reshape(2, 4), weight[4:])
    assert not pairs[1, :, 2:].any()
    assert pack(weight[:, :3], 4, WeightMemory()) is None


def test_integers_are_packed_in_fours_above_their_middle():
    weight = quantized_weight(3, 24, 2, 4, 16, zeros=True)
    packed = pack_integers(weight, 2, WeightMemory())
    values, scales, offsets = packed.parts
    # Two panels; 12 inputs of a group padded to 16, which are two words of eight halves.
    assert values.shape == (2, 4, 2, 4)
    halves = torch.stack((values & 15, values >> 4), 2).permute(0, 3, 1, 2, 4).reshape(4, 2, 16)
    assert torch.equal(halves[:3, :, :12].flatten(1).to(torch.int8) - 8, weight.integers())
    assert torch.equal(scales.transpose(1, 2).reshape(4, 2)[:3], weight.scales)
    assert torch.equal(offsets.transpose(1, 2).reshape(4, 2)[:3], (weight.zeros + 8).to(torch.uint8))


@pytest.mark.parametrize(("bits", "lowest"), [(4, -8), (8, -128)])
def test_zeros_are_packed_as_bytes_above_the_lowest_value(bits: Literal[4, 8], lowest: int) -> None:
    weight = quantized_weight(2, 16, 2, bits, 16)
    zeros = torch.tensor([[lowest, -1], [0, -lowest - 1]], dtype=torch.int8)
    *_, offsets = pack_integers(replace(weight, zeros=zeros), 2, WeightMemory()).parts
    assert offsets.dtype == torch.uint8
    assert offsets[0].T.tolist() == [[0, -lowest - 1], [-lowest, -2 * lowest - 1]]
    with pytest.raises(ValueError, match="do not fit each other"):
        pack_integers(replace(weight, zeros=zeros.float()), 2, WeightMemory())


def test_packed_integers_take_as_many_bytes_as_the_weight() -> None:
    weight = quantized_weight(64, 1024, 8, 4, 16, zeros=True)
    packed = pack_integers(weight, 64, WeightMemory())
    assert sum(part.nbytes for part in packed.parts) == weight.nbytes == 64 * 1024 // 128 * (64 + 4 + 1)


@pytest.mark.parametrize("consume", [False, True])
def test_pieces_make_the_same_as_the_whole(monkeypatch: pytest.MonkeyPatch, consume: bool) -> None:
    plain, quantized = torch.randn(70, 2048), [quantized_weight(70, 96, 4, bits, 16) for bits in (4, 8)]
    whole = pack(plain, 16, WeightMemory()), *(pack_integers(each, 16, WeightMemory()) for each in quantized)
    monkeypatch.setattr("headrace.compute.kernels.packed._PIECE_BYTES", 1)
    first, *others = whole
    pieces = pack(plain, 16, WeightMemory(), consume=consume)
    assert first is not None
    assert pieces is not None
    assert torch.equal(first.packed, pieces.packed)
    for each, other in zip(quantized, others, strict=True):
        packed = pack_integers(each, 16, WeightMemory(), consume=consume)
        assert packed.parts[0].shape == other.parts[0].shape
        assert all(map(torch.equal, packed.parts, other.parts))


def test_a_weight_that_shares_its_memory_is_not_freed() -> None:
    table = torch.ones(4096, 64)
    packed = pack(table[:2048], 16, WeightMemory(), consume=True)
    assert packed is not None
    assert packed.packed.all()
    assert table.all()
    assert pack(table, 16, WeightMemory(), consume=True) is not None
    if hasattr(mmap, "MADV_DONTNEED"):
        assert not table[1024:3072].any()


CODED = [level for level in CppKernels().levels if CppKernels(level).coded]
"""The levels of this processor with coded weights."""


@pytest.fixture(params=CODED)
def kernels(request: pytest.FixtureRequest) -> CppKernels:
    return CppKernels(request.param)


def test_coded_weights_take_three_quarters_and_lose_nothing(kernels: CppKernels) -> None:
    weight = torch.randn(130, 1026).bfloat16()
    weight[0, 0], weight[129, 1], weight[64, 1025] = 2.0**100, -0.0, torch.inf
    coded = coded_weight(kernels, weight)
    assert coded.codes is not None
    assert torch.equal(decoded(coded).view(torch.int16), weight.view(torch.int16))
    panels = -(-130 // coded.panel)
    assert coded.packed.nbytes == panels * coded.panel * 3 * 1026 // 2
    assert coded.saved == weight.nbytes - coded.packed.nbytes - coded.codes.nbytes
    whole = coded_weight(kernels, torch.randn(128, 1024).bfloat16())
    assert 0.249 < whole.saved / (128 * 1024 * 2) < 0.25


def test_pieces_of_a_coded_weight_continue_its_list(
    kernels: CppKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.randn(300, 512).bfloat16()
    weight[::70, 3], weight[::50, 511] = 2.0**60, -(2.0**-60)
    before = weight.clone()
    monkeypatch.setattr("headrace.compute.kernels.packed._PIECE_BYTES", 1)
    coded = coded_weight(kernels, weight, consume=True)
    assert torch.equal(decoded(coded), before)


@pytest.mark.parametrize(
    "weight", [torch.randn(8, 64), torch.randn(8, 63).bfloat16(), torch.empty(0, 8).bfloat16()]
)
def test_only_an_even_number_of_inputs_in_bfloat16_is_coded(kernels: CppKernels, weight: Tensor) -> None:
    assert in_codes(kernels, weight) is None


def test_a_weight_of_many_exponents_is_not_coded(kernels: CppKernels) -> None:
    elements = torch.randint(0, 0x7F80, (64, 256), dtype=torch.int16).view(torch.bfloat16)
    assert in_codes(kernels, elements) is None


def test_elements_that_bfloat16_holds_are_kept_in_it() -> None:
    weight = torch.randn(70, 4096).bfloat16()
    weight[0, :5] = torch.tensor([torch.inf, -torch.inf, torch.nan, -0.0, 2.0**-133])
    wide = weight.float()
    narrow = narrowed(extension(), wide, consume=True)
    assert narrow is not None
    assert torch.equal(narrow.view(torch.int16), weight.view(torch.int16))
    if hasattr(mmap, "MADV_DONTNEED"):
        assert not wide[10:60].any()


@pytest.mark.parametrize("at", [0, 70 * 4096 - 1])
def test_one_element_that_bfloat16_does_not_hold_keeps_the_weight_as_it_is(at: int) -> None:
    weight = torch.ones(70 * 4096)
    weight[at] = 1 + 2**-8
    assert narrowed(extension(), weight.view(70, 4096), consume=True) is None
    assert weight.all()


@pytest.mark.parametrize("weight", [torch.ones(8, 63), torch.ones(8, 64).bfloat16(), torch.empty(0, 8)])
def test_only_an_even_number_of_inputs_in_float32_is_narrowed(weight: Tensor) -> None:
    assert narrowed(extension(), weight) is None


def in_codes(kernels: CppKernels, weight: Tensor, *, consume: bool = False) -> PackedWeight | None:
    return code(kernels._cpu, kernels._level, weight, kernels._panel, WeightMemory(), consume=consume)


def coded_weight(kernels: CppKernels, weight: Tensor, *, consume: bool = False) -> PackedWeight:
    coded = in_codes(kernels, weight, consume=consume)
    assert coded is not None
    return coded


def decoded(weight: PackedWeight) -> Tensor:
    """The weight [outputs, inputs] again, as csrc/coded.h describes its rows: of lanes of two vectors."""
    assert weight.codes is not None
    panels, depth, _ = weight.packed.shape
    size = weight.panel
    both, rest = weight.packed[..., :size], weight.packed[..., size:].int()
    exponents = weight.codes[:16].int()[torch.cat((both & 15, both >> 4), -1).long()]
    lanes = 4 if size == 64 else 2  # of a register
    bits = ((rest >> 7 << 15) | exponents << 7 | rest & 127).view(panels, depth, -1, lanes, 2, 8)
    elements = bits.transpose(3, 4).reshape(panels, depth, 2 * size)
    begins = weight.codes[16 : 16 + 4 * (panels + 1)].view(torch.int32).tolist()
    found = weight.codes[16 + 4 * (panels + 1) :].numpy().tobytes()
    for panel, (begin, end) in enumerate(itertools.pairwise(begins)):
        for row, place, element in struct.iter_unpack("<IHH", found[8 * begin : 8 * end]):
            elements[panel, row, place] = element
    pairs = elements.view(panels, depth, size, 2).transpose(1, 2).reshape(panels * size, 2 * depth)
    return pairs[: weight.outputs].to(torch.int16).view(torch.bfloat16)
