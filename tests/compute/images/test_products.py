"""Kernels in the modules that encode images: equal results, freed weights, and pauses within a product."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from headrace.compute.adopted.modules import held_bytes
from headrace.compute.images import slices
from headrace.compute.images.products import use_kernels
from headrace.compute.images.slices import SlicedCall
from headrace.compute.kernels.reference import TorchKernels

WIDTH, ROWS = 8, 40


def tower() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH)).eval()


def pauses(model: nn.Module, x: Tensor) -> tuple[Tensor, int]:
    """The result for ``x``, and how many slices of one operation it took."""
    with ThreadPoolExecutor(1) as thread:
        call, count = SlicedCall(thread, lambda: torch.inference_mode()(model)(x)), 0
        while not call.done:
            call.advance(0.0)
            count += 1
        return call.result(), count


def test_linear_layers_are_computed_by_kernels_in_parts_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(1, ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    expected, whole, parted = tower()(x), tower(), tower()
    use_kernels(whole, TorchKernels())
    monkeypatch.setattr(slices, "MIN_ROWS", 1)
    monkeypatch.setattr(slices, "PART_PRODUCTS", 2 * WIDTH * WIDTH * 7)  # seven rows
    use_kernels(parted, TorchKernels())
    found, few = pauses(whole, x)
    again, many = pauses(parted, x)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(again, expected)
    assert many >= few + 2 * (ROWS // 7)


def test_weights_that_kernels_hold_are_counted_and_no_longer_in_the_modules() -> None:
    model = tower()
    before = held_bytes(model)
    use_kernels(model, TorchKernels())
    assert next(model.parameters()).isnan().all()
    assert held_bytes(model) >= before
