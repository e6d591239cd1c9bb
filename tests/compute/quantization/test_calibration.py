"""Moments are taken of what was asked for, on as much memory as was said, and no further than they need."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.compute.kernels.reference import TorchKernels
from headrace.compute.model.families import parse_config
from headrace.compute.model.hub import read_config, resolve_folder
from headrace.compute.model.weights import DecoderWeights, load_weights
from headrace.compute.quantization import calibration
from headrace.compute.quantization.calibration import LINEARS, Calibration, input_moments
from headrace.compute.quantization.scheme import SCHEMES
from headrace.compute.quantization.writing import write_quantized

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
    monkeypatch.setattr(calibration, "_MOMENTS_BYTES", 1)
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
