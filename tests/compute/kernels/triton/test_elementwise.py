"""Norms, rotations with the write of keys and values, activations and the embedding in Triton, against torch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.compute.kernels import Activation, HeadNorm, HeadShape, Pages
from headrace.compute.kernels.linear import quantize_rows
from headrace.compute.kernels.triton.backend import TritonKernels
from headrace.compute.model.families import parse_config
from headrace.compute.model.kv import PagedKV
from tests.compute.kernels.pages import CPU, DTYPES, ORACLE, close
from tests.compute.kernels.stacks import make
from tests.compute.model.configs import LLAMA

KERNELS = TritonKernels(CPU)
quick = settings(max_examples=12, derandomize=True)


@quick
@given(rows=st.integers(1, 5), width=st.sampled_from([1, 24, 96, 576, 1030]), dtype=st.sampled_from(DTYPES))
def test_norms(rows: int, width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(rows)
    x, residual = torch.randn(2, rows, width).to(dtype)
    weight = torch.rand(width) + 0.5
    close(KERNELS.rms_norm(x, weight, 1e-5), ORACLE.rms_norm(x, weight, 1e-5), dtype)
    for factors in (weight, None):
        actual = KERNELS.add_rms_norm(x, residual.clone(), factors, 1e-5)
        expected = ORACLE.add_rms_norm(x, residual.clone(), factors, 1e-5)
        for one, other in zip(actual, expected, strict=True):
            assert one.dtype == dtype
            close(one, other, dtype)


@quick
@given(
    rows=st.integers(1, 5),
    width=st.sampled_from([1, 12, 1500]),
    activation=st.sampled_from(["silu", "gelu_tanh", "clamped_swiglu"]),
    dtype=st.sampled_from(DTYPES),
)
def test_gated_activation(rows: int, width: int, activation: Activation, dtype: torch.dtype) -> None:
    torch.manual_seed(width)
    gate_up = torch.randn(rows, 2 * width).to(dtype)
    actual = KERNELS.gated_activation(gate_up, activation)
    close(actual, ORACLE.gated_activation(gate_up.clone(), activation), dtype)


@quick
@given(
    tokens=st.integers(1, 6),
    shape=st.sampled_from([HeadShape(4, 2, 16), HeadShape(3, 3, 80), HeadShape(6, 1, 6)]),
    partial=st.booleans(),
    normed=st.booleans(),
    page_dtype=st.sampled_from([None, torch.int8]),
    dtype=st.sampled_from(DTYPES),
    head_norm=st.sampled_from(["head", "projection", "rotated", "values"]),
    seed=st.integers(0, 100),
)
def test_rope_write_kv(
    tokens: int,
    shape: HeadShape,
    partial: bool,
    normed: bool,
    page_dtype: torch.dtype | None,
    dtype: torch.dtype,
    head_norm: HeadNorm,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    heads, kv_heads, head_dim = shape
    spec = replace(parse_config(LLAMA), num_kv_heads=kv_heads, head_dim=head_dim)
    rotary = head_dim // 2 if partial and head_dim % 4 == 0 else head_dim
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim).to(dtype)
    qkv[0, -head_dim:] = 0
    normed_heads = heads + (2 if head_norm == "values" else 1) * kv_heads
    weight = torch.rand(normed_heads, head_dim) + 0.5 if normed else None
    angles = torch.randn(9, rotary // 2)
    cos, sin = angles.cos(), angles.sin()
    table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1)
    positions = torch.randint(0, 9, (tokens,))
    slots = torch.randperm(12)[:tokens]
    written = []
    for kernels in (KERNELS, ORACLE):
        pages = PagedKV(spec.shape, 3, 4, page_dtype or dtype).layers[0]
        args = (qkv.clone(), shape, table[positions], weight, 1e-6, slots, pages, head_norm)
        written.append((kernels.rope_write_kv(*args), _exact(pages)))
        if kernels is KERNELS:
            gathered = PagedKV(spec.shape, 3, 4, page_dtype or dtype).layers[0]
            args = (qkv.clone(), shape, table, weight, 1e-6, slots, gathered, head_norm)
            assert torch.equal(KERNELS.rope_write_kv(*args, positions=positions), written[0][0])
            assert torch.equal(_exact(gathered), written[0][1])
    (queries, pages_), (expected, wanted) = written
    close(queries, expected, dtype)
    close(pages_, wanted, dtype, least=0.05 if page_dtype == torch.int8 else 0.0)


def test_queries_alone_write_nothing() -> None:
    torch.manual_seed(0)
    qkv, rotation, norm = torch.randn(3, 4 * 16), torch.randn(3, 2, 16), torch.rand(4, 16) + 0.5
    pages = Pages(*torch.zeros(2, 2, 4, 2, 16))
    args = (HeadShape(4, 0, 16), rotation, norm, 1e-6, torch.tensor([1, 2, 6]), pages, "values")
    close(KERNELS.rope_write_kv(qkv, *args), ORACLE.rope_write_kv(qkv.clone(), *args), torch.float32)
    assert not _exact(pages).any()


def _exact(pages: Pages) -> torch.Tensor:
    both = torch.stack((pages.keys.float(), pages.values.float()))
    if pages.key_scales is None or pages.value_scales is None:
        return both
    return both * torch.stack((pages.key_scales, pages.value_scales)).transpose(2, 3)[..., None]


@pytest.mark.parametrize("page_dtype", [torch.float32, torch.int8])
def test_a_token_without_a_slot_is_not_written(page_dtype: torch.dtype) -> None:
    spec = replace(parse_config(LLAMA), num_kv_heads=1, head_dim=16)
    pages = PagedKV(spec.shape, 2, 4, page_dtype).layers[0]
    rotation, slots = torch.ones(2, 2, 16), torch.tensor([-1, 5])
    KERNELS.rope_write_kv(torch.randn(2, 3 * 16), HeadShape(1, 1, 16), rotation, None, 1e-6, slots, pages)
    assert _exact(pages).flatten(1, 2).any(-1).flatten().tolist() == [slot == 5 for slot in range(8)] * 2


def test_fp8_is_written_with_scales() -> None:
    torch.manual_seed(0)
    qkv, scales = torch.randn(2, 3 * 16), torch.zeros(2, 2, 1, 4)
    planes = torch.zeros(2, 2, 4, 1, 16).to(torch.float8_e4m3fn)
    pages = Pages(*planes, *scales)
    rotation = torch.stack((torch.ones(2, 16), torch.zeros(2, 16)), 1)
    KERNELS.rope_write_kv(qkv, HeadShape(1, 1, 16), rotation, None, 1e-6, torch.tensor([1, 6]), pages)
    for plane, given_ in zip(_exact(pages), (qkv[:, 16:32], qkv[:, 32:]), strict=True):
        values, scale = quantize_rows(given_, in_fp8=True)
        torch.testing.assert_close(plane.flatten(0, 1)[[1, 6], 0], values * scale)


@pytest.mark.parametrize("rich", [False, True])
def test_a_table_in_bfloat16_is_read_for_states_in_float32(rich: bool) -> None:
    stack = make(KERNELS, torch.float32, rich=rich)
    narrow, tokens = stack.embedding.bfloat16(), torch.tensor([3, 0, 17], dtype=torch.int32)
    for table in (narrow, narrow.float()):
        normed, rows = KERNELS.embed_norm(tokens, replace(stack, embedding=table))
        expected = narrow.float()[tokens.long()] * stack.embedding_scale
        assert torch.equal(rows, expected)
        assert stack.input_norm is not None
        close(normed, ORACLE.rms_norm(expected, stack.input_norm, stack.eps), torch.float32)
