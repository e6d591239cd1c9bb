"""Pages: one formula for their size, and copies that behave as if done one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from headrace.compute.kernels import HeadShape
from headrace.compute.model.families import parse_config
from headrace.compute.model.kv import PagedKV, bytes_per_block
from headrace.compute.model.shape import LayerShape
from tests.compute.model.configs import LLAMA

SPEC = parse_config(LLAMA)
NARROW, ONE, WIDE = HeadShape(8, 4, 16), HeadShape(8, 1, 32), HeadShape(4, 2, 32)
MIXED = replace(
    SPEC.shape,
    layers=(
        LayerShape(NARROW, window=4),
        LayerShape(ONE),
        LayerShape(WIDE),
        LayerShape(NARROW),
        LayerShape(HeadShape(16, 1, 32), shares=1),
    ),
)
"""Layers of three shapes, and one that reads the keys and values of another."""


def numbered(num_blocks: int = 6) -> PagedKV:
    """Pages whose every element tells its layer, its kind and its block."""
    kv = PagedKV(SPEC.shape, num_blocks, 4, torch.float32)
    for layer in range(SPEC.num_layers):
        for block in range(num_blocks):
            kv.layers[layer].keys[block] = 100 * layer + block
            kv.layers[layer].values[block] = 1000 + 100 * layer + block
    return kv


def contents(kv: PagedKV, blocks: Sequence[int]) -> list[torch.Tensor]:
    """Blocks as they are outside of the device."""
    targets = list(torch.empty(len(blocks), kv.block_elements, dtype=kv.stored))
    kv.read_blocks(blocks, targets)
    return targets


def held(kv: PagedKV, layer: int = 0) -> list[int]:
    return [int(block[0, 0, 0]) - 100 * layer for block in kv.layers[layer].keys]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_the_formula_is_what_is_allocated(dtype: torch.dtype) -> None:
    assert PagedKV(SPEC.shape, 10, 4, dtype).nbytes == 10 * bytes_per_block(SPEC.shape, 4, dtype)


def test_pages_start_as_zeros_and_have_the_shape_that_kernels_expect() -> None:
    kv = PagedKV(SPEC.shape, 3, 4, torch.float32)
    assert len(kv.layers) == SPEC.num_layers
    assert kv.layers[0].keys.shape == (3, 4, SPEC.num_kv_heads, SPEC.head_dim)
    assert not any(pages.keys.any() or pages.values.any() for pages in kv.layers)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_elements_of_8_bits_have_scales_that_travel_with_their_block(dtype: torch.dtype) -> None:
    kv = PagedKV(SPEC.shape, 5, 4, dtype)
    assert (kv.dtype, kv.stored) == (dtype, torch.int8)
    for number, pages in enumerate(kv.layers):
        assert pages.key_scales is not None
        assert pages.value_scales is not None
        assert pages.key_scales.shape == (5, SPEC.num_kv_heads, 4)
        pages.keys[1], pages.values[1] = number + 1, number + 2
        pages.key_scales[1], pages.value_scales[1] = number + 3, number + 4
    before = contents(kv, [0, 2, 4])
    assert not any(block.any() for block in before)
    kv.write_blocks([2], contents(kv, [1]))
    kv.copy_blocks([2], [4])
    for number, pages in enumerate(kv.layers):
        for block, held in ((0, 0), (3, 0), (2, number + 1), (4, number + 1)):
            assert (pages.keys[block].float() == held).all()
        assert pages.key_scales is not None
        assert pages.value_scales is not None
        assert (pages.key_scales[4] == number + 3).all()
        assert (pages.value_scales[4] == number + 4).all()
        assert not pages.key_scales[3].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_layers_of_different_heads_have_the_same_blocks(dtype: torch.dtype) -> None:
    kv = PagedKV(MIXED, 5, 4, dtype)
    assert len(kv.tensors) == 3
    assert kv.nbytes == 5 * bytes_per_block(MIXED, 4, dtype)
    assert kv.nbytes == 5 * kv.block_elements * kv.stored.itemsize
    for number, (pages, layer) in enumerate(zip(kv.layers[:4], MIXED.layers, strict=False)):
        assert pages.keys.shape == (5, 4, layer.heads.kv_heads, layer.heads.head_dim)
        pages.keys[1], pages.values[1] = number + 1, number + 2
        if pages.key_scales is not None:
            pages.key_scales[1] = number + 3
    kv.write_blocks([2], contents(kv, [1]))
    kv.copy_blocks([2], [4])
    for number, pages in enumerate(kv.layers[:4]):
        for block, held in ((0, 0), (3, 0), (2, number + 1), (4, number + 1)):
            assert (pages.keys[block] == held).all()
            assert (pages.values[block] == (held + 1 if held else 0)).all()
        assert pages.key_scales is None or (pages.key_scales[4] == number + 3).all()


def test_a_layer_that_shares_has_the_pages_of_the_other_one() -> None:
    kv = PagedKV(MIXED, 2, 4, torch.float32)
    assert kv.layers[4] is kv.layers[1]
    alone = replace(MIXED, layers=MIXED.layers[:4])
    assert bytes_per_block(MIXED, 4, torch.float32) == bytes_per_block(alone, 4, torch.float32)
    assert bytes_per_block(MIXED, 4, torch.float32) == 4 * 4 * MIXED.kv_elements


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_a_copy_for_a_peer_has_the_bytes_of_a_block(dtype: torch.dtype) -> None:
    kv = PagedKV(MIXED, 3, 4, dtype)
    sent = torch.randint(-99, 99, (kv.block_elements,)).to(kv.stored)
    kv.write_blocks([1], [sent])
    target = bytearray(sent.nbytes)
    kv.copy_out(1, memoryview(target))
    assert bytes(target) == sent.view(torch.uint8).numpy().tobytes()


def test_integers_take_half_the_memory_and_a_scale_for_each_head() -> None:
    head = replace(SPEC, num_kv_heads=8, head_dim=128)
    of_bfloat16, of_int8 = (bytes_per_block(head.shape, 16, dtype) for dtype in (torch.bfloat16, torch.int8))
    assert of_int8 == of_bfloat16 // 2 + 2 * head.num_layers * 16 * 8 * 4
    assert of_bfloat16 / of_int8 > 1.9


def test_copies_reach_all_layers_keys_and_values() -> None:
    kv = numbered()
    kv.copy_blocks([1, 1], [4, 5])
    for layer in range(SPEC.num_layers):
        assert held(kv, layer) == [0, 1, 2, 3, 1, 1]
        assert (kv.layers[layer].values[5] == 1001 + 100 * layer).all()


@pytest.mark.parametrize(
    ("sources", "targets", "after"),
    [
        ([], [], [0, 1, 2, 3, 4, 5]),
        ([0, 1], [1, 2], [0, 0, 0, 3, 4, 5]),
        ([1, 0], [2, 1], [0, 0, 1, 3, 4, 5]),
        ([3, 4], [0, 0], [4, 1, 2, 3, 4, 5]),
    ],
)
def test_copies_act_one_after_the_other(sources: list[int], targets: list[int], after: list[int]) -> None:
    kv = numbered()
    kv.copy_blocks(sources, targets)
    assert held(kv) == after


def test_sources_without_targets_are_refused() -> None:
    with pytest.raises(ValueError, match="2 sources for 1 targets"):
        numbered().copy_blocks([1, 2], [3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_clearing_ahead_keeps_what_pages_hold(dtype: torch.dtype) -> None:
    kv = PagedKV(SPEC.shape, 6, 4, dtype)
    for number, pages in enumerate(kv.layers):
        pages.keys[1:4], pages.values[1:4] = number + 1, number + 2
    before = contents(kv, range(6))
    kv.populate(0, 3)
    kv.populate(2, 6)
    assert all(torch.equal(one, other) for one, other in zip(before, contents(kv, range(6)), strict=True))
