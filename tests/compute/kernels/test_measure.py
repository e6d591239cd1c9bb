""""""

from __future__ import annotations

import pytest
import torch

from headrace.compute.kernels import KernelsUnavailable, measure
from headrace.compute.kernels.cpp import CppKernels
from headrace.compute.kernels.experts import Router, Routing
from headrace.compute.kernels.measure import TimedKernels, weight_bytes
from headrace.compute.kernels.packed import WeightMemory, pack, pack_integers
from headrace.compute.kernels.reference import TorchKernels
from tests.compute.kernels.weights import quantized_weight


def test_everything_is_passed_on_and_counted_by_part():
    plain, timed = TorchKernels(), TimedKernels(TorchKernels())
    assert timed.name == plain.name
    x, weight, head = torch.randn(3, 8), torch.randn(5, 8), torch.randn(32, 8)
    assert torch.equal(timed.linear(x, weight), plain.linear(x, weight))
    timed.linear(x, weight, torch.zeros(5))
    timed.logits(x[:1], head)
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
        timed = TimedKernels(kernels)
        timed.linear(
            torch.randn(3, 32).bfloat16(),
            kernels.prepare_linear(quantized_weight(6, 32, 2, 4, activation_bits)),
        )
        assert timed.totals["linear products"] == 3 * 6 * 32
        assert timed.numbers["linear"] == {"int8": planes, "bfloat16": 1}


try:
    KERNELS = CppKernels()
except KernelsUnavailable as reason:
    pytest.skip(str(reason), allow_module_level=True)


def test_a_router_counts_as_a_linear_layer() -> None:
    router = Router(torch.randn(4, 32).bfloat16(), None, Routing(experts=4, chosen=2))
    prepared, timed = KERNELS.prepare_router(router), TimedKernels(KERNELS)
    x = torch.randn(3, 32).bfloat16()
    for found, expected in zip(timed.route(x, prepared), KERNELS.route(x, prepared), strict=True):
        assert torch.equal(found, expected)
    assert timed.totals["linear"] > 0
    assert timed.totals["linear bytes"] == weight_bytes(prepared.packed)
    assert timed.totals["linear products"] == 3 * 4 * 32


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("size", [0, 5, (1 << 17) + 3])
def test_reading_reads_every_word(size: int, threads: int) -> None:
    words = torch.arange(size, dtype=torch.int64)
    assert KERNELS.read(words, threads) == words.sum().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rates_are_reported_per_number_of_threads_and_per_multiplier(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In bfloat16 only some CPUs have oneDNN's product; none has it here.
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    monkeypatch.setattr(measure, "_TRIES", 1)
    monkeypatch.setattr(measure, "_ROWS", 8)
    monkeypatch.setattr(measure, "_READ_BYTES", 1 << 16)
    threads = KERNELS.threads
    KERNELS.threads = 2
    try:
        rates = measure.read_rates(KERNELS)
    finally:
        KERNELS.threads = threads
    assert list(rates) == [1, 2]
    products = measure.product_rates(KERNELS, dtype)
    assert {numbers: set(by) for numbers, by in products.items()} == {
        str(dtype).removeprefix("torch."): {"own", "oneDNN"} if dtype == torch.float32 else {"own"},
        "int8": {"own", "oneDNN"},
    }
    assert all(rate > 0 for by in products.values() for rate in by.values())


def test_a_product_that_takes_long_is_measured_with_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    multiply = torch._int_mm
    monkeypatch.setattr(measure, "_TRIES", 1)
    monkeypatch.setattr(measure, "_ROWS", 48)
    monkeypatch.setattr(torch, "_int_mm", lambda x, weight: (seen.append(len(x)), multiply(x, weight)))
    measure.product_rates(KERNELS, torch.float32)
    monkeypatch.setattr(measure, "_LONG_SECONDS", 0.0)
    measure.product_rates(KERNELS, torch.float32)
    assert seen == [24, 48, 24]
