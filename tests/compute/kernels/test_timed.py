from __future__ import annotations

import pytest
import torch

from headrace.compute.kernels import KernelsUnavailable
from headrace.compute.kernels.cpp import CppKernels
from headrace.compute.kernels.measure import TimedKernels, weight_bytes
from headrace.compute.kernels.packed import WeightMemory, pack, pack_integers
from headrace.compute.kernels.reference import TorchKernels
from tests.compute.kernels.weights import quantized_weight


def test_everything_is_passed_on_and_counted_by_part():
    plain, timed = TorchKernels(), TimedKernels(TorchKernels(), 32)
    assert timed.name == plain.name
    x, weight, head = torch.randn(3, 8), torch.randn(5, 8), torch.randn(32, 8)
    assert torch.equal(timed.linear(x, weight), plain.linear(x, weight))
    timed.linear(x, weight, torch.zeros(5))
    timed.linear(x[:1], head)
    torch.testing.assert_close(timed.rms_norm(x, torch.ones(8), 1e-5), plain.rms_norm(x, torch.ones(8), 1e-5))
    totals = timed.totals
    assert (totals["linear bytes"], totals["head bytes"]) == (2 * 5 * 8 * 4, 32 * 8 * 4)
    assert (totals["linear products"], totals["head products"]) == (2 * 3 * 5 * 8, 32 * 8)
    assert totals["linear"] > 0
    assert totals["head"] > 0
    assert totals["elementwise"] > 0
    assert totals["attention"] == 0
    assert timed.numbers == {"linear": {"float32": 1}, "head": {"float32": 1}}


def test_weights_take_what_their_layout_takes():
    memory = WeightMemory()
    assert weight_bytes(pack(torch.randn(6, 4), 4, memory)) == 8 * 4 * 4
    weight = quantized_weight(6, 32, 2, 4, 16)
    assert weight_bytes(pack_integers(weight, 4, memory)) == 8 * 16 + 8 * 2 * 4
    assert weight_bytes(weight) == weight.nbytes


def test_a_multiplication_is_one_whatever_bytes_make_of_it():
    try:
        kernels = CppKernels()
    except KernelsUnavailable as reason:
        pytest.skip(str(reason))
    for activation_bits, planes in ((8, 1), (16, 2)):
        timed = TimedKernels(kernels, 0)
        timed.linear(
            torch.randn(3, 32).bfloat16(),
            kernels.prepare_linear(quantized_weight(6, 32, 2, 4, activation_bits)),
        )
        assert timed.totals["linear products"] == 3 * 6 * 32
        assert timed.numbers["linear"] == {"int8": planes, "bfloat16": 1}
