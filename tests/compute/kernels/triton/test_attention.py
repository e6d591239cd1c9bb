"""Paged attention in Triton against torch's, over random rows: decoding, drafts, chunks and prompts together."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.compute.kernels import Pages
from headrace.compute.kernels.triton import launches
from headrace.compute.kernels.triton.backend import TritonKernels
from headrace.compute.kernels.triton.launches import AttentionPlan, Scores, shape_of
from headrace.compute.kernels.triton.target import INTERPRETER, Target
from headrace.compute.shared_keys import MOST_GROUPS, RowGroups, SharedKeys
from tests.compute.kernels.pages import CPU, DTYPES, ORACLE, close, forget_the_rest, pages_of, rows_of

KERNELS = TritonKernels(CPU)


@settings(max_examples=30, derandomize=True)
@given(
    kv_heads=st.integers(1, 2),
    group=st.sampled_from([1, 2, 3, 4, 20]),
    head_dim=st.sampled_from([8, 16, 64, 80]),
    block_size=st.sampled_from([4, 16, 32, 64]),
    decodes=st.lists(st.integers(0, 150) | st.integers(300, 400), max_size=3),
    longer=st.lists(st.tuples(st.integers(0, 100), st.integers(2, 90)), max_size=2),
    window=st.sampled_from([None, 1, 5, 70]),
    softcap=st.sampled_from([None, 3.0]),
    sunk=st.sampled_from([None, 0.0, 12.0, -200.0]),
    dtype=st.sampled_from(DTYPES),
    page_dtype=st.sampled_from([None, torch.int8]),
    seed=st.integers(0, 1000),
)
def test_attention(
    kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    decodes: list[int],
    longer: list[tuple[int, int]],
    window: int | None,
    softcap: float | None,
    sunk: float | None,
    dtype: torch.dtype,
    page_dtype: torch.dtype | None,
    seed: int,
) -> None:
    starts = decodes + [start for start, _ in longer]
    lengths = [1] * len(decodes) + [length for _, length in longer]
    if not starts:
        return
    batch, blocks = rows_of(starts, lengths, block_size, seed)
    torch.manual_seed(seed)
    pages = pages_of(torch.randn(2, blocks, block_size, kv_heads, head_dim), page_dtype or dtype)
    forget_the_rest(batch, pages)
    queries = torch.randn(sum(lengths), kv_heads * group, head_dim).to(dtype)
    sinks = None if sunk is None else torch.randn(kv_heads * group) + sunk
    plan = KERNELS.plan_attention(batch, window, dtype)
    actual = KERNELS.paged_attention(queries, pages, plan, head_dim**-0.5, softcap, sinks)
    exact = ORACLE.plan_attention(batch, window, torch.float32)
    wide = pages if pages.key_scales is not None else Pages(pages.keys.float(), pages.values.float())
    expected = ORACLE.paged_attention(queries.float(), wide, exact, head_dim**-0.5, softcap, sinks)
    assert actual.dtype == dtype
    close(actual, expected, dtype)


@pytest.mark.parametrize(
    ("lengths", "window"), [([1], None), ([4], 900), ([1, 1, 5, 8], None), ([1, 1], 900)]
)
def test_keys_are_split_between_programs(
    lengths: list[int], window: int | None, monkeypatch: pytest.MonkeyPatch
):
    """Whatever the number of parts, and though some are empty because rows are shorter or see less."""
    starts = [1000, 40, 700, 3][: len(lengths)]
    batch, blocks = rows_of(starts, lengths, 16, 0)
    torch.manual_seed(0)
    pages = pages_of(torch.randn(2, blocks, 16, 2, 16), torch.float32)
    queries = torch.randn(sum(lengths), 4, 16)
    sinks = torch.randn(4)
    expected = ORACLE.paged_attention(
        queries, pages, ORACLE.plan_attention(batch, window, torch.float32), 0.25, None, sinks
    )
    seen = set()
    for processors in (1, 32):
        plan = AttentionPlan(batch, window, INTERPRETER._replace(processors=processors))
        close(plan.attend(queries, pages, Scores(0.25, None, sinks)), expected, torch.float32)
        seen |= {tiles.splits for part in plan._tiles.values() for tiles in part}
    assert len(seen) > 1


def shared_of(groups: RowGroups, lengths: list[int], lines: int) -> SharedKeys:
    """The groups of rows of so many tokens, on the device: with padding, as a graph of so many ``lines`` has them."""
    owners = np.repeat(np.arange(len(lengths)), lengths)
    order, flat = groups.arrange(owners, owners)
    keys = np.pad(groups.keys.astype(np.int32), (0, lines - len(lengths)))
    padded = np.concatenate((order, np.arange(len(order), lines, dtype=np.int32)))
    flat[-3] += lines - len(order)
    return SharedKeys(*map(torch.from_numpy, (keys, padded, flat)))


@pytest.mark.parametrize("group", [2, 3, 20])
@pytest.mark.parametrize("page_dtype", [None, torch.int8])
@pytest.mark.parametrize("processors", [1, 64])
def test_a_prefix_that_rows_share_is_read_once(
    group: int, page_dtype: torch.dtype | None, processors: int
) -> None:
    """Rows end right behind it, or reach far; there are two groups, and rows of none; a window has no use for it."""
    torch.manual_seed(0)
    starts = [320, 700, 64, 330, 337, 500, 5, 90][: 4 if group == 20 else 8]
    batch, blocks = rows_of(starts, [1] * len(starts), 16, 0)
    first, second = [0, 3, 5][: 2 if group == 20 else 3], [1, 4] if group != 20 else []
    number = np.full(len(starts), MOST_GROUPS - 1)
    keys = np.zeros(len(starts), dtype=np.int64)
    for place, (rows, shared) in enumerate(((first, 320), (second, 256))):
        number[rows], keys[rows] = place, shared
        for row in rows:
            batch.block_tables[row, : shared // 16] = batch.block_tables[rows[0], : shared // 16]
    batch = replace(batch, shared=shared_of(RowGroups(keys, number), [1] * len(starts), len(starts)))
    pages = pages_of(torch.randn(2, blocks, 16, 2, 16), page_dtype or torch.float32)
    queries, sinks = torch.randn(len(starts), 2 * group, 16), torch.randn(2 * group)
    for window in (None, 400):
        plan = AttentionPlan(batch, window, INTERPRETER._replace(processors=processors))
        exact = ORACLE.plan_attention(batch, window, torch.float32)
        close(
            plan.attend(queries, pages, Scores(0.25, None, sinks)),
            ORACLE.paged_attention(queries, pages, exact, 0.25, None, sinks),
            torch.float32,
        )
        ((prefix, *_),) = plan._tiles.values()
        assert prefix.prefix == (1 if window is None else 0)


@pytest.mark.parametrize(("group", "shared"), [(1, 0), (4, 0), (5, 0), (1, 320), (5, 320)])
def test_rows_of_a_graph_have_as_many_tokens_as_the_device_says(group: int, shared: int) -> None:
    """A graph's launches are those of rows of one token, whatever their number is; rows behind them are empty."""
    torch.manual_seed(0)
    lengths, starts = [3, 1, 6, 2], [320, 420, 330, 350]
    batch, blocks = rows_of(starts, lengths, 16, 0)
    batch.block_tables[:, :20] = batch.block_tables[0, :20]
    pages = pages_of(torch.randn(2, blocks, 16, 2, 16), torch.float32)
    queries = torch.randn(sum(lengths) + 2, 2 * group, 16)
    tokens = sum(lengths)
    exact = ORACLE.paged_attention(
        queries[:tokens], pages, ORACLE.plan_attention(batch, None, torch.float32), 0.25, None
    )
    rows = tokens + 2  # two lines are padding, and eight rows are empty
    empty = torch.full((rows - 6,), rows, dtype=torch.int32)
    filled = replace(
        batch,
        lengths=(1,) * rows,
        contexts=(430,) * rows,
        decode_rows=rows,
        most_tokens=6,
        tokens=batch.tokens.new_zeros(rows),
        query_starts=torch.cat(
            [batch.query_starts, batch.query_starts.new_tensor([tokens + 1, rows]), empty]
        ),
        context_lens=torch.cat([batch.context_lens, batch.context_lens.new_zeros(rows - 4)]),
        block_tables=torch.cat([batch.block_tables, batch.block_tables[:1].repeat(rows - 4, 1)]),
        shared=shared_of(RowGroups(np.full(4, shared), np.zeros(4, dtype=np.int64)), lengths, rows)
        if shared
        else None,
    )
    for processors in (1, 8):
        plan = AttentionPlan(filled, None, INTERPRETER._replace(processors=processors))
        attended = plan.attend(queries, pages, Scores(0.25, None, None))
        close(attended[:tokens], exact, torch.float32)
        assert attended.isfinite().all()


def test_fp8_pages_have_a_scale_for_each_head() -> None:
    torch.manual_seed(0)
    batch, blocks = rows_of([100, 20], [1, 9], 16, 0)
    exact = torch.randn(2, blocks, 16, 2, 16)
    scales = exact.abs().amax(-1) / 448
    coded = (exact / scales[..., None]).to(torch.float8_e4m3fn)
    pages = Pages(*coded, *scales.transpose(2, 3).contiguous())
    queries = torch.randn(10, 4, 16)
    actual = KERNELS.paged_attention(
        queries, pages, KERNELS.plan_attention(batch, None, queries.dtype), 0.25, None
    )
    wide = Pages(*(coded.float() * scales[..., None]))
    plan = ORACLE.plan_attention(batch, None, torch.float32)
    close(actual, ORACLE.paged_attention(queries, wide, plan, 0.25, None), torch.float32)


def test_a_query_is_the_same_bit_for_bit_beside_any_rows_of_its_kind() -> None:
    torch.manual_seed(0)
    pages = pages_of(torch.randn(2, 40, 16, 2, 16), torch.float32)
    queries = torch.randn(6, 4, 16)
    starts = [90, 17, 40, 3, 60, 5]
    batch, _ = rows_of(starts, [1] * 6, 16, 3)
    whole = KERNELS.paged_attention(
        queries, pages, KERNELS.plan_attention(batch, None, queries.dtype), 0.2, None
    )
    one = replace(
        batch,
        query_starts=torch.tensor([0, 1], dtype=torch.int32),
        context_lens=batch.context_lens[2:3],
        block_tables=batch.block_tables[2:3],
        lengths=(1,),
        contexts=batch.contexts[2:3],
        decode_rows=1,
    )
    alone = KERNELS.paged_attention(
        queries[2:3], pages, KERNELS.plan_attention(one, None, queries.dtype), 0.2, None
    )
    assert torch.equal(alone, whole[2:3])


def test_a_row_without_tokens_reads_and_writes_nothing() -> None:
    """As a graph's rows that this step does not use."""
    torch.manual_seed(0)
    pages = pages_of(torch.randn(2, 9, 16, 1, 16), torch.float32)
    batch, _ = rows_of([20], [1], 16, 0)
    padded = replace(
        batch,
        query_starts=torch.tensor([0, 1, 1, 1], dtype=torch.int32),
        context_lens=torch.tensor([21, 0, 0], dtype=torch.int32),
        block_tables=torch.cat((batch.block_tables, torch.full((2, 2), 10**6, dtype=torch.int32))),
        lengths=(1, 1, 1),
        contexts=(21, 1, 1),
        decode_rows=3,
    )
    queries = torch.randn(1, 2, 16)
    actual, expected = (
        KERNELS.paged_attention(queries, pages, KERNELS.plan_attention(each, None, queries.dtype), 0.2, None)
        for each in (padded, batch)
    )
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("shared", [64 << 10, 163 << 10, 227 << 10])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kind", launches._KINDS)
def test_tiles_fit_in_shared_memory(kind: str, head_dim: int, shared: int) -> None:
    shape = shape_of(kind, 4, head_dim, 2, Target("", 1, shared))
    assert (shape.rows + 2 * shape.stages * shape.keys) * head_dim * 2 <= shared
    assert shape.keys >= 16
