"""Likeliest tokens by a copy of the head in 8 bits, at every level that this machine has: those of all logits."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.compute.kernels import KernelsUnavailable
from headrace.compute.kernels.cpp import CppKernels
from headrace.compute.kernels.packed import PackedWeight, pack_screen
from headrace.compute.kernels.screen import Screen, copy_in_bytes

try:
    LEVELS = CppKernels().levels
except KernelsUnavailable as reason:
    pytest.skip(str(reason), allow_module_level=True)

of_levels = pytest.mark.parametrize("level", LEVELS)
WILD = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, 3e38, -3e38, math.inf, -math.inf, math.nan])


class Noting(Screen):
    """A screen that keeps what was noted, and never pauses."""

    def __init__(self, parts: tuple[Tensor, ...]) -> None:
        super().__init__(parts)
        self.noted: list[int] = []

    def note(self, groups: int) -> None:
        self.noted.append(groups)


def screened(kernels: CppKernels, weight: Tensor) -> tuple[PackedWeight, Noting]:
    """The head, and its screen whether or not it would be quicker at this level."""
    head = kernels._pack(weight, consume=False, coded=False)
    assert isinstance(head, PackedWeight)
    screen = pack_screen(weight, kernels._panel, kernels._memory)
    assert screen is not None
    noting = Noting(screen._parts)
    return head._replace(screen=noting), noting


def equal(kernels: CppKernels, x: Tensor, head: PackedWeight) -> None:
    expected = kernels.likeliest(kernels.logits(x, head))
    assert torch.equal(kernels.likeliest_outputs(x, head), expected)


@of_levels
@settings(max_examples=60, derandomize=True)
@given(
    inputs=st.sampled_from([2, 8, 46, 256, 300, 1024]),
    outputs=st.sampled_from([1, 15, 64, 65, 700, 3000]),
    rows=st.sampled_from([1, 3, 16, 97]),
    alike=st.sampled_from([0.0, 1e-3, 1e-2, 1.0]),
    outlier=st.sampled_from([1.0, 30.0, 1e4]),
    scale=st.sampled_from([1e-20, 1.0, 1e12]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    narrow=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_tokens_are_those_of_all_outputs(
    level: str,
    inputs: int,
    outputs: int,
    rows: int,
    alike: float,
    outlier: float,
    scale: float,
    dtype: torch.dtype,
    narrow: bool,
    seed: int,
) -> None:
    """With outputs that differ by less than the copy leaves of them, an activation far above the others, and all far
    from 1.
    """
    kernels, generator = CppKernels(level), torch.Generator().manual_seed(seed)
    base = torch.randn(1, inputs, generator=generator)
    weight = (base + alike * torch.randn(outputs, inputs, generator=generator)) * scale
    x = torch.randn(rows, inputs, generator=generator)
    x[:, inputs // 2] *= outlier
    weight = (weight.bfloat16() if narrow else weight).to(dtype)
    head, screen = screened(kernels, weight)
    equal(kernels, x.to(dtype), head)
    assert len(screen.noted) == 1


@of_levels
@settings(max_examples=25, derandomize=True)
@given(
    x=st.lists(st.tuples(WILD, WILD), min_size=1, max_size=9),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_activations_that_are_no_numbers_or_too_large_have_no_bounds(
    level: str, x: list[tuple[float, float]], dtype: torch.dtype
) -> None:
    kernels = CppKernels(level)
    weight = torch.tensor([[1.0, 2.0], [0.0, 0.0], [-2.0, -1.0], [1.0, -1.0]]).repeat(20, 1)
    head, screen = screened(kernels, weight.to(dtype))
    equal(kernels, torch.tensor(x).to(dtype), head)
    if any(not abs(value) < 1e30 for row in x for value in row):
        assert screen.noted == [-1]


@of_levels
@pytest.mark.parametrize("threads", [1, 4])
def test_few_outputs_are_computed_of_many(level: str, threads: int) -> None:
    kernels = CppKernels(level)
    torch.manual_seed(0)
    head, screen = screened(kernels, torch.randn(20000, 256).to(torch.bfloat16))
    before, kernels.threads = kernels.threads, threads
    try:
        for rows in (1, 16):
            equal(kernels, torch.randn(rows, 256).to(torch.bfloat16), head)
    finally:
        kernels.threads = before
    if level == "amx":
        assert screen.noted == [-1, -1]  # tiles compute all
    else:
        groups = 20000 * 64 // kernels._panel // 16
        assert 1 <= screen.noted[0] < groups // 50
        assert 16 <= screen.noted[1] < 16 * groups // 50


@of_levels
@pytest.mark.parametrize(
    ("of_weights", "of_activations"), [(1e-39, 1e13), (1e12, 1e-39), (1e-39, 1e-39), (1e-25, 1e-15)]
)
def test_what_is_below_the_normal_range(level: str, of_weights: float, of_activations: float) -> None:
    """Some levels take such weights and activations for 0, so outputs may be larger than the copy's products."""
    kernels = CppKernels(level)
    torch.manual_seed(0)
    weight = -torch.rand(3000, 64) * of_weights
    weight[::2] *= 16  # of weights of 1e-39, these are in the normal range in part
    head, _ = screened(kernels, weight.to(torch.bfloat16))
    equal(kernels, (torch.rand(5, 64) * of_activations).to(torch.bfloat16), head)


@of_levels
def test_outputs_that_are_all_alike_are_all_computed(level: str) -> None:
    kernels = CppKernels(level)
    head, screen = screened(kernels, torch.ones(5000, 32))
    equal(kernels, torch.ones(2, 32), head)
    assert screen.noted == [-1]


def test_a_copy_bounds_what_it_leaves() -> None:
    weight = torch.randn(50, 96).to(torch.bfloat16)
    copy = copy_in_bytes(weight)
    left = weight.double() - copy.weight.values.double() * copy.weight.scales.double()
    assert (copy.errors >= left.norm(dim=1)).all()
    assert (copy.errors <= 1.01 * left.norm(dim=1)).all()
    assert (copy.norms >= weight.double().norm(dim=1)).all()
    for value in (math.nan, math.inf, 1e30):
        weight[3, 4] = value
        assert copy_in_bytes(weight) is None
    assert copy_in_bytes(torch.ones(1, (1 << 16) + 2)) is None


def test_a_screen_that_does_not_help_pauses_longer_each_time() -> None:
    part = torch.empty(2)
    screen, used = Screen((part, part, part, part)), []
    for call in range(40):
        if screen.helps():
            used.append(call)
            screen.note(-1)
    assert used == [0, 2, 5, 10, 19, 36]
    while not screen.helps():
        pass
    screen.note(7)
    assert screen.helps()
    screen.note(-1)
    assert not screen.helps()
    assert screen.helps()


def test_only_levels_that_multiply_bytes_have_a_screen() -> None:
    for level in LEVELS:
        kernels = CppKernels(level)
        weight = torch.randn(70, 32)
        before = weight.clone()
        head = kernels.prepare_head(weight)
        assert torch.equal(weight, before), "the embedding, if it is tied"
        assert torch.equal(head.packed, kernels.prepare_linear(before).packed)
        assert (head.screen is not None) == (level in ("avx512_vnni", "avx512_bf16"))
        equal(kernels, torch.randn(3, 32), head)
        assert kernels.prepare_head(torch.full((70, 32), math.nan)).screen is None
