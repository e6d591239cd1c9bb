"""Mixers with a recurrent state: by every level of the C++ kernels as by definition, however rows are cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.compute.kernels import KernelsUnavailable
from headrace.compute.kernels.cpp import CppKernels
from headrace.compute.kernels.mixers import (
    Convolution,
    GatedDelta,
    Mixer,
    ShortConvolution,
    StateSpace,
    StepRows,
    mix,
)
from headrace.compute.kernels.native_mixers import NativeMixer, run_mixer

SLOTS = 7
LENGTHS = (1, 1, 5, 70, 130)

try:
    LEVELS: tuple[str, ...] = CppKernels().levels
except KernelsUnavailable:
    LEVELS = ()


class Case:
    """A mixer, and random inputs of its rows and states of its slots."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(3)
        self.mixer = _mixers()[name]
        native = NativeMixer(self.mixer)
        taps, channels = self.mixer.convolution.weight.shape
        shapes = [(taps - 1, channels), *([native.heads] if native.heads else [])]
        self.states = [torch.randn(SLOTS, *shape) * 0.3 for shape in shapes]
        self.inputs = [torch.randn(sum(LENGTHS), width) for width in native.widths]

    def copies(self) -> list[Tensor]:
        """States that a mixer may change."""
        return [state.clone() for state in self.states]


def _mixers() -> dict[str, Mixer]:
    def convolution(taps: int, channels: int, *, bias: bool = False) -> Convolution:
        return Convolution(torch.randn(taps, channels) * 0.4, torch.randn(channels) * 0.2 if bias else None)

    def delta(key_heads: int, value_heads: int, key: int, value: int, rate: float = 1.0) -> GatedDelta:
        channels = 2 * key_heads * key + value_heads * value
        heads = (-rate * torch.rand(value_heads) - 0.01, torch.randn(value_heads))
        return GatedDelta(
            convolution(4, channels),
            *heads,
            torch.rand(value) + 0.5,
            key_heads,
            value_heads,
            key,
            value,
            1e-6,
        )

    def space(heads: int, groups: int, key: int, value: int, norms: int, **options: Any) -> StateSpace:
        inner = heads * value
        vectors = (-torch.rand(heads) - 0.01, torch.randn(heads), torch.randn(heads))
        return StateSpace(
            convolution(4, inner + 2 * groups * key, bias=True),
            *vectors,
            torch.rand(inner) + 0.5,
            heads,
            groups,
            key,
            value,
            norms,
            1e-5,
            (0.01, 2.0),
        )._replace(**options)

    scales = {"gate_scale": 0.4, "step_scale": 1.7}
    return {
        "convolution-3": ShortConvolution(convolution(3, 40, bias=True)),
        "convolution-2": ShortConvolution(convolution(2, 300)),
        "delta": delta(2, 4, 128, 128),
        "delta-uneven": delta(3, 3, 12, 21),
        "delta-fading": delta(1, 2, 16, 32, rate=40.0),
        "space": space(4, 2, 128, 64, 2),
        "space-uneven": space(3, 1, 10, 20, 1),
        "space-norm-first": space(4, 2, 16, 20, 2, norm_first=True, **scales),
        "space-no-norm": space(3, 1, 10, 20, 1, norm=None, **scales),
    }


def rows_of(lengths: Sequence[int], fresh: Sequence[bool], ahead: Sequence[int] | None = None) -> StepRows:
    slots = np.array([4, 0, 6, 1, 3][: len(lengths)], dtype=np.int64)
    starts = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(np.array(lengths, dtype=np.int64))))
    kept = np.array(lengths, dtype=np.int64) - np.array(ahead or [0] * len(lengths))
    return StepRows(slots, starts, np.array(fresh), kept)


FRESH = (False, True, False, True, False)


@pytest.mark.parametrize("name", _mixers())
def test_a_row_may_be_cut_anywhere(name: str) -> None:
    case = Case(name)
    inputs = [each[:90] for each in case.inputs]
    whole, parted = case.copies(), case.copies()
    expected = mix(inputs, case.mixer, rows_of([90], [True]), whole)
    at, found = 0, []
    for length in (1, 64, 3, 1, 21):
        part = [each[at : at + length] for each in inputs]
        found.append(mix(part, case.mixer, rows_of([length], [at == 0]), parted))
        at += length
    torch.testing.assert_close(torch.cat(found), expected, rtol=1e-4, atol=1e-4)
    for one, other in zip(parted, whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", _mixers())
def test_native_mixers_equal_their_definition(name: str, level: str) -> None:
    case, kernels = Case(name), CppKernels(level)
    rows, expected_states, states = rows_of(LENGTHS, FRESH), case.copies(), case.copies()
    for state in states:
        state[[0, 1]] = torch.nan  # what a slot had before a sequence begins in it
    expected = mix(case.inputs, case.mixer, rows, expected_states)
    found = kernels.mix(case.inputs, kernels.prepare_mixer(case.mixer), rows, states)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for one, other in zip(states, expected_states, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


AHEAD = (
    (0, 1, 3, 0, 66),
    (1, 0, 5, 69, 1),
    (1, 1, 1, 5, 130),
)


@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("name", _mixers())
def test_tokens_ahead_of_a_state_do_not_change_it(name: str, ahead: Sequence[int]) -> None:
    case = Case(name)
    whole, parted = case.copies(), case.copies()
    expected = mix(case.inputs, case.mixer, rows_of(LENGTHS, FRESH), whole)
    found = mix(case.inputs, case.mixer, rows_of(LENGTHS, FRESH, ahead), parted)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    alone = case.copies()
    for row, slot in enumerate(rows_of(LENGTHS, FRESH).slots):
        kept, begin = LENGTHS[row] - ahead[row], sum(LENGTHS[:row])
        if kept:
            one = rows_of([kept], [FRESH[row]])._replace(slots=np.array([slot]))
            mix([each[begin : begin + kept] for each in case.inputs], case.mixer, one, alone)
    for state, other in zip(parted, alone, strict=True):
        torch.testing.assert_close(state, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", _mixers())
def test_native_mixers_compute_ahead_of_a_state(name: str, level: str, ahead: Sequence[int]) -> None:
    case, kernels = Case(name), CppKernels(level)
    rows, expected_states, states = rows_of(LENGTHS, FRESH, ahead), case.copies(), case.copies()
    expected = mix(case.inputs, case.mixer, rows, expected_states)
    found = kernels.mix(case.inputs, kernels.prepare_mixer(case.mixer), rows, states)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for one, other in zip(states, expected_states, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["convolution-3", "delta", "space"])
@pytest.mark.skipif(not LEVELS, reason="the C++ kernels are not built")
def test_activations_of_16_bits(name: str, dtype: torch.dtype) -> None:
    case, kernels = Case(name), CppKernels()
    inputs = [each.to(dtype) for each in case.inputs]
    rows, expected_states, states = rows_of(LENGTHS, FRESH), case.copies(), case.copies()
    expected = mix([each.float() for each in inputs], case.mixer, rows, expected_states)
    found = kernels.mix(inputs, kernels.prepare_mixer(case.mixer), rows, states)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected, rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(states[0], expected_states[0])


@pytest.mark.skipif(not LEVELS, reason="the C++ kernels are not built")
def test_arguments_that_do_not_fit_are_refused() -> None:
    case, kernels = Case("delta"), CppKernels()
    mixer, rows = kernels.prepare_mixer(case.mixer), rows_of(LENGTHS, FRESH)
    with pytest.raises(ValueError, match="for a mixer of"):
        kernels.mix(case.inputs[:1] * 2, mixer, rows, case.copies())
    with pytest.raises(ValueError, match=r"states .* for a mixer of \[4, 128, 128\]"):
        kernels.mix(case.inputs, mixer, rows, [case.states[0], case.states[1][:, :2]])
    with pytest.raises(IndexError, match=r"slots\[0\] is 7; there are 7"):
        kernels.mix(case.inputs, mixer, rows._replace(slots=rows.slots + 3), case.copies())
    with pytest.raises(IndexError, match="rows do not divide 207 tokens"):
        kernels.mix(case.inputs, mixer, rows._replace(starts=rows.starts // 2), case.copies())
    for kept in (rows.kept + 1, rows.kept - 2):
        with pytest.raises(IndexError, match="rows do not divide 207 tokens"):
            kernels.mix(case.inputs, mixer, rows._replace(kept=kept), case.copies())
    broken = NativeMixer(case.mixer)
    broken._words[8] = 5  # channels
    with pytest.raises(ValueError, match="these are not the words of a mixer"):
        run_mixer(kernels._cpu, kernels._level, case.inputs, broken, rows, case.copies())


@pytest.mark.skipif(not LEVELS, reason="the C++ kernels are not built")
def test_states_larger_than_the_kernels_take_are_computed_by_definition() -> None:
    torch.manual_seed(0)
    channels = 2 * 300 + 8
    mixer = GatedDelta(
        Convolution(torch.randn(4, channels), None),
        -torch.ones(1),
        torch.ones(1),
        torch.ones(8),
        *(1, 1, 300, 8),
        1e-6,
    )
    kernels = CppKernels()
    prepared = kernels.prepare_mixer(mixer)
    assert not prepared.address
    inputs = [torch.randn(3, channels + 8), torch.randn(3, 2)]
    states = [torch.randn(SLOTS, 3, channels), torch.randn(SLOTS, 1, 300, 8)]
    rows = rows_of([1, 2], [False, False])
    expected = mix(inputs, mixer, rows, [state.clone() for state in states])
    torch.testing.assert_close(kernels.mix(inputs, prepared, rows, states), expected)
