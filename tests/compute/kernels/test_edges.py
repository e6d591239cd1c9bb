"""What the C++ kernels refuse, and arguments in unusual places: nothing beside them is read or written."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from headrace.compute.kernels import HeadShape, KernelsUnavailable, Pages
from headrace.compute.kernels.cpp import CppKernels
from headrace.compute.kernels.experts import Mlp
from headrace.compute.kernels.packed import PackedWeight
from headrace.compute.kernels.reference import TorchKernels
from headrace.compute.kernels.stack import Linear
from tests.compute.kernels.pages import CPU, ORACLE, close, laid_out
from tests.compute.kernels.weights import quantized_weight
from tests.oracle.harness import pack

try:
    LEVELS = CppKernels().levels
except KernelsUnavailable as reason:
    pytest.skip(str(reason), allow_module_level=True)

pytestmark = pytest.mark.parametrize("level", LEVELS)


def test_linear_layers_refuse_what_does_not_fit(level: str) -> None:
    kernels = CppKernels(level)
    for weight in (torch.randn(8, 16), quantized_weight(8, 16, 1, 8, 8)):
        prepared = kernels.prepare_linear(weight)
        with pytest.raises(ValueError, match=r"\[2, 12\] by \[8, 16\]"):
            kernels.linear(torch.randn(2, 12), prepared)
        with pytest.raises(ValueError, match=r"by \[8, 16\], bias torch.float32 \[7\]"):
            kernels.linear(torch.randn(2, 16), prepared, torch.randn(7))
    with pytest.raises(ValueError, match=r"linear of torch.bfloat16 by torch.float32"):
        kernels.linear(torch.randn(2, 16).bfloat16(), kernels.prepare_linear(torch.randn(8, 16)))


def test_an_mlp_refuses_what_does_not_fit(level: str) -> None:
    kernels = CppKernels(level)
    shapes = ((128, 16), (16, 64), (8, 64), (96, 16))
    first, last, narrow, short = (
        Linear(kernels.prepare_linear(torch.randn(shape)), None) for shape in shapes
    )
    for of, x in (
        (Mlp(first, last), torch.randn(2, 12)),
        (Mlp(first, narrow), torch.randn(2, 16)),
        (Mlp(short, last), torch.randn(2, 16)),
        (Mlp(first, last), torch.randn(2, 16).bfloat16()),
    ):
        with pytest.raises(ValueError, match="for an MLP of 16, "):
            kernels.mlp(x, of, "silu")
    with pytest.raises(ValueError, match=r"bias or table torch.float32 \[7\]"):
        kernels.mlp(torch.randn(2, 16), Mlp(first, last._replace(bias=torch.randn(7))), "silu")


def test_what_lies_outside_the_pages_is_refused(level: str) -> None:
    kernels = CppKernels(level)
    pages = Pages(*torch.zeros(2, 3, 4, 1, 8))
    for slot in (-1, 12):
        with pytest.raises(IndexError, match=rf"slots\[1\] is {slot}; there are 12"):
            kernels.rope_write_kv(
                torch.zeros(2, 24),
                HeadShape(1, 1, 8),
                torch.zeros(2, 2, 8),
                None,
                1e-6,
                torch.tensor([0, slot]),
                pages,
            )
    batch = pack([0], [5], [1], [[0, 3]], [], 4, CPU)
    plan = kernels.plan_attention(batch, None, torch.float32)
    with pytest.raises(IndexError, match="read block 3, but the pages have 3"):
        kernels.paged_attention(torch.zeros(1, 1, 8), pages, plan, 1.0, None)
    with pytest.raises(IndexError, match="row 0 reads block -1"):
        kernels.plan_attention(pack([0], [5], [1], [[0, -1]], [], 4, CPU), None, torch.float32)
    batch = pack([0], [8], [1], [[0, 1, 2]], [], 4, CPU)
    with pytest.raises(IndexError, match="context of 9 do not fit 2 blocks of 4"):
        kernels.plan_attention(replace(batch, block_tables=batch.block_tables[:, :2]), None, torch.float32)


def test_rows_are_those_of_the_batch_and_no_block_is_too_large_to_count(level: str) -> None:
    kernels = CppKernels(level)
    batch = pack([0], [5], [1], [[0, 2**31 - 1]], [], 4, CPU)
    pages, queries = Pages(*torch.zeros(2, 3, 4, 1, 8)), torch.zeros(1, 1, 8)
    plan = kernels.plan_attention(batch, None, torch.float32)
    with pytest.raises(IndexError, match="read block 2147483647, but the pages have 3"):
        kernels.paged_attention(queries, pages, plan, 1.0, None)
    batch = pack([0] * 9, [0], [9], [[0, 1, 2]], [], 4, CPU)
    with pytest.raises(IndexError, match="the rows have 9 tokens, the batch has 1"):
        kernels.plan_attention(replace(batch, positions=batch.positions[:1]), None, torch.float32)


def test_where_there_is_nothing_to_do_nothing_is_done(level: str) -> None:
    kernels = CppKernels(level)
    none = torch.empty(0, dtype=torch.int32)
    batch = replace(
        pack([0], [0], [1], [[0]], [], 4, CPU),
        tokens=none,
        positions=none.long(),
        slot_mapping=none.long(),
        query_starts=torch.zeros(1, dtype=torch.int32),
        context_lens=none,
        block_tables=torch.empty(0, 1, dtype=torch.int32),
    )
    plan = kernels.plan_attention(batch, None, torch.float32)
    out = kernels.paged_attention(torch.empty(0, 1, 8), Pages(*torch.zeros(2, 3, 4, 1, 8)), plan, 1.0, None)
    assert out.shape == (0, 8)


def test_arguments_may_lie_in_memory_in_any_way(level: str) -> None:
    """Or are refused; nothing beside them is read."""
    kernels = CppKernels(level)
    x, weight = torch.rand(3, 64), torch.rand(16, 64)
    wide = torch.full((1,), 2.0).expand(64)
    close(kernels.rms_norm(x, wide, 1e-6), ORACLE.rms_norm(x, wide, 1e-6), x.dtype)
    bias = torch.rand(32)[::2]
    close(kernels.linear(x, kernels.prepare_linear(weight), bias), ORACLE.linear(x, weight, bias), x.dtype)
    with pytest.raises(ValueError, match="of 7 elements"):
        kernels.gated_activation(torch.rand(2, 7), "silu")

    def turned(norm: Tensor | None, shape: HeadShape, by: CppKernels | TorchKernels) -> Tensor:
        pages = Pages(*torch.zeros(2, 3, 4, shape.kv_heads, 8))
        qkv = torch.arange(8.0).repeat(shape.heads + 2 * shape.kv_heads)[None]
        return by.rope_write_kv(qkv, shape, torch.ones(1, 2, 8), norm, 1e-6, torch.tensor([5]), pages)

    shape, norm = HeadShape(1, 1, 8), torch.rand(8).expand(2, 8)
    close(turned(norm, shape, kernels), turned(norm, shape, ORACLE), x.dtype)
    with pytest.raises(ValueError, match="do not fit"):
        turned(norm.bfloat16(), shape, kernels)
    with pytest.raises(ValueError, match="do not fit"):
        turned(None, HeadShape(1, 2, 8), kernels)

    together = pack([0] * 3, [0] * 3, [1] * 3, [[0], [1], [2]], [], 4, CPU)
    apart = replace(
        together,
        query_starts=torch.tensor([0, 9, 1, 9, 2, 9, 3], dtype=torch.int32)[::2],
        context_lens=torch.ones(1, dtype=torch.int32).expand(3),
    )
    pages, queries = laid_out(Pages(*torch.rand(2, 3, 4, 1, 8))), torch.rand(3, 1, 8)
    plans = [kernels.plan_attention(batch, None, torch.float32) for batch in (together, apart)]
    assert torch.equal(*(kernels.paged_attention(queries, pages, plan, 1.0, None) for plan in plans))


def test_weights_that_another_level_prepared_are_refused(level: str) -> None:
    kernels = CppKernels(level)
    own = kernels.prepare_linear(torch.rand(16, 64))
    for other in LEVELS:
        weight = CppKernels(other).prepare_linear(torch.rand(16, 64))
        assert isinstance(own, PackedWeight)
        assert isinstance(weight, PackedWeight)
        if weight.panel == own.panel:
            assert kernels.linear(torch.rand(1, 64), weight).shape == (1, 16)
        else:
            with pytest.raises(ValueError, match="for another level"):
                kernels.linear(torch.rand(1, 64), weight)
