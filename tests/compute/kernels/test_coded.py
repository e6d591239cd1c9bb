"""Products of weights whose exponents are codes: those of the plain words, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.compute.kernels import KernelsUnavailable
from headrace.compute.kernels.cpp import CppKernels
from headrace.compute.kernels.packed import PackedWeight
from tests.compute.kernels.test_stack import DECODING, MIXED, PROMPTS, make, pages_for, with_experts

try:
    KERNELS = CppKernels("avx512_bf16")
except KernelsUnavailable as reason:
    pytest.skip(str(reason), allow_module_level=True)

EDGES = (0, 1, 126, 127, 128, 129, 1022, 1025, 2048, 2049)  # inputs beside the ends of blocks


def plain(monkeypatch: pytest.MonkeyPatch, prepare: Any, *given: Any) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(KERNELS, "coded", False)
        return prepare(*given)


def weight_of(outputs: int, inputs: int, *, uncommon: bool) -> Tensor:
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(outputs)).bfloat16()
    for number, edge in enumerate(EDGES if uncommon else ()):
        if edge < inputs:
            weight[number * 7 % outputs, edge] = (2.0**40, -(2.0**-40), 0.0)[number % 3]
    return weight


@pytest.mark.parametrize("rows", [1, 2, 6, 7, 12, 13, 18, 19, 96, 97, 200])
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(1, 2), (63, 128), (64, 128), (130, 130), (200, 1026), (576, 2050)]
)
def test_linear_layers(monkeypatch: pytest.MonkeyPatch, outputs: int, inputs: int, rows: int) -> None:
    weight, x = weight_of(outputs, inputs, uncommon=inputs > 1000), torch.randn(rows, inputs).bfloat16()
    coded, own = KERNELS.prepare_linear(weight), plain(monkeypatch, KERNELS.prepare_linear, weight)
    assert isinstance(coded, PackedWeight)
    assert coded.codes is not None
    assert own.codes is None
    bias = torch.randn(outputs).bfloat16()
    assert torch.equal(KERNELS.linear(x, coded, bias), KERNELS.linear(x, own, bias))
    assert torch.equal(KERNELS.logits(x, coded), KERNELS.logits(x, own))
    assert torch.equal(KERNELS.likeliest_outputs(x, coded), KERNELS.likeliest_outputs(x, own))


@pytest.mark.parametrize("batch", [PROMPTS, MIXED, DECODING], ids=["prompts", "mixed", "decoding"])
@pytest.mark.parametrize("experts", [False, True])
def test_stacks(monkeypatch: pytest.MonkeyPatch, experts: bool, batch: Any) -> None:
    def stack(kernels: CppKernels) -> Any:
        made = make(kernels, torch.bfloat16, inner=64)
        return kernels.prepare_stack(with_experts(kernels, made) if experts else made)

    coded, own = stack(KERNELS), plain(monkeypatch, stack, KERNELS)
    assert coded.stack.layers[0].qkv.weight.codes is not None
    pages = [pages_for(torch.bfloat16) for _ in range(2)]
    one, other = (KERNELS.run_stack(of, batch, held) for of, held in zip((coded, own), pages, strict=True))
    assert torch.equal(one, other)
    for part, same in zip(*pages, strict=True):
        assert torch.equal(part.keys, same.keys)


def test_a_level_that_does_not_have_them_refuses_them() -> None:
    coded = KERNELS.prepare_linear(weight_of(64, 128, uncommon=False))
    other = CppKernels("avx512_vnni")
    with pytest.raises(ValueError, match="at a level that has them"):
        other.linear(torch.randn(2, 128).bfloat16(), coded)
    assert isinstance(coded, PackedWeight)
    mixed = coded._replace(dtype=torch.float32)
    with pytest.raises(ValueError, match="coded weights are bfloat16"):
        KERNELS.linear(torch.randn(2, 128), mixed)
