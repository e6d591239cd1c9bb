"""Measures how fast this CPU reads memory and multiplies, for comparison in `headrace bench roofline`."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from headrace.compute.kernels import linear
from headrace.compute.kernels.cpp import CppKernels
from headrace.compute.quantization.weight import QuantizedWeight

_READ_BYTES = 512 << 20
"""Far more than the size of any cache."""
_ROWS, _INPUTS, _OUTPUTS = 768, 1024, 4096
_FEW_ROWS = 24
_LONG_SECONDS = 4.0
"""A product of all rows that would take longer is measured with few: the CPU has no instructions for it."""
_TRIES = 5


def read_rates(kernels: CppKernels) -> dict[int, float]:
    """Bytes per second read from memory, by number of threads from 1 to the kernels' own."""
    words = torch.ones(_READ_BYTES // 8, dtype=torch.int64)

    def rate(threads: int) -> float:
        return words.nbytes / _least_seconds(lambda: kernels.read(words, threads))

    return {threads: rate(threads) for threads in range(1, kernels.threads + 1)}


def product_rates(kernels: CppKernels, dtype: torch.dtype) -> dict[str, dict[str, float]]:
    """Operations per second of a large matrix product, in ``dtype`` and in bytes, by the kernels and by oneDNN.

    Without oneDNN's product in ``dtype`` on this CPU, its rate is left out.
    """
    x, weight = torch.randn(_ROWS, _INPUTS).to(dtype), torch.randn(_OUTPUTS, _INPUTS).to(dtype)
    bytes_of_x = torch.randint(-127, 128, (_ROWS, _INPUTS), dtype=torch.int8)
    integers = torch.randint(-127, 128, (_OUTPUTS, _INPUTS), dtype=torch.int8)
    quantized = QuantizedWeight(integers, torch.ones(_OUTPUTS, 1), None, None, 8, 8)
    ours, ours_in_bytes = kernels.prepare_linear(weight), kernels.prepare_linear(quantized)
    turned = integers.T.contiguous()

    def rate(multiply: Callable[[int], object]) -> float:
        rows = min(_FEW_ROWS, _ROWS)
        seconds = _least_seconds(lambda: multiply(rows))
        if seconds * _ROWS < _LONG_SECONDS * rows:
            rows, seconds = _ROWS, _least_seconds(lambda: multiply(_ROWS))
        return 2.0 * rows * _INPUTS * _OUTPUTS / seconds

    rates = {"own": rate(lambda rows: kernels.linear(x[:rows], ours))}
    if linear.has_packed_product(dtype):
        packed = linear.prepare(weight)
        rates["oneDNN"] = rate(lambda rows: linear.apply(x[:rows], packed, None))
    return {
        str(dtype).removeprefix("torch."): rates,
        "int8": {
            "own": rate(lambda rows: kernels.linear(x[:rows], ours_in_bytes)),
            "oneDNN": rate(lambda rows: torch._int_mm(bytes_of_x[:rows], turned)),
        },
    }


def _least_seconds(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(_TRIES):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)
