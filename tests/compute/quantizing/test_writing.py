"""GPTQ and activation-aware scaling: less error at the outputs than the nearest values have."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from headrace.compute.quantization.scheme import W8A8, Scheme, round_to_nearest
from headrace.compute.quantizing.writing import best_factors, gptq

FOUR = Scheme(4, 32, symmetric=False, activation_bits=16)


def inputs(width: int, tokens: int = 400, seed: int = 0) -> Tensor:
    """Features that go together and differ in size, as activations do."""
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(tokens, width // 4, generator=generator) @ torch.randn(
        width // 4, width, generator=generator
    )
    sizes = torch.exp(torch.randn(width, generator=generator))
    return (mixed + 0.5 * torch.randn(tokens, width, generator=generator)) * sizes


def loss(x: Tensor, exact: Tensor, other: Tensor) -> float:
    return float((x @ (other - exact).T).square().sum())


@pytest.mark.parametrize("scheme", [FOUR, W8A8, Scheme(4, 96, True, 16)])
@pytest.mark.parametrize("width", [96, 192, 288])
def test_errors_are_made_up_for(scheme: Scheme, width: int) -> None:
    x, weight = inputs(width), torch.randn(20, width, generator=torch.Generator().manual_seed(1))
    nearest = round_to_nearest(weight, scheme)
    better = gptq(weight, x.T @ x, scheme, torch.float32)
    assert better.shape == nearest.shape
    assert better.group_size == nearest.group_size
    assert loss(x, weight, better.dequantized()) < 0.7 * loss(x, weight, nearest.dequantized())


def test_inputs_that_have_nothing_in_common_are_rounded_to_the_nearest() -> None:
    weight = torch.randn(7, 256)
    better = gptq(weight, torch.eye(256), FOUR, torch.bfloat16)
    nearest = round_to_nearest(weight, FOUR, torch.bfloat16)
    torch.testing.assert_close(better.dequantized(), nearest.dequantized())


def test_a_group_over_two_blocks_is_as_if_there_were_one(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = inputs(192), torch.randn(9, 192)
    scheme = Scheme(4, 96, symmetric=False, activation_bits=16)
    whole, parted = [], []
    for block, found in ((192, whole), (40, parted)):
        monkeypatch.setattr("headrace.compute.quantizing.writing._BLOCK", block)
        found.append(gptq(weight, x.T @ x, scheme, torch.float32).dequantized())
    same = (whole[0] - parted[0]).abs() < 1e-4  # a tie may fall to either side, and later inputs follow
    assert same.float().mean() > 0.9


def test_an_input_that_is_always_zero_gets_no_weight() -> None:
    x, weight = inputs(64), torch.randn(5, 64)
    x[:, 11] = 0
    dense = gptq(weight, x.T @ x, FOUR, torch.float32).dequantized()
    assert torch.isfinite(dense).all()
    assert (dense[:, 11] == 0).all()


def test_factors_favour_what_is_large_and_lessen_the_error() -> None:
    x, weight = inputs(96, seed=4), torch.randn(24, 96, generator=torch.Generator().manual_seed(2))
    moments = x.T @ x
    factors = best_factors(weight, moments, FOUR)
    size = moments.diagonal().sqrt()
    assert torch.corrcoef(torch.stack((factors, size)))[0, 1] > 0.5
    scaled = round_to_nearest(weight * factors, FOUR).dequantized() / factors
    plain = round_to_nearest(weight, FOUR).dequantized()
    assert loss(x, weight, scaled) < 0.8 * loss(x, weight, plain)


def test_inputs_of_one_size_need_no_factors() -> None:
    factors = best_factors(torch.randn(4, 32), torch.eye(32), FOUR)
    torch.testing.assert_close(factors, torch.ones(32))
