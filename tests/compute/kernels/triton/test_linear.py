"""Products with quantized weights in Triton against torch, over formats, groups, zeros and orders."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.compute.kernels.triton import quantized
from headrace.compute.kernels.triton.backend import TritonKernels
from headrace.compute.kernels.triton.quantized import Packed
from tests.compute.kernels.pages import CPU, DTYPES, ORACLE, close
from tests.compute.kernels.weights import quantized_weight

KERNELS = TritonKernels(CPU)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    rows=st.sampled_from([1, 3, 16, 17, 70]),
    outputs=st.sampled_from([24, 64, 200]),
    size=st.sampled_from([(256, 1), (256, 2), (384, 3), (1024, 8), (2048, 1)]),
    bits=st.sampled_from([4, 8]),
    activation_bits=st.sampled_from([16, 8]),
    zeros=st.booleans(),
    order=st.booleans(),
    biased=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
def test_linear(
    rows: int,
    outputs: int,
    size: tuple[int, int],
    bits: Literal[4, 8],
    activation_bits: Literal[8, 16],
    zeros: bool,
    order: bool,
    biased: bool,
    dtype: torch.dtype,
) -> None:
    torch.manual_seed(rows + outputs)
    inputs, groups = size
    zeros = zeros and bits == 4
    weight = quantized_weight(outputs, inputs, groups, bits, activation_bits, zeros=zeros, order=order)
    x = torch.randn(rows, inputs).to(dtype)
    x[0, :] *= 0
    bias = torch.randn(outputs).to(dtype) if biased else None
    prepared = KERNELS.prepare_linear(weight)
    assert isinstance(prepared, Packed)
    actual = KERNELS.linear(x, prepared, bias)
    assert actual.dtype == dtype
    wide = None if bias is None else bias.float()
    close(actual, ORACLE.linear(x.float(), weight, wide), dtype)


@pytest.mark.parametrize(
    ("group", "bits", "activation_bits", "zeros"), [(24, 4, 16, False), (32, 4, 8, False), (64, 8, 16, True)]
)
def test_other_weights_are_dequantized(
    group: int, bits: Literal[4, 8], activation_bits: Literal[8, 16], zeros: bool
) -> None:
    weight = quantized_weight(16, 4 * group, 4, bits, activation_bits, zeros=zeros)
    assert KERNELS.prepare_linear(weight) is weight
    x = torch.randn(3, 4 * group)
    close(KERNELS.linear(x, weight), ORACLE.linear(x, weight), torch.float32)


def test_many_rows_are_dequantized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "MOST_ROWS", 4)
    weight = quantized_weight(16, 128, 2, 4, 16)
    x = torch.randn(5, 128)
    close(KERNELS.linear(x, KERNELS.prepare_linear(weight)), ORACLE.linear(x, weight), torch.float32)


def test_a_row_is_the_same_bit_for_bit_beside_others() -> None:
    torch.manual_seed(0)
    prepared = KERNELS.prepare_linear(quantized_weight(64, 512, 4, 4, 16))
    x = torch.randn(16, 512)
    assert torch.equal(KERNELS.linear(x[3:4], prepared), KERNELS.linear(x, prepared)[3:4])
