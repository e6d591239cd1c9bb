"""GPTQ and activation-aware scaling: less error at the outputs than the nearest values have."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from headrace.compute import quantizing
from headrace.compute.checkpoint import ModelError
from headrace.compute.kernels.reference import TorchKernels
from headrace.compute.model.families import parse_config
from headrace.compute.model.hub import read_config, resolve_folder
from headrace.compute.model.spec import LatentSpec, PerLayerSpec
from headrace.compute.model.weights import DecoderWeights, load_weights
from headrace.compute.quantization.scheme import SCHEMES, W8A8, Scheme, round_to_nearest
from headrace.compute.quantizing import (
    LINEARS,
    Calibration,
    Quality,
    Reader,
    best_factors,
    compare,
    gptq,
    input_moments,
    write_quantized,
)

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
        monkeypatch.setattr("headrace.compute.quantizing._BLOCK", block)
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


FOLDER = resolve_folder("builtin")
SPEC = parse_config(read_config(FOLDER))
WINDOWS = [list(range(8, 40)), list(range(50, 70))]


def load() -> DecoderWeights:
    return load_weights(FOLDER, SPEC, torch.float32, "cpu")


@pytest.mark.parametrize("last", [0, 2])
def test_a_reading_ends_where_the_last_layer_asked_for_does(
    monkeypatch: pytest.MonkeyPatch, last: int
) -> None:
    computed: list[Tensor] = []
    linear = TorchKernels.linear

    def watched(self: TorchKernels, x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
        computed.append(x)
        return linear(self, x, weight, bias)

    monkeypatch.setattr(TorchKernels, "linear", watched)
    found = input_moments(SPEC, load(), WINDOWS, [last])
    assert found.keys() == {(last, name) for name in LINEARS}
    before = len(LINEARS) * (last + 1) - 1  # what the last linear gives is not computed, and there is no head
    assert len(computed) == len(WINDOWS) * before


def test_the_model_s_last_layer_is_read_at_every_position() -> None:
    """Where only the last position is wanted, the last layer goes on with that one alone."""
    shorter = replace(SPEC, num_layers=2, layers=SPEC.layers[:2])
    weights = load()
    del weights.layers[2:]
    assert_same = torch.testing.assert_close
    found = input_moments(shorter, weights, WINDOWS, [1])
    for place, moments in input_moments(SPEC, load(), WINDOWS, [1]).items():
        assert_same(found[place], moments)


def test_old_moments_are_gone_when_the_next_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantizing, "_MOMENTS_BYTES", 1)
    given: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def counting() -> DecoderWeights:
        alive.append(sum(moments() is not None for moments in given))
        return load()

    class Watched(Calibration):
        def of(self, layer: int) -> dict[str, Tensor]:
            moments = super().of(layer)
            given.extend(map(weakref.ref, moments.values()))
            return moments

    calibrated = Watched(SPEC, counting, WINDOWS)
    write_quantized(FOLDER, tmp_path / "few", read_config(FOLDER), SPEC, SCHEMES["int8"], "gptq", calibrated)
    assert alive == [0, 0, 0]


def test_layers_with_more_than_the_writer_knows_are_refused(tmp_path: Path) -> None:
    """Else the written model would lack their tensors."""
    for other in (
        replace(SPEC, layer_scales=True),
        replace(SPEC, per_layer=PerLayerSpec(SPEC.vocab_size, 8)),
        replace(SPEC, latent=LatentSpec(16, 8, 8, 8, None)),
        replace(SPEC, layers=(*SPEC.layers[:-1], replace(SPEC.layers[-1], values_from_keys=True))),
    ):
        plain = Calibration(other, load, WINDOWS)
        with pytest.raises(ModelError, match="layers differ in heads"):
            write_quantized(FOLDER, tmp_path / "few", {}, other, SCHEMES["int8"], "rtn", plain)
    assert not (tmp_path / "few").exists()


class Parrot:
    """Gives token 0 the same odds everywhere, and shares the rest among two others."""

    def __init__(self, odds: float) -> None:
        self._row = torch.tensor([odds, (1 - odds) / 2, (1 - odds) / 2]).log()

    def logits(self, tokens: Sequence[int], wanted: int) -> Tensor:
        return self._row.expand(wanted, 3) + 7.0  # logits are known up to a constant


def compared(plain: float, other: float, *windows: list[int]) -> Quality:
    return compare(cast(Reader, Parrot(plain)), cast(Reader, Parrot(other)), windows)


def test_a_model_is_as_good_as_itself() -> None:
    quality = compared(0.5, 0.5, [0, 0, 1], [1, 2])
    assert quality.tokens == 3
    assert quality.plain_perplexity == pytest.approx((0.5 * 0.25 * 0.25) ** (-1 / 3))
    assert quality.growth == pytest.approx(0)
    assert quality.divergence == pytest.approx(0, abs=1e-6)
    assert quality.agreement == 1
    assert not quality.faults()


def test_numbers_are_those_of_the_definitions() -> None:
    quality = compared(0.5, 0.2, [1, 0, 0, 0])
    assert quality.perplexity == pytest.approx(5)
    assert quality.growth == pytest.approx(1.5)
    expected = 0.5 * math.log(0.5 / 0.2) + 0.5 * math.log(0.25 / 0.4)
    assert quality.divergence == pytest.approx(expected, rel=1e-4)
    assert quality.agreement == 0
    assert quality.faults() == [
        "perplexity grew by 150.0%, more than 5%",
        f"divergence is {expected:.3f} nats a token, more than 0.1",
    ]


def test_what_is_not_a_number_is_not_good() -> None:
    assert len(Quality(2.0, math.nan, math.nan, 0.0, 9).faults()) == 2
