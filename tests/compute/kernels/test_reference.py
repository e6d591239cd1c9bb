"""The torch kernels against definitions written out densely, over random shapes."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Literal

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.compute.batch import Batch
from headrace.compute.kernels import (
    HeadShape,
    Kernels,
    KernelsUnavailable,
    Pages,
    check_fp8,
    linear,
    reference,
    select,
)
from headrace.compute.kernels.reference import TorchKernels
from headrace.compute.model.families import parse_config
from headrace.compute.model.kv import PagedKV
from tests.compute.kernels.weights import quantized_weight
from tests.compute.model.configs import LLAMA
from tests.oracle.harness import pack

CPU = torch.device("cpu")
SHAPE = replace(parse_config(LLAMA), num_kv_heads=2, head_dim=8)
KERNELS: Kernels = TorchKernels()


def attention_by_definition(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    joint: bool = False,
) -> Tensor:
    """One row: q [Q, H, D] are the last positions of k, v [L, G, D]; one score at a time."""
    queries, heads, _ = q.shape
    length, groups, _ = k.shape
    out = torch.zeros_like(q)
    for index in range(queries):
        position = length - queries + index
        first = 0 if window is None else max(0, position + 1 - window)
        end = length if joint else position + 1
        for head in range(heads):
            group = head // (heads // groups)
            scores = k[first:end, group] @ q[index, head] * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            out[index, head] = scores.softmax(0) @ v[first:end, group]
    return out


@settings(max_examples=60)
@given(
    shape=st.sampled_from([(4, 4, 8), (4, 2, 8), (6, 1, 16), (3, 3, 4)]),
    block_size=st.sampled_from([1, 4, 16]),
    decodes=st.lists(st.integers(0, 70), max_size=9),
    prefills=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30)), max_size=3),
    window=st.sampled_from([None, 1, 5, 17]),
    softcap=st.sampled_from([None, 3.0]),
    joint=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_attention(
    shape: tuple[int, int, int],
    block_size: int,
    decodes: list[int],
    prefills: list[tuple[int, int]],
    window: int | None,
    softcap: float | None,
    joint: bool,
    seed: int,
) -> None:
    starts = decodes + [start for start, _ in prefills]
    lengths = [1] * len(decodes) + [length for _, length in prefills]
    if not starts:
        return
    heads, groups, size = shape
    torch.manual_seed(seed)
    needed = [-(-(start + length) // block_size) for start, length in zip(starts, lengths, strict=True)]
    blocks = list(range(sum(needed) + 3))
    random.Random(seed).shuffle(blocks)
    tables = [[blocks.pop() for _ in range(count)] for count in needed]
    # What lies behind a row's context is another sequence's, and may be anything.
    keys, values = torch.full((2, sum(needed) + 3, block_size, groups, size), math.nan)
    for table, start, length in zip(tables, starts, lengths, strict=True):
        for pages in (keys, values):
            filled = torch.full((len(table) * block_size, groups, size), math.nan)
            filled[: start + length] = torch.randn(start + length, groups, size)
            pages[table] = filled.view(len(table), block_size, groups, size)
    queries = torch.randn(sum(lengths), heads, size)
    batch = pack([0] * sum(lengths), starts, lengths, tables, [], block_size, CPU)
    flags = [False] * len(decodes) + [joint and row % 2 == 0 for row in range(len(prefills))]
    batch = replace(batch, joint=torch.tensor(flags, dtype=torch.uint8) if joint else None)
    plan = KERNELS.plan_attention(batch, window, torch.float32)
    out = KERNELS.paged_attention(queries, Pages(keys, values), plan, 0.3, softcap).view(-1, heads, size)
    begin = 0
    for table, start, length, both in zip(tables, starts, lengths, flags, strict=True):
        k, v = (pages[table].flatten(0, 1)[: start + length] for pages in (keys, values))
        expected = attention_by_definition(queries[begin : begin + length], k, v, 0.3, window, softcap, both)
        torch.testing.assert_close(out[begin : begin + length], expected, rtol=1e-4, atol=1e-5)
        begin += length


@pytest.mark.parametrize("window", [None, 11])
def test_attention_in_tiles_and_groups_is_the_same(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts, lengths = [30, 3, 90, 31, 8, 9], [1, 1, 1, 1, 50, 33]
    tables = [list(range(row * 40, row * 40 + 40)) for row in range(6)]
    keys, values = torch.randn(2, 240, 4, 2, 8)
    queries = torch.randn(sum(lengths), 4, 8)

    def attend(batch: Batch) -> Tensor:
        plan = KERNELS.plan_attention(batch, window, torch.float32)
        return KERNELS.paged_attention(queries, Pages(keys, values), plan, 0.3, None)

    batch = pack([0] * sum(lengths), starts, lengths, tables, [], 4, CPU)
    whole = attend(batch)
    monkeypatch.setattr(reference, "TILE_TOKENS", 7)
    monkeypatch.setattr(reference, "GROUP_TOKENS", {"cpu": 64})
    torch.testing.assert_close(attend(batch), whole)


def test_decode_groups_are_few_and_hold_every_row_once() -> None:
    contexts = [1, 900, 17, 450, 33, 890, 20, 16]
    tables = [list(range(60))] * len(contexts)
    batch = pack([0] * 8, [c - 1 for c in contexts], [1] * 8, tables, [], 16, CPU)
    groups = reference.plan(batch, None, torch.float32).groups
    rows = [row for group in groups for row in (group.rows.tolist() if group.rows is not None else [0])]
    assert sorted(rows) == list(range(8))
    assert len(groups) <= 4


@pytest.mark.parametrize("partial", [8, 4])
@pytest.mark.parametrize("normed", [False, True])
def test_rope_write_kv(partial: int, normed: bool) -> None:
    torch.manual_seed(0)
    tokens, shape = 5, HeadShape(heads=4, kv_heads=2, head_dim=8)
    qkv = torch.randn(tokens, 8 * 8)
    angles = torch.randn(tokens, partial // 2)
    cos, sin = angles.cos(), angles.sin()
    rotation = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)), 1)
    weight = torch.rand(6, 8) + 0.5 if normed else None
    keys, values = torch.zeros(2, 3, 4, 2, 8)
    slots = torch.tensor([11, 0, 5, 7, 1])
    packed = qkv.clone().view(tokens, 8, 8)
    queries = KERNELS.rope_write_kv(qkv, shape, rotation, weight, 1e-6, slots, Pages(keys, values))

    turned = packed[:, :6].clone()
    if weight is not None:
        turned = turned / (turned.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    pairs = torch.complex(turned[..., : partial // 2], turned[..., partial // 2 : partial])
    pairs = pairs * torch.complex(cos, sin)[:, None]
    turned[..., :partial] = torch.cat((pairs.real, pairs.imag), -1)
    torch.testing.assert_close(queries, turned[:, :4])
    torch.testing.assert_close(keys.flatten(0, 1)[slots], turned[:, 4:])
    torch.testing.assert_close(values.flatten(0, 1)[slots], packed[:, 6:])
    untouched = sorted(set(range(12)) - set(slots.tolist()))
    assert not keys.flatten(0, 1)[untouched].any()


def test_integers_are_within_half_a_step_of_what_was_written() -> None:
    torch.manual_seed(0)
    shape, slots = HeadShape(heads=1, kv_heads=2, head_dim=8), torch.tensor([5, 0, 11])
    qkv, turn = torch.randn(3, 5 * 8), torch.randn(3, 2, 8)
    qkv[1, 8:16] = 0.0  # a head of zeros
    exact, coarse = (PagedKV(SHAPE.shape, 3, 4, dtype).layers[0] for dtype in (torch.float32, torch.int8))
    for pages in (exact, coarse):
        KERNELS.rope_write_kv(qkv.clone(), shape, turn, None, 1e-6, slots, pages)
    block, offset = slots // 4, slots % 4
    for integers, scales, written in (
        (coarse.keys, coarse.key_scales, exact.keys),
        (coarse.values, coarse.value_scales, exact.values),
    ):
        assert scales is not None
        step, wanted = scales[block, :, offset][..., None], written[block, offset]
        torch.testing.assert_close(step[..., 0], wanted.abs().amax(-1) / 127)
        assert ((integers[block, offset] * step - wanted).abs() <= step * 0.5001).all()
        assert (integers[block, offset].abs().amax(-1) == 127 * (step[..., 0] > 0)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms(dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, 7, 32).to(dtype)
    weight = torch.rand(32) + 0.5
    total = x + residual
    normed, summed = KERNELS.add_rms_norm(x, residual.clone(), weight, 1e-5)
    expected = F.rms_norm(total.float(), (32,), weight, 1e-5).to(dtype)
    torch.testing.assert_close(summed, total)
    torch.testing.assert_close(normed, expected)
    torch.testing.assert_close(KERNELS.rms_norm(total, weight, 1e-5), expected)


def test_gated_activation() -> None:
    gate, up = torch.randn(2, 5, 12)
    merged = torch.cat((gate, up), -1)
    torch.testing.assert_close(KERNELS.gated_activation(merged, "silu"), gate * gate.sigmoid() * up)
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    torch.testing.assert_close(
        KERNELS.gated_activation(merged, "gelu_tanh"), gate * (1 + inner.tanh()) / 2 * up
    )
    wide = torch.tensor([[9.0, -9.0, 2.0, 7.5, -8.0, 0.5]])
    gates, others = torch.tensor([7.0, -9.0, 2.0]), torch.tensor([7.0, -7.0, 0.5])
    torch.testing.assert_close(
        KERNELS.gated_activation(wide, "clamped_swiglu")[0],
        gates / (1 + (-1.702 * gates).exp()) * (others + 1),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("outputs", [24, 9000])
def test_linear(dtype: torch.dtype, rows: int, outputs: int) -> None:
    torch.manual_seed(0)
    weight, x, bias = torch.randn(outputs, 128), torch.randn(rows, 128), torch.randn(outputs)
    expected = x.to(dtype).float() @ weight.to(dtype).float().T + bias.to(dtype).float()
    prepared = linear.prepare(weight.to(dtype))
    out = linear.apply(x.to(dtype), prepared, bias.to(dtype))
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=1e-4 if dtype == torch.float32 else 0.1)


def test_a_cpu_without_onednns_bfloat16_keeps_such_a_weight_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    weight, x = torch.randn(24, 128).bfloat16(), torch.randn(5, 128).bfloat16()
    prepared = linear.prepare(weight)
    assert prepared is weight
    torch.testing.assert_close(linear.apply(x, prepared, None), F.linear(x, weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [8, 4])
def test_linear_of_a_quantized_weight(
    bits: Literal[4, 8], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(linear, "_DEQUANTIZED_ELEMENTS", 64 * 10)
    weight = quantized_weight(24, 64, 4, bits, 16, zeros=True, order=True)
    x, bias = torch.randn(5, 64).to(dtype), torch.randn(24).to(dtype)
    out = KERNELS.linear(x, KERNELS.prepare_linear(weight), bias)
    assert out.dtype == dtype
    expected = F.linear(x.float(), weight.dequantized(), bias.float())
    close = {"rtol": 2e-2, "atol": 5e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(out.float(), expected, **close)


def test_activations_of_8_bits_are_rounded_to_a_127th_of_each_tokens_largest() -> None:
    torch.manual_seed(0)
    weight = quantized_weight(24, 64, 4, 8, 8, zeros=True, order=True)
    x = torch.randn(3, 64)
    x[1] = 0
    steps = [row.abs().max().item() / 127 for row in x]
    integers = torch.tensor(
        [
            [round(value / step) if step else 0 for value in row.tolist()]
            for row, step in zip(x, steps, strict=True)
        ]
    )
    assert integers.abs().max() == 127
    exact = (
        integers.double()
        @ weight.dequantized(torch.float64).T
        * torch.tensor(steps, dtype=torch.float64)[:, None]
    )
    out = KERNELS.linear(x, KERNELS.prepare_linear(weight))
    torch.testing.assert_close(out, exact.float(), rtol=1e-5, atol=1e-5)


def test_unknown_kernels_are_refused_by_name() -> None:
    with pytest.raises(KernelsUnavailable, match=r"'tritn' do not exist; use auto or one of: .*torch"):
        select("tritn", CPU)
    assert select("torch", CPU).name == "torch"
    assert select("auto", CPU).name


def test_fp8_is_refused_where_kernels_do_not_compute_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = TorchKernels()
    check_fp8(kernels, "quantization", "int8")
    with pytest.raises(
        KernelsUnavailable, match="--kv-cache-dtype fp8: kernels 'torch' do not compute with fp8"
    ):
        check_fp8(kernels, "kv-cache-dtype", "fp8")
    monkeypatch.setattr(kernels, "fp8", True)
    check_fp8(kernels, "kv-cache-dtype", "fp8")
