"""Products of weights whose exponents are codes: those of the plain words, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.compute.kernels import weight_element_bytes
from headrace.compute.kernels.cpp import CppKernels
from headrace.compute.kernels.packed import PackedWeight
from tests.compute.kernels.stacks import DECODING, MIXED, PROMPTS, make, pages_for, with_experts

LEVELS = [level for level in CppKernels().levels if CppKernels(level).coded]
FORMS = [(level, dtype) for level in LEVELS for dtype in (torch.bfloat16, torch.float32)]
IDS = [f"{level}-{str(dtype).removeprefix('torch.')}" for level, dtype in FORMS]
EDGES = (0, 1, 126, 127, 128, 129, 1022, 1025, 2048, 2049)  # inputs beside the ends of blocks


@pytest.fixture(params=FORMS, ids=IDS)
def form(request: pytest.FixtureRequest) -> tuple[CppKernels, torch.dtype]:
    level, dtype = request.param
    return CppKernels(level), dtype


def plain(kernels: CppKernels, monkeypatch: pytest.MonkeyPatch, prepare: Any, *given: Any) -> Any:
    """What is prepared with a word for each element, or for two, of the dtype of activations."""
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "coded", False)
        patch.setattr(kernels, "narrow", False)
        return prepare(*given)


def weight_of(outputs: int, inputs: int, dtype: torch.dtype, *, uncommon: bool) -> Tensor:
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(outputs)).bfloat16()
    for number, edge in enumerate(EDGES if uncommon else ()):
        if edge < inputs:
            weight[number * 7 % outputs, edge] = (2.0**40, -(2.0**-40), 0.0)[number % 3]
    return weight.to(dtype)


@pytest.mark.parametrize("rows", [1, 2, 4, 5, 6, 7, 12, 13, 18, 19, 96, 97, 200])
@pytest.mark.parametrize(
    ("outputs", "inputs"), [(1, 2), (15, 128), (63, 128), (64, 128), (130, 130), (200, 1026), (576, 2050)]
)
def test_linear_layers(
    form: tuple[CppKernels, torch.dtype],
    monkeypatch: pytest.MonkeyPatch,
    outputs: int,
    inputs: int,
    rows: int,
) -> None:
    kernels, dtype = form
    weight = weight_of(outputs, inputs, dtype, uncommon=inputs > 1000)
    x, bias = torch.randn(rows, inputs).to(dtype), torch.randn(outputs).to(dtype)
    coded, own = (
        kernels.prepare_linear(weight),
        plain(kernels, monkeypatch, kernels.prepare_linear, weight),
    )
    assert isinstance(coded, PackedWeight)
    assert coded.codes is not None
    assert (own.codes, own.narrow) == (None, False)
    assert torch.equal(kernels.linear(x, coded, bias), kernels.linear(x, own, bias))
    assert torch.equal(kernels.logits(x, coded), kernels.logits(x, own))
    assert torch.equal(kernels.likeliest_outputs(x, coded), kernels.likeliest_outputs(x, own))


@pytest.mark.parametrize("batch", [PROMPTS, MIXED, DECODING], ids=["prompts", "mixed", "decoding"])
@pytest.mark.parametrize("experts", [False, True])
def test_stacks(
    form: tuple[CppKernels, torch.dtype], monkeypatch: pytest.MonkeyPatch, experts: bool, batch: Any
) -> None:
    kernels, dtype = form

    def stack(used: CppKernels) -> Any:
        made = make(used, dtype, "narrow", inner=64)
        return used.prepare_stack(with_experts(used, made, "narrow") if experts else made)

    coded, own = stack(kernels), plain(kernels, monkeypatch, stack, kernels)
    assert coded.stack.layers[0].qkv.weight.codes is not None
    pages = [pages_for(dtype) for _ in range(2)]
    one, other = (kernels.run_stack(of, batch, held) for of, held in zip((coded, own), pages, strict=True))
    assert torch.equal(one, other)
    for part, same in zip(*pages, strict=True):
        assert torch.equal(part.keys, same.keys)


@pytest.mark.skipif(not LEVELS, reason="this processor has no level with coded weights")
def test_a_level_that_does_not_have_them_refuses_them() -> None:
    weight = weight_of(64, 128, torch.bfloat16, uncommon=False)
    generic = CppKernels("generic")
    coded = CppKernels(LEVELS[0]).prepare_linear(weight)
    assert isinstance(coded, PackedWeight)
    own = generic.prepare_linear(weight)._replace(codes=coded.codes)
    with pytest.raises(ValueError, match="at a level that has them"):
        generic.linear(torch.randn(2, 128).bfloat16(), own)


@pytest.mark.skipif(not LEVELS, reason="this processor has no level with coded weights")
def test_words_of_float32_are_not_coded() -> None:
    kernels = CppKernels(LEVELS[0])
    coded = kernels.prepare_linear(weight_of(64, 128, torch.float32, uncommon=False))
    with pytest.raises(ValueError, match="coded weights are bfloat16"):
        kernels.linear(torch.randn(2, 128), coded._replace(narrow=False))
    narrow = coded._replace(dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="narrow weights are those of activations in float32"):
        kernels.linear(torch.randn(2, 128).bfloat16(), narrow)


@pytest.mark.parametrize(
    ("level", "dtype", "stored", "expected"),
    [
        ("generic", torch.float32, "bfloat16", 2),
        ("generic", torch.float32, "float32", 4),
        ("generic", torch.bfloat16, "bfloat16", 2),
        *((level, dtype, "bfloat16", 1.5) for level, dtype in FORMS),
        *((level, torch.float32, "float16", 4) for level in LEVELS),
    ],
)
def test_bytes_of_an_element(level: str, dtype: torch.dtype, stored: str, expected: float) -> None:
    kernels = CppKernels(level)
    assert weight_element_bytes(kernels, dtype, stored) == expected
    weight = torch.randn(64, 512).to(getattr(torch, stored)).to(dtype)
    packed = kernels.prepare_linear(weight)
    assert isinstance(packed, PackedWeight)
    held = packed.packed.nbytes + (0 if packed.codes is None else packed.codes.nbytes)
    assert held / weight.numel() == pytest.approx(expected, rel=0.01)
    assert packed.saved == weight.nbytes - held
