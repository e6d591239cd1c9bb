"""The C++ kernels against the torch kernels, at every instruction-set level that this machine has.

To look for reads and writes outside the arguments, build with AddressSanitizer and run this file:

    CXXFLAGS="-fsanitize=address" LDFLAGS="-fsanitize=address" python setup.py build_ext --inplace --force
    LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libstdc++.so)" ASAN_OPTIONS=detect_leaks=0 \\
        pytest -n0 tests/compute/kernels/test_cpp.py
"""

from __future__ import annotations

import math
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.compute import kernels as backends
from headrace.compute.kernels import Activation, HeadNorm, HeadShape, KernelsUnavailable, Pages, select
from headrace.compute.kernels.cpp import CppKernels
from headrace.compute.kernels.experts import Mlp, mlp
from headrace.compute.kernels.stack import Linear
from headrace.compute.sampling.choice import NOTHING_ALLOWED
from tests.compute.kernels.pages import (
    CPU,
    DTYPES,
    ORACLE,
    close,
    forget_the_rest,
    laid_out,
    pages_of,
    rows_of,
)
from tests.compute.kernels.weights import quantized_weight
from tests.oracle.harness import pack

try:
    LEVELS = CppKernels().levels
except KernelsUnavailable as reason:
    pytest.skip(str(reason), allow_module_level=True)

PAIRED = [torch.bfloat16, torch.int8]
pytestmark = pytest.mark.parametrize("level", LEVELS)
quick = settings(max_examples=25, derandomize=True)


KEPT = [
    *zip(DTYPES, DTYPES, strict=True),
    (torch.bfloat16, torch.int8),
    (torch.float32, torch.int8),
    (torch.float32, torch.bfloat16),
]
"""The dtypes of activations and of the pages beside them."""


def kept_beside(dtype: torch.dtype, page_dtype: torch.dtype | None) -> torch.dtype | None:
    """The dtype of pages, None where it is that of the activations: beside halves there are none in bfloat16."""
    return page_dtype if page_dtype == torch.int8 or dtype == torch.float32 else None


@quick
@given(
    kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 7, 50]),
    head_dim=st.sampled_from([1, 6, 16, 32, 64, 80, 128]),
    block_size=st.sampled_from([1, 4, 16]),
    decodes=st.lists(st.integers(0, 150) | st.integers(0, 1600), max_size=4),
    prefills=st.lists(st.tuples(st.integers(0, 700), st.integers(1, 90)), max_size=2),
    window=st.sampled_from([None, 1, 5, 64, 700]),
    softcap=st.sampled_from([None, 3.0]),
    sunk=st.sampled_from([None, 0.0, 12.0, -200.0]),
    dtype=st.sampled_from(DTYPES),
    page_dtype=st.sampled_from([None, torch.bfloat16, torch.int8]),
    joint=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_attention(
    level: str,
    kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    decodes: list[int],
    prefills: list[tuple[int, int]],
    window: int | None,
    softcap: float | None,
    sunk: float | None,
    dtype: torch.dtype,
    page_dtype: torch.dtype | None,
    joint: bool,
    seed: int,
) -> None:
    starts = decodes + [start for start, _ in prefills]
    lengths = [1] * len(decodes) + [length for _, length in prefills]
    if not starts:
        return
    page_dtype = kept_beside(dtype, page_dtype)
    batch, blocks = rows_of(starts, lengths, block_size, seed)
    if joint:
        flags = [False] * len(decodes) + [row % 2 == 0 for row in range(len(prefills))]
        batch = replace(batch, joint=torch.tensor(flags, dtype=torch.uint8))
    torch.manual_seed(seed)
    pages = pages_of(torch.randn(2, blocks, block_size, kv_heads, head_dim), page_dtype or dtype)
    forget_the_rest(batch, pages)
    queries = torch.randn(sum(lengths), kv_heads * group, head_dim).to(dtype)
    sinks = None if sunk is None else torch.randn(kv_heads * group) + sunk
    scale = head_dim**-0.5
    kernels = CppKernels(level)
    plan = kernels.plan_attention(batch, window, dtype)
    if head_dim % 2 and (page_dtype or dtype) in PAIRED:
        with pytest.raises(ValueError, match=f"with heads of {head_dim} beside"):
            kernels.paged_attention(queries, pages, plan, scale, softcap)
        return
    actual = kernels.paged_attention(queries, laid_out(pages), plan, scale, softcap, sinks)
    exact = ORACLE.plan_attention(batch, window, torch.float32)
    wide = pages if pages.key_scales is not None else Pages(pages.keys.float(), pages.values.float())
    expected = ORACLE.paged_attention(queries.float(), wide, exact, scale, softcap, sinks)
    assert actual.dtype == dtype
    # Beside integers, queries and weights are computed with sixteen bits.
    close(actual, expected, dtype, least=5e-4 if page_dtype == torch.int8 else 0.0)


@pytest.mark.parametrize(("given", "dtype"), KEPT)
@pytest.mark.parametrize("window", [None, 300])
def test_a_query_is_the_same_bit_for_bit_in_any_company(
    level: str, given: torch.dtype, dtype: torch.dtype, window: int | None
) -> None:
    """Whole or in chunks, alone or batched, with one thread or more: the sums run in the same order."""
    kernels = CppKernels(level)
    torch.manual_seed(0)
    length, table = 1200, [list(range(75))]
    pages = pages_of(torch.randn(2, 90, 16, 2, 32), dtype)
    queries = torch.randn(length, 6, 32).to(given)
    sinks = torch.randn(6)

    def attend(begin: int, end: int, others: int = 0) -> Tensor:
        tables = [[80 + row] for row in range(others)] + table
        batch = pack(
            [0] * (others + end - begin),
            [3] * others + [begin],
            [1] * others + [end - begin],
            tables,
            [],
            16,
            CPU,
        )
        plan = kernels.plan_attention(batch, window, dtype)
        rows = torch.cat((queries[:others], queries[begin:end]))
        return kernels.paged_attention(rows, pages, plan, 0.2, None, sinks)[others:]

    whole = attend(0, length)
    assert torch.equal(torch.cat((attend(0, 500), attend(500, 507), attend(507, length))), whole)
    assert torch.equal(attend(length - 1, length), whole[-1:])
    assert torch.equal(attend(length - 1, length, others=9), whole[-1:])
    for count in (1, 2):
        kernels.threads = count
        assert torch.equal(attend(length - 1, length), whole[-1:])


def tree_of_tables(seed: int, rows: int, size: int) -> tuple[list[list[int]], list[int], list[int], int]:
    """Block tables of rows that begin with parts of each other's blocks, starts, lengths, and the number of blocks."""
    draw = random.Random(seed)
    blocks = iter(range(1, 1 << 20))
    common = [[next(blocks) for _ in range(tokens // size)] for tokens in (1536, 700)]
    tables: list[list[int]] = []
    starts, lengths = [], []
    for _ in range(rows):
        whole = draw.choice(common if draw.random() < 0.7 else tables or common)
        table = whole[: draw.choice([len(whole), draw.randint(0, len(whole))])]
        starts.append(len(table) * size + draw.choice([0, draw.randint(0, 700)]))
        lengths.append(draw.choice([1, 1, 1, 2, 5, 40]))
        missing = -(-(starts[-1] + lengths[-1]) // size) - len(table)
        tables.append(table + [next(blocks) for _ in range(missing)])
    return tables, starts, lengths, next(blocks)


@pytest.mark.parametrize(("given", "dtype"), KEPT)
@pytest.mark.parametrize(
    ("window", "size", "heads"), [(None, 16, (3, 2)), (1100, 16, (4, 1)), (None, 12, (2, 1))]
)
def test_rows_that_read_the_same_blocks_are_the_same_bit_for_bit_as_alone(
    level: str,
    given: torch.dtype,
    dtype: torch.dtype,
    window: int | None,
    size: int,
    heads: tuple[int, int],
) -> None:
    """Groups of more rows than a tile has, groups that divide, drafts, chunks, blocks that do not fill a segment."""
    group, kv_heads = heads
    tables, starts, lengths, blocks = tree_of_tables(len(level) + size, 44, size)
    torch.manual_seed(0)
    pages = laid_out(pages_of(torch.randn(2, blocks, size, kv_heads, 32), dtype))
    queries = torch.randn(sum(lengths), kv_heads * group, 32).to(given)
    sinks = torch.randn(kv_heads * group)
    kernels = CppKernels(level)

    def attend(first: int, end: int) -> Tensor:
        batch = pack(
            [0] * sum(lengths[first:end]),
            starts[first:end],
            lengths[first:end],
            tables[first:end],
            [],
            size,
            CPU,
        )
        plan = kernels.plan_attention(batch, window, given)
        begin = sum(lengths[:first])
        own = queries[begin : begin + sum(lengths[first:end])]
        return kernels.paged_attention(own, pages, plan, 0.2, 3.0, sinks)

    alone = torch.cat([attend(row, row + 1) for row in range(len(tables))])
    for count in (1, 2):
        kernels.threads = count
        assert torch.equal(attend(0, len(tables)), alone)


@pytest.mark.parametrize(("given", "dtype"), KEPT)
def test_a_query_of_zeros_takes_the_mean_of_what_it_sees(
    level: str, given: torch.dtype, dtype: torch.dtype
) -> None:
    """Beside integers it has no scale of its own; what it does not see is still left out."""
    torch.manual_seed(0)
    pages = pages_of(torch.randn(2, 10, 16, 1, 32), dtype)
    batch = pack([0] * 150, [0], [150], [list(range(10))], [], 16, CPU)
    forget_the_rest(batch, pages)
    queries = torch.zeros(150, 1, 32, dtype=given)
    kernels = CppKernels(level)
    plan = kernels.plan_attention(batch, 40, queries.dtype)
    values = pages.values.float()
    if pages.value_scales is not None:
        values = values * pages.value_scales.transpose(1, 2).unsqueeze(-1)
    seen = values.flatten(0, 1).squeeze(1)[:150]
    expected = torch.stack([seen[max(0, end - 40) : end].mean(0) for end in range(1, 151)])
    actual = kernels.paged_attention(queries, laid_out(pages), plan, 0.2, None)
    close(actual, expected, queries.dtype, least=5e-4)
    for scale in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match=f"must be positive, got {scale}"):
            kernels.paged_attention(queries, laid_out(pages), plan, scale, None)
    for sinks in (torch.zeros(2), torch.zeros(1, dtype=torch.bfloat16), torch.zeros(1, device="meta")):
        with pytest.raises(ValueError, match="a norm, bias or table"):
            kernels.paged_attention(queries, laid_out(pages), plan, 0.2, None, sinks)


@quick
@given(
    count=st.integers(1, 110),
    inputs=st.sampled_from([1, 2, 33, 64, 1030]),
    outputs=st.sampled_from([1, 16, 64, 131]),
    biased=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
def test_linear(level: str, count: int, inputs: int, outputs: int, biased: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(count)
    kernels = CppKernels(level)
    x, weight = torch.randn(count, inputs).to(dtype), (torch.randn(outputs, inputs) / inputs**0.5).to(dtype)
    bias = torch.randn(outputs).to(dtype) if biased else None
    prepared = kernels.prepare_linear(weight)
    actual = kernels.linear(x, prepared, bias)
    close(
        actual,
        torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float()),
        dtype,
    )
    wide = kernels.logits(x, prepared, bias)
    assert torch.equal(wide.to(dtype), actual)  # the same sums, not rounded
    if not isinstance(prepared, Tensor):
        assert torch.equal(kernels.linear(x[-1:], prepared, bias), actual[-1:])
        assert wide.dtype == torch.float32


@quick
@given(
    count=st.integers(1, 110),
    groups=st.sampled_from([1, 2, 5]),
    group_size=st.sampled_from([2, 12, 32, 130, 520, 1100]),
    outputs=st.sampled_from([1, 16, 64, 131]),
    bits=st.sampled_from([8, 4]),
    activation_bits=st.sampled_from([8, 16]),
    base=st.sampled_from(["middle", "zeros", "minima", "fp4"]),
    order=st.booleans(),
    biased=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
def test_linear_of_quantized_weights(
    level: str,
    count: int,
    groups: int,
    group_size: int,
    outputs: int,
    bits: Literal[4, 8],
    activation_bits: Literal[8, 16],
    base: str,
    order: bool,
    biased: bool,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(count)
    kernels, inputs = CppKernels(level), groups * group_size
    marks = {"zeros": base == "zeros", "minima": base == "minima", "fp4": base == "fp4", "order": order}
    weight = quantized_weight(outputs, inputs, groups, bits, activation_bits, **marks)
    x, bias = torch.randn(count, inputs).to(dtype), torch.randn(outputs).to(dtype) if biased else None
    prepared = kernels.prepare_linear(weight)
    actual = kernels.linear(x, prepared, bias)
    expected = ORACLE.linear(x.float(), ORACLE.prepare_linear(weight), None if bias is None else bias.float())
    assert actual.dtype == dtype
    close(actual, expected, dtype)
    wide = kernels.logits(x, prepared, bias)
    assert wide.dtype == torch.float32
    assert torch.equal(wide.to(dtype), actual)
    assert torch.equal(kernels.linear(x[-1:], prepared, bias), actual[-1:])


@pytest.mark.parametrize("fp4", [False, True])
@pytest.mark.parametrize("inputs", [256, 264])
def test_sums_of_the_largest_products_in_few_bits_have_room(level: str, inputs: int, fp4: bool) -> None:
    """On AVX2 some of them are summed in 16 bits."""
    kernels = CppKernels(level)
    weight = quantized_weight(16, inputs, 1, 4, 8, fp4=fp4)
    largest = replace(weight, values=torch.full_like(weight.values, 0x77))
    x = torch.ones(5, inputs) * torch.tensor([[1.0], [-1.0], [1.0], [-1.0], [0.0]])
    actual = kernels.linear(x, kernels.prepare_linear(largest))
    torch.testing.assert_close(actual, x @ largest.dequantized().T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("outputs", "inputs"), [(64, 32), (130, 96), (70, 2080)])
def test_weights_in_mxfp4_are_multiplied_as_they_are(level: str, outputs: int, inputs: int) -> None:
    """On tiles, pairs of bfloat16 have the very product of the weights written out."""
    torch.manual_seed(inputs)
    kernels = CppKernels(level)
    weight = quantized_weight(outputs, inputs, inputs // 32, 4, 16, fp4=True, powers=True)
    written = weight.dequantized(torch.bfloat16)
    assert torch.equal(written.float(), weight.dequantized())
    prepared, plain = kernels.prepare_linear(weight), kernels.prepare_linear(written)
    bias = torch.randn(outputs).bfloat16()
    for count in (1, 3, 16, 17, 100, 200):
        x = torch.randn(count, inputs).bfloat16()
        actual, expected = kernels.linear(x, prepared, bias), kernels.linear(x, plain, bias)
        if level == "amx":
            assert torch.equal(actual, expected)
            assert torch.equal(kernels.logits(x, prepared), kernels.logits(x, plain))
        close(actual, expected.float(), torch.bfloat16)
        close(kernels.linear(x.float(), prepared), x.float() @ weight.dequantized().T, torch.float32)
        assert torch.equal(kernels.linear(x[-1:], prepared, bias), actual[-1:])
    extreme = replace(weight, scales=torch.full_like(weight.scales, 2.0**-149))  # no pairs of bfloat16
    assert kernels.linear(x, kernels.prepare_linear(extreme)).isfinite().all()


@pytest.mark.parametrize("inputs", [256, 1024, 4096])
@pytest.mark.parametrize("few_bits", [False, True])
def test_however_many_rows_share_a_call_each_meets_every_weight(
    level: str, inputs: int, few_bits: bool
) -> None:
    """So many that they are multiplied in several turns, the last of them shorter."""
    kernels = CppKernels(level)
    plain = torch.randn(130, inputs).bfloat16()
    weight = kernels.prepare_linear(quantized_weight(130, inputs, 1, 8, 8) if few_bits else plain)
    x = torch.randn(461, inputs).bfloat16()
    apart = torch.cat([kernels.linear(part, weight) for part in x.split(50)])
    assert torch.equal(kernels.linear(x, weight), apart)


@pytest.mark.parametrize("outputs", [576, 970])
@pytest.mark.parametrize("few_bits", [False, True])
def test_tasks_that_are_left_over_are_divided_between_threads(
    level: str, outputs: int, few_bits: bool
) -> None:
    """Blocks of rows are even, and no product depends on the thread that computes it."""
    torch.manual_seed(outputs)
    kernels = CppKernels(level)
    plain = torch.randn(outputs, 256).bfloat16()
    weight = kernels.prepare_linear(quantized_weight(outputs, 256, 1, 8, 8) if few_bits else plain)
    x = torch.randn(260, 256).bfloat16()
    kernels.threads = 1
    alone = torch.cat([kernels.linear(row, weight) for row in x.split(1)])
    for threads in (1, 2, 3, 5):
        kernels.threads = threads
        for count in (1, 7, 13, 16, 31, 75, 96, 97, 130, 193, 260):
            assert torch.equal(kernels.linear(x[:count], weight), alone[:count]), (threads, count)


@pytest.mark.parametrize("activation_bits", [8, 16])
@pytest.mark.parametrize("fault", [math.nan, math.inf, -math.inf])
def test_a_quantized_layer_tells_what_is_no_number(
    level: str, fault: float, activation_bits: Literal[8, 16]
) -> None:
    weight = quantized_weight(20, 64, 2, 8, activation_bits)
    x = torch.randn(4, 64)
    x[1, 7], x[2] = fault, 0
    for kernels in (CppKernels(level), ORACLE):
        out = kernels.linear(x, kernels.prepare_linear(weight))
        assert not out[1].isfinite().any()
        assert out[[0, 3]].isfinite().all()
        assert not out[2].any()


@quick
@given(
    heads=st.sampled_from([(1, 1), (4, 2), (3, 3)]),
    head_dim=st.sampled_from([2, 8, 32, 64, 96]),
    partial=st.booleans(),
    normed=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    page_dtype=st.sampled_from([None, torch.bfloat16, torch.int8]),
    block_size=st.sampled_from([1, 3, 4, 16]),
    tokens=st.integers(1, 40),
    rows=st.sampled_from([1, 3, 40]),
    head_norm=st.sampled_from(["head", "projection", "rotated", "values"]),
)
def test_rope_write_kv(
    level: str,
    heads: tuple[int, int],
    head_dim: int,
    partial: bool,
    normed: bool,
    dtype: torch.dtype,
    page_dtype: torch.dtype | None,
    block_size: int,
    tokens: int,
    rows: int,
    head_norm: HeadNorm,
) -> None:
    torch.manual_seed(tokens)
    page_dtype = kept_beside(dtype, page_dtype)
    shape = HeadShape(*heads, head_dim)
    rotary = head_dim // 2 if partial and head_dim % 4 == 0 else head_dim
    qkv = torch.randn(tokens, (heads[0] + 2 * heads[1]) * head_dim).to(dtype)
    rotation = torch.randn(tokens, 2, rotary)
    rows_of_norm = sum(heads) + (heads[1] if head_norm == "values" else 0)
    norm = torch.rand(rows_of_norm, head_dim) + 0.5 if normed else None
    lines = torch.arange(48).roll(-tokens).chunk(rows)  # of tokens that lie side by side
    slots = torch.cat([lines[i] for i in torch.randperm(len(lines))])[:tokens]
    results = []
    for kernels in (CppKernels(level), ORACLE):
        torch.manual_seed(tokens)  # for the scales of what is not written
        pages = pages_of(
            torch.zeros(2, 48 // block_size, block_size, heads[1], head_dim), page_dtype or dtype
        )
        queries = kernels.rope_write_kv(qkv.clone(), shape, rotation, norm, 1e-6, slots, pages, head_norm)
        results.append((queries, pages))
    (queries, written), (expected, pages) = results[0], (results[1][0], laid_out(results[1][1]))
    assert queries.dtype == expected.dtype == dtype
    close(queries, expected, dtype)
    for actual, wanted in zip(written[:2], pages[:2], strict=True):
        if page_dtype == torch.int8:  # a rounding of the activations may take an integer to its neighbour
            assert (actual.int() - wanted.int()).abs().max() <= (1 if dtype == torch.float32 else 3)
        else:
            close(actual, wanted, page_dtype or dtype)
    if page_dtype == torch.int8:
        for actual, wanted in zip(written[2:4], pages[2:4], strict=True):
            close(actual, wanted, dtype)


def test_queries_alone_write_nothing(level: str) -> None:
    torch.manual_seed(0)
    qkv, rotation, norm = torch.randn(3, 4 * 16), torch.randn(3, 2, 16), torch.rand(4, 16) + 0.5
    shape, slots, results = HeadShape(4, 0, 16), torch.tensor([1, 2, 6]), []
    for kernels in (CppKernels(level), ORACLE):
        pages = pages_of(torch.zeros(2, 2, 4, 2, 16), torch.float32)
        queries = kernels.rope_write_kv(qkv.clone(), shape, rotation, norm, 1e-6, slots, pages, "values")
        assert not pages.keys.any()
        assert not pages.values.any()
        results.append(queries)
    close(*results, torch.float32)


@quick
@given(count=st.integers(1, 70), size=st.sampled_from([1, 8, 100, 576]), dtype=st.sampled_from(DTYPES))
def test_norms(level: str, count: int, size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(count)
    kernels = CppKernels(level)
    x, residual = torch.randn(2, count, size).to(dtype)
    weight = torch.rand(size) + 0.5
    close(kernels.rms_norm(x, weight, 1e-5), ORACLE.rms_norm(x, weight, 1e-5), dtype)
    for factors in (weight, None):
        actual = kernels.add_rms_norm(x, residual.clone(), factors, 1e-5)
        expected = ORACLE.add_rms_norm(x, residual.clone(), factors, 1e-5)
        close(actual[0], expected[0], dtype)
        assert torch.equal(actual[1], expected[1])


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "clamped_swiglu"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_activation(level: str, activation: str, dtype: torch.dtype) -> None:
    for size in (1, 8, 704):
        merged = (torch.randn(30, 2 * size) * 4).to(dtype)
        merged[0] = -300.0
        expected = ORACLE.gated_activation(merged.clone(), activation)
        close(CppKernels(level).gated_activation(merged, activation), expected, dtype)


@pytest.mark.parametrize("activation", ["silu", "clamped_swiglu", "squared_relu"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", [24, 192])  # gates that are whole panels, and gates that are not
def test_mlp(level: str, activation: Activation, dtype: torch.dtype, inner: int) -> None:
    """In one call it returns the bits that its parts return one by one."""
    kernels, outputs = CppKernels(level), inner if activation == "squared_relu" else 2 * inner

    def linear(outputs: int, inputs: int, biased: bool) -> Linear:
        bias = torch.randn(outputs).to(dtype) if biased else None
        return Linear(kernels.prepare_linear((torch.randn(outputs, inputs) / 8).to(dtype)), bias)

    for biased in (False, True):
        of = Mlp(linear(outputs, 40, biased), linear(40, inner, biased))
        for count in (0, 1, 16, 100):
            x = torch.randn(count, 40).to(dtype)
            assert torch.equal(kernels.mlp(x, of, activation), mlp(kernels, x, of, activation))


@pytest.mark.parametrize(("activations", "dtype"), KEPT)
@pytest.mark.parametrize("queries", [1, 40])
def test_rows_that_attend_to_a_nan_token_are_nan(
    level: str, activations: torch.dtype, dtype: torch.dtype, queries: int
) -> None:
    """It is not left out in silence. Of integers, which stay numbers, it does not reach who does not see it either."""
    kernels, start, broken = CppKernels(level), 40 - queries, 17
    batch, blocks = rows_of([start], [queries], 16, seed=1)
    pages = pages_of(torch.rand(2, blocks, 16, 2, 32), dtype)
    block, place = batch.block_tables[0, broken // 16], broken % 16
    if pages.key_scales is None or pages.value_scales is None:
        pages.keys[block, place] = pages.values[block, place] = math.nan
    else:
        pages.key_scales[block, :, place] = pages.value_scales[block, :, place] = math.nan
    plan = kernels.plan_attention(batch, None, activations)
    x = torch.rand(queries, 4, 32).to(activations)
    out = kernels.paged_attention(x, laid_out(pages), plan, 0.2, None)
    sees = torch.arange(start, 40) >= broken
    assert out[sees].isnan().all()
    if dtype == torch.int8:
        assert not out[~sees].isnan().any()


def test_kernels_have_as_many_threads_as_are_usable_and_no_fewer_than_one(level: str) -> None:
    kernels = CppKernels(level)
    assert kernels.threads == 3, "what conftest says"
    for count in (0, -1, 2**40):
        with pytest.raises((ValueError, OverflowError)):
            kernels.threads = count


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="loaded libraries are not told here")
def test_the_extension_loads_no_second_openmp_runtime(level: str) -> None:
    """Threads of its own; in a process of its own: other packages of this one's tests bring their own runtime along."""
    program = """
import sys
from pathlib import Path
from headrace.compute.kernels.cpp import CppKernels
CppKernels(sys.argv[1])
names = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
print(sum("libgomp" in name or "libomp" in name for name in names))
"""
    reported = subprocess.run(
        [sys.executable, "-c", program, level], capture_output=True, text=True, check=True
    )
    assert reported.stdout.strip() == "1"


def test_without_the_extension_torch_computes(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "headrace.compute.kernels._cpu", None)
    with pytest.raises(KernelsUnavailable, match=r"C\+\+ kernels of the CPU cannot be loaded .*compiler"):
        select("cpp", CPU)
    assert select("auto", CPU).name == "torch"


@pytest.mark.parametrize("compiler", ["/usr/bin/c++", None])
def test_a_missing_extension_is_warned_of_once_with_what_builds_it(
    level: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, compiler: str | None
) -> None:
    monkeypatch.setitem(sys.modules, "headrace.compute.kernels._cpu", None)
    monkeypatch.setattr("shutil.which", lambda name: compiler)
    backends._warn_once.cache_clear()
    for _ in range(2):
        assert select("auto", CPU).name == "torch"
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert (f"A compiler is here ({compiler})" in warning) == (compiler is not None)
    assert ("install a C++17 compiler" in warning) == (compiler is None)
    assert "python setup.py build_ext --inplace" in warning
    assert str(Path(backends.__file__).parents[2]) in warning


def test_levels_and_devices_are_refused_by_name(level: str) -> None:
    assert select("auto", CPU).name == "cpp"
    assert select("auto", CPU, level).isa == select("cpp", CPU, level).isa == level
    assert select("auto", CPU).isa == LEVELS[0]
    with pytest.raises(KernelsUnavailable, match=r"--cpu-isa avx2: kernels 'torch' choose"):
        select("torch", CPU, "avx2")
    with pytest.raises(KernelsUnavailable, match=r"'sse9' is not on this machine"):
        select("auto", CPU, "sse9")
    with pytest.raises(KernelsUnavailable, match=r"'sse9' is not on this machine; it has .*generic"):
        CppKernels("sse9")
    with pytest.raises(KernelsUnavailable, match="not on meta"):
        select("cpp", torch.device("meta"))


ROWS = st.lists(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, -2.5, 1e-40, 3e38, math.inf, -math.inf, math.nan, -math.nan]),
    min_size=37,
    max_size=37,
)


@quick
@given(rows=st.lists(ROWS, min_size=1, max_size=4), dtype=st.sampled_from(DTYPES))
def test_the_likeliest_token_is_the_references(
    level: str, rows: list[list[float]], dtype: torch.dtype
) -> None:
    logits = torch.tensor(rows).to(dtype)
    assert torch.equal(CppKernels(level).likeliest(logits), ORACLE.likeliest(logits))


WILD = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, -2.5, 3e38, math.inf, -math.inf, math.nan])


@quick
@given(
    values=st.lists(WILD, min_size=1, max_size=300),
    others=st.sampled_from([0.0, -1.0, -math.inf]),
    rows=st.integers(1, 20),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_the_likeliest_outputs_of_a_head_are_those_of_its_logits(
    level: str, values: list[float], others: float, rows: int, dtype: torch.dtype
) -> None:
    """Each row chooses one of two columns, so that rows have different ties and faults, in several panels."""
    kernels = CppKernels(level)
    chosen = torch.tensor(values)
    columns = torch.stack(
        [chosen, torch.where(torch.arange(len(chosen)) % 3 == 0, others, chosen.flip(0))], 1
    )
    hidden = torch.tensor([[1.0, 0.0], [0.0, 1.0]])[torch.arange(rows) % 2]
    for weight in (columns, columns.nan_to_num(0.0, 3e38, -3e38)):  # 0 times infinity is a fault in every row
        head = kernels.prepare_linear(weight.to(dtype))
        x = hidden.to(dtype)
        assert torch.equal(kernels.likeliest_outputs(x, head), kernels.likeliest(kernels.logits(x, head)))


@pytest.mark.parametrize("outputs", [1, 63, 64, 65, 5000])
@pytest.mark.parametrize("rows", [1, 5, 16, 250])
def test_the_likeliest_outputs_of_several_threads(level: str, outputs: int, rows: int) -> None:
    kernels = CppKernels(level)
    weight = torch.randint(-1, 2, (outputs, 48)).to(
        torch.bfloat16
    )  # small whole numbers: many outputs are equal
    x = torch.randint(-1, 2, (rows, 48)).to(torch.bfloat16)
    head = kernels.prepare_linear(weight)
    expected = ORACLE.likeliest(kernels.logits(x, head))
    threads, kernels.threads = kernels.threads, 4
    try:
        assert torch.equal(kernels.likeliest_outputs(x, head), expected)
    finally:
        kernels.threads = threads
    with pytest.raises(ValueError, match="for a head of"):
        kernels.likeliest_outputs(x[:, 1:], head)


def test_the_likeliest_outputs_of_a_quantized_head(level: str) -> None:
    kernels, x = CppKernels(level), torch.randn(5, 32)
    head = kernels.prepare_linear(quantized_weight(70, 32, 1, 8, 8))
    assert torch.equal(kernels.likeliest_outputs(x, head), kernels.likeliest(kernels.logits(x, head)))


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 1000, 1 << 18, (1 << 18) + 13])
@pytest.mark.parametrize("offset", [0, 1, 16])
def test_copies_are_equal_and_nothing_else_is_written(level: str, count: int, offset: int) -> None:
    kernels = CppKernels(level)
    source, room = torch.randn(count), torch.zeros(count + offset + 16)
    kernels.copy(room[offset : offset + count], source)
    assert torch.equal(room[offset : offset + count], source)
    assert not room[:offset].any()
    assert not room[offset + count :].any()
    with pytest.raises(ValueError, match="not as large"):
        kernels.copy(room, source)


@pytest.mark.parametrize("outputs", [4096, 4100])
def test_logits_of_many_rows_are_those_of_few(level: str, outputs: int) -> None:
    """More than a MiB goes past the caches, where outputs are whole panels."""
    kernels = CppKernels(level)
    x, bias = torch.randn(70, 32).to(torch.bfloat16), torch.randn(outputs).to(torch.bfloat16)
    for weight in (torch.randn(outputs, 32).to(torch.bfloat16), quantized_weight(outputs, 32, 1, 8, 8)):
        prepared = kernels.prepare_linear(weight)
        for each in (None, bias):
            parts = [kernels.logits(some, prepared, each) for some in x.split(16)]
            assert torch.equal(kernels.logits(x, prepared, each), torch.cat(parts))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_of_deep_linear_layers_are_those_alone(level: str, dtype: torch.dtype) -> None:
    """Tiles of 13 rows or more meet longer blocks of weights: sums are stored at other places of the depth."""
    kernels = CppKernels(level)
    prepared = kernels.prepare_linear(torch.randn(130, 2100).to(dtype))
    x = torch.randn(100, 2100).to(dtype)
    alone = torch.cat([kernels.linear(row, prepared) for row in x.split(1)])
    for rows in (8, 12, 13, 16, 24, 36, 37, 96, 97, 100):
        assert torch.equal(kernels.linear(x[:rows], prepared), alone[:rows])


def test_of_no_tokens_none_is_the_likeliest(level: str) -> None:
    logits = torch.empty(2, 0, dtype=torch.bfloat16)
    assert CppKernels(level).likeliest(logits).tolist() == [NOTHING_ALLOWED, NOTHING_ALLOWED]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_likeliest_token_of_a_large_vocabulary(level: str, dtype: torch.dtype) -> None:
    logits = torch.randn(17, 49_153).to(dtype)
    logits[3] = -math.inf
    assert torch.equal(CppKernels(level).likeliest(logits), ORACLE.likeliest(logits))
