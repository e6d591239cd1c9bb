"""Pages: one formula for their size, and copies that behave as if done one after the other."""

from __future__ import annotations

import pytest
import torch

from headrace.compute.kv import PagedKV, bytes_per_block
from headrace.compute.model.families import parse_config
from tests.compute.model.configs import LLAMA

SPEC = parse_config(LLAMA)


def numbered(num_blocks: int = 6) -> PagedKV:
    """Pages whose every element tells its layer, its kind and its block."""
    kv = PagedKV(SPEC, num_blocks, 4, torch.float32)
    for layer in range(SPEC.num_layers):
        for block in range(num_blocks):
            kv.keys[layer][block] = 100 * layer + block
            kv.values[layer][block] = 1000 + 100 * layer + block
    return kv


def held(kv: PagedKV, layer: int = 0) -> list[int]:
    return [int(block[0, 0, 0]) - 100 * layer for block in kv.keys[layer]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_formula_is_what_is_allocated(dtype: torch.dtype) -> None:
    assert PagedKV(SPEC, 10, 4, dtype).nbytes == 10 * bytes_per_block(SPEC, 4, dtype)


def test_pages_start_as_zeros_and_have_the_shape_that_kernels_expect() -> None:
    kv = PagedKV(SPEC, 3, 4, torch.float32)
    assert len(kv.keys) == len(kv.values) == SPEC.num_layers
    assert kv.keys[0].shape == (3, 4, SPEC.num_kv_heads, SPEC.head_dim)
    assert not any(pages.any() for pages in kv.keys + kv.values)


def test_copies_reach_all_layers_keys_and_values() -> None:
    kv = numbered()
    kv.copy_blocks([1, 1], [4, 5])
    for layer in range(SPEC.num_layers):
        assert held(kv, layer) == [0, 1, 2, 3, 1, 1]
        assert (kv.values[layer][5] == 1001 + 100 * layer).all()


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
