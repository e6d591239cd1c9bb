from __future__ import annotations

import pytest
import torch

from headrace.compute.kernels import KernelsUnavailable, measure
from headrace.compute.kernels.cpp import CppKernels

try:
    KERNELS = CppKernels()
except KernelsUnavailable as reason:
    pytest.skip(str(reason), allow_module_level=True)


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
