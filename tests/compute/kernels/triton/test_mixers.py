"""Mixers with a recurrent state in Triton against their definition: any rows, states in and out, graphs' rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.compute.kernels.mixers import LineRows, StepRows, mix
from headrace.compute.kernels.triton.backend import TritonKernels
from headrace.compute.kernels.triton.mixing import DeviceMixer
from tests.compute.kernels.pages import CPU
from tests.compute.kernels.test_mixers import AHEAD, SLOTS, Case, _mixers

KERNELS = TritonKernels(CPU)
SMALL = [name for name in _mixers() if name not in ("delta", "space")]


def compare(case: Case, rows: StepRows, given: list[torch.Tensor]) -> None:
    """Results and all states are those of the definition; what a slot had before a sequence begins does not count."""
    expected_states, states = case.copies(), case.copies()
    for state in states:
        state[rows.slots[np.asarray(rows.fresh)]] = torch.nan
    prepared = KERNELS.prepare_mixer(case.mixer)
    assert isinstance(prepared, DeviceMixer)
    expected = mix(given, case.mixer, rows, expected_states)
    found = KERNELS.mix(given, prepared, rows, states)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    unused = np.asarray(rows.fresh) & (rows.kept == 0)
    for state, other in zip(states, expected_states, strict=True):
        state[rows.slots[unused]] = other[rows.slots[unused]]
        torch.testing.assert_close(state, other, rtol=1e-4, atol=1e-4)


def rows_of(lengths: list[int], fresh: list[bool], ahead: list[int]) -> StepRows:
    slots = np.random.default_rng(len(lengths)).permutation(SLOTS)[: len(lengths)]
    starts = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    return StepRows(slots, starts, np.array(fresh), np.array(lengths) - np.array(ahead))


@pytest.mark.parametrize("name", _mixers())
def test_rows_of_one_token(name: str) -> None:
    case = Case(name)
    compare(case, rows_of([1] * 5, [False, True, False, False, True], [0] * 5), [x[:5] for x in case.inputs])


@pytest.mark.parametrize("name", SMALL)
@settings(max_examples=4, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.sampled_from([1, 1, 2, 5, 31, 33, 66]), min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
def test_rows_of_any_length(name: str, lengths: list[int], seed: int) -> None:
    """Several sequences, whose states stay behind any of their tokens."""
    drawn = np.random.default_rng(seed)
    case = Case(name)
    ahead = [int(drawn.integers(0, length + 1)) if drawn.random() < 0.5 else 0 for length in lengths]
    fresh = [bool(drawn.random() < 0.4) for _ in lengths]
    compare(case, rows_of(lengths, fresh, ahead), [x[: sum(lengths)] for x in case.inputs])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ahead"),
    [(name, ahead) for name in SMALL for ahead in ((0,) * 5, *AHEAD)]
    + [(name, AHEAD[0]) for name in _mixers() if name not in SMALL],  # a minute each in the interpreter
)
def test_long_rows_of_whole_heads(name: str, ahead: tuple[int, ...]) -> None:
    case = Case(name)
    compare(case, rows_of([1, 1, 5, 70, 130], [False, True, False, True, False], list(ahead)), case.inputs)


def test_equal_tokens_correct_each_other_exactly() -> None:
    """Keys of one direction with full weight: products of the chunk's matrix with itself would be huge."""
    case = Case("delta-uneven")
    inputs = [x[:1].repeat(64, 1) for x in case.inputs]
    inputs[1][:, :3] = 30.0
    inputs[1][:, 3:] = -30.0
    compare(case, rows_of([64], [True], [0]), inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["convolution-3", "delta-uneven", "space-uneven"])
def test_states_are_float32_beside_other_types(name: str, dtype: torch.dtype) -> None:
    case = Case(name)
    given = [x[:40].to(dtype) for x in case.inputs]
    rows = rows_of([39, 1], [True, False], [0, 0])
    expected_states, states = case.copies(), case.copies()
    expected = mix([x.float() for x in given], case.mixer, rows, expected_states)
    found = KERNELS.mix(given, KERNELS.prepare_mixer(case.mixer), rows, states)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)
    for state, other in zip(states, expected_states, strict=True):
        torch.testing.assert_close(state, other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["convolution-2", "delta-uneven", "space-no-norm"])
def test_rows_of_a_graph_and_its_padding(name: str) -> None:
    """Padding names any slot, and neither reads nor changes its state."""
    case = Case(name)
    given = [x[:4] for x in case.inputs]
    rows = rows_of([1, 1], [False, True], [0, 0])
    expected_states, states = case.copies(), case.copies()
    expected = mix([x[:2] for x in given], case.mixer, rows, expected_states)
    slots = torch.from_numpy(np.append(rows.slots, [rows.slots[0], 0]))
    lines = LineRows(slots, torch.tensor([7, 1, 0, 0], dtype=torch.int32))
    found = KERNELS.mix(given, KERNELS.prepare_mixer(case.mixer), lines, states)
    torch.testing.assert_close(found[:2], expected, rtol=1e-4, atol=1e-4)
    for state, other in zip(states, expected_states, strict=True):
        torch.testing.assert_close(state, other, rtol=1e-4, atol=1e-4)


def test_what_kernels_make_of_rows_is_made_once() -> None:
    case = Case("space-uneven")
    rows = rows_of([5, 1], [True, False], [0, 0])._replace(made={})
    prepared = KERNELS.prepare_mixer(case.mixer)
    for _ in range(2):
        KERNELS.mix([x[:6] for x in case.inputs], prepared, rows, case.copies())
        first = rows.made
    assert first is rows.made
    assert list(first) == ["triton"]


def test_other_sizes_are_computed_by_the_definition() -> None:
    case = Case("delta-uneven")
    large = case.mixer._replace(key_dim=300)  # type: ignore[call-arg]
    assert KERNELS.prepare_mixer(large) is large
    case = Case("convolution-2")
    rows = rows_of([2], [True], [0])
    states = case.copies()
    found = KERNELS.mix([x[:2] for x in case.inputs], case.mixer, rows, states)
    assert torch.equal(found, mix([x[:2] for x in case.inputs], case.mixer, rows, case.copies()))
