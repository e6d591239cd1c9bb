"""Products with quantized weights in Triton against torch, over formats, groups, zeros and orders."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.compute.kernels.linear import quantize_rows
from headrace.compute.kernels.triton import quantized
from headrace.compute.kernels.triton.backend import TritonKernels
from headrace.compute.kernels.triton.quantized import Packed, Rounded
from headrace.compute.kernels.triton.target import way_of
from tests.compute.kernels.pages import CPU, DTYPES, ORACLE, close
from tests.compute.kernels.weights import quantized_weight

KERNELS = TritonKernels(CPU)


@settings(max_examples=30, derandomize=True)
@given(
    rows=st.sampled_from([1, 3, 16, 17, 70]),
    outputs=st.sampled_from([24, 64, 200]),
    size=st.sampled_from([(256, 1), (256, 2), (384, 3), (1024, 8), (2048, 1)]),
    kind=st.sampled_from(["4", "8", "fp8"]),
    activation_bits=st.sampled_from([16, 8]),
    base=st.sampled_from(["middle", "zeros", "minima"]),
    order=st.booleans(),
    biased=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
def test_linear(
    rows: int,
    outputs: int,
    size: tuple[int, int],
    kind: str,
    activation_bits: Literal[8, 16],
    base: str,
    order: bool,
    biased: bool,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(rows + outputs)
    inputs, groups = size
    bits: Literal[4, 8] = 4 if kind == "4" else 8
    marks = {"zeros": base == "zeros" and bits == 4, "order": order, "fp8": kind == "fp8"}
    if kind != "fp8" and activation_bits == 16:
        marks["minima"] = base == "minima"
    weight = quantized_weight(outputs, inputs, groups, bits, activation_bits, **marks)
    x = torch.randn(rows, inputs).to(dtype)
    x[0, :] *= 0
    bias = torch.randn(outputs).to(dtype) if biased else None
    prepared = KERNELS.prepare_linear(weight)
    assert isinstance(prepared, Packed)
    actual = KERNELS.linear(x, prepared, bias)
    assert actual.dtype == dtype
    wide = None if bias is None else bias.float()
    close(actual, ORACLE.linear(x.float(), weight, wide), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (8, 32), (8, 16)])
@pytest.mark.parametrize("rows", [3, 20])
def test_weights_with_minima_in_small_groups(
    bits: Literal[4, 8], group: int, rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks of GGUF, also where so many rows are multiplied that the weight is dequantized."""
    monkeypatch.setattr(quantized, "MOST_ROWS", 16)
    torch.manual_seed(0)
    weight = quantized_weight(40, 8 * group, 8, bits, 16, minima=True)
    prepared = KERNELS.prepare_linear(weight)
    assert isinstance(prepared, Packed)
    x = torch.randn(rows, 8 * group).to(dtype)
    close(KERNELS.linear(x, prepared), ORACLE.linear(x.float(), weight), dtype)


@pytest.mark.parametrize(
    ("group", "bits", "activation_bits", "marks"),
    [
        (24, 4, 16, {}),
        (32, 4, 8, {}),
        (64, 8, 16, {"zeros": True}),
        (8, 8, 16, {}),
        (64, 4, 8, {"minima": True}),
    ],
)
def test_other_weights_are_dequantized(
    group: int, bits: Literal[4, 8], activation_bits: Literal[8, 16], marks: dict[str, bool]
) -> None:
    weight = quantized_weight(16, 4 * group, 4, bits, activation_bits, **marks)
    assert KERNELS.prepare_linear(weight) is weight
    x = torch.randn(3, 4 * group)
    close(KERNELS.linear(x, weight), ORACLE.linear(x, weight), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("bits", "activation_bits", "groups", "fp8"),
    [
        (4, 16, 2, False),
        (4, 8, 2, False),
        (8, 16, 1, False),
        (8, 8, 1, False),
        (8, 16, 2, True),
        (8, 8, 1, True),
    ],
)
def test_many_rows_are_multiplied_by_the_library(
    bits: Literal[4, 8],
    activation_bits: Literal[8, 16],
    groups: int,
    fp8: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In parts where the weight must be dequantized, and in fp8 whether or not the library knows scales of rows."""
    for limit in ("MOST_ROWS", "MOST_INTEGER_ROWS", "MOST_FP8_ROWS"):
        monkeypatch.setattr(quantized, limit, 4)
    monkeypatch.setattr(quantized, "_EXPANDED", 128 * 10)
    monkeypatch.setattr(quantized, "_divided", None)
    torch.manual_seed(0)
    weight = quantized_weight(
        32, 128, groups, bits, activation_bits, zeros=bits == 4, order=bits == 4, fp8=fp8
    )
    x, bias = torch.randn(20, 128).to(dtype), torch.randn(32).to(dtype)
    kernels = TritonKernels(CPU)
    for way in ("rows", "sums"):
        monkeypatch.setattr(kernels, "_target", kernels._target._replace(fp8=way))
        actual = kernels.linear(x, kernels.prepare_linear(weight), bias)
        assert actual.dtype == dtype
        close(actual, ORACLE.linear(x.float(), weight, bias.float()), dtype)


@pytest.mark.parametrize("largest", [127, 448])
@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_are_rounded_where_they_are_made(dtype: torch.dtype, largest: int) -> None:
    """As `linear.quantize_rows` rounds what the kernels write otherwise."""
    torch.manual_seed(0)
    weight = KERNELS.prepare_linear(quantized_weight(8, 96, 1, 8, 8, fp8=largest == 448))
    x, residual = torch.randn(3, 96).to(dtype), torch.randn(3, 96).to(dtype)
    x[1], residual[1] = 0, 0
    factor, gate_up = torch.rand(96) + 0.5, torch.randn(3, 192).to(dtype)
    normed, summed = KERNELS.add_rms_norm(x, residual.clone(), factor, 1e-6)
    bytes_, again = KERNELS.add_norm_for(x, residual.clone(), factor, 1e-6, weight)
    assert torch.equal(summed, again)
    for plain, rounded in (
        (normed, bytes_),
        (KERNELS.gated_activation(gate_up, "silu"), KERNELS.gated_for(gate_up, "silu", weight)),
    ):
        assert isinstance(rounded, Rounded)
        values, scales = quantize_rows(plain, in_fp8=largest == 448)
        assert torch.equal(rounded.values.float(), values)
        assert torch.equal(rounded.scales, scales[:, 0])


def test_a_device_without_products_of_fp8_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def refuse(*given: object, **named: object) -> None:
        calls.append(given)
        if len(calls) != 2:
            raise (RuntimeError if len(calls) == 1 else ValueError)("not here")

    monkeypatch.setattr(torch, "_scaled_mm", refuse)
    assert way_of(CPU) == "sums"
    assert way_of(CPU) is None


def test_a_row_is_the_same_bit_for_bit_beside_others() -> None:
    torch.manual_seed(0)
    prepared = KERNELS.prepare_linear(quantized_weight(64, 512, 4, 4, 16))
    x = torch.randn(16, 512)
    assert torch.equal(KERNELS.linear(x[3:4], prepared), KERNELS.linear(x, prepared)[3:4])
