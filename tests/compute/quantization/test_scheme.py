"""Grids and rounding: nothing is farther from its value than half a step, whatever the weight."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.compute.quantization import scheme
from headrace.compute.quantization.scheme import FP8_W8A8, W4A16, W8A8, Scheme, round_to_nearest

SYMMETRIC = Scheme(4, 32, symmetric=True, activation_bits=16)


@pytest.mark.parametrize(
    ("inputs", "group"), [(4096, 128), (896, 128), (576, 64), (172, 86), (48, 48), (254, 127)]
)
def test_a_group_is_the_most_inputs_that_divide_all(inputs: int, group: int) -> None:
    assert W4A16.group(inputs) == group
    assert W8A8.group(inputs) == inputs


@pytest.mark.parametrize("size", [1e-6, 1.0, 300.0])
def test_fp8_keeps_three_bits_of_each_value(size: float) -> None:
    weight = torch.randn(5, 40, generator=torch.Generator().manual_seed(0)) * size
    quantized = round_to_nearest(weight, FP8_W8A8)
    assert quantized.in_fp8
    assert quantized.kind == "fp8 W8A8"
    largest = weight.abs().amax(1, keepdim=True)
    # Numbers below 2⁻⁶ of the scale have the steps of this one.
    allowed = torch.maximum(weight.abs() / 16, largest / 448 * 2**-10) * 1.001
    assert ((quantized.dequantized() - weight).abs() <= allowed).all()


@settings(max_examples=60, derandomize=True)
@given(
    chosen=st.sampled_from([W8A8, W4A16, SYMMETRIC]),
    outputs=st.integers(1, 5),
    half=st.integers(1, 100),
    shift=st.sampled_from([-3.0, 0.0, 0.5]),
    size=st.sampled_from([1e-6, 1.0, 300.0]),
    seed=st.integers(0, 99),
)
def test_no_value_is_farther_than_half_a_step(
    chosen: Scheme, outputs: int, half: int, shift: float, size: float, seed: int
) -> None:
    weight = (torch.randn(outputs, 2 * half, generator=torch.Generator().manual_seed(seed)) + shift) * size
    quantized = round_to_nearest(weight, chosen)
    assert quantized.shape == weight.shape
    assert quantized.group_size == chosen.group(2 * half)
    steps = quantized.scales.repeat_interleave(quantized.group_size, 1)
    assert ((quantized.dequantized() - weight).abs() <= steps * 0.501).all()
    assert (steps.amax(1) * (1 << chosen.bits - 1) < 4.1 * weight.abs().amax(1)).all()


def test_what_is_zero_stays_zero_also_beside_large_values() -> None:
    weight = torch.zeros(3, 64)
    weight[1, 5], weight[2] = 40.0, torch.linspace(1.0, 9.0, 64)
    weight[2, 7] = 0.0
    for chosen in (W8A8, W4A16, SYMMETRIC):
        dense = round_to_nearest(weight, chosen).dequantized()
        assert (dense[weight == 0] == 0).all()
        assert (dense[0] == 0).all()


def test_an_asymmetric_grid_is_finer_where_a_group_is_skewed() -> None:
    weight = torch.rand(4, 128) + 0.01
    finest = [round_to_nearest(weight, each).scales.max() for each in (W4A16, Scheme(4, 128, True, 16))]
    assert finest[0] < 0.55 * finest[1]


def test_scales_can_be_kept_to_what_a_file_can_hold() -> None:
    weight = torch.randn(8, 64)
    quantized = round_to_nearest(weight, W8A8, torch.bfloat16)
    assert torch.equal(quantized.scales, quantized.scales.bfloat16().float())
    assert quantized.integers().float().sub(weight / quantized.scales).abs().max() <= 0.51


def test_rounding_a_large_weight_in_parts_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(37, 24)
    whole = [round_to_nearest(weight, each) for each in (W8A8, W4A16)]
    monkeypatch.setattr(scheme, "_ROWS_ELEMENTS", 24 * 5)
    for before, each in zip(whole, (W8A8, W4A16), strict=True):
        after = round_to_nearest(weight, each)
        assert all(torch.equal(a, b) for a, b in zip(before.tensors(), after.tensors(), strict=True))


def test_half_bytes_need_an_even_number_of_inputs() -> None:
    with pytest.raises(ValueError, match="even number of inputs, got 33"):
        round_to_nearest(torch.zeros(4, 33), W4A16)
