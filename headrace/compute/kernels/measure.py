"""Measurements for `headrace bench roofline`: the parts of a forward pass, and what this CPU can do.

`TimedKernels` forward every call and measure the time of each part. The bytes and operations of
linear layers are those of their weights, however these are packed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.compute.batch import Batch
from headrace.compute.device import huge_memory
from headrace.compute.kernels import Activation, Kernels, Pages, experts, linear
from headrace.compute.kernels.cpp import CppKernels
from headrace.compute.kernels.experts import AddOfTokens, Mixture, Mlp
from headrace.compute.kernels.native_calls import NativeStack
from headrace.compute.kernels.native_experts import NativeExperts, NativeRouter
from headrace.compute.kernels.packed import PackedIntegers, PackedWeight
from headrace.compute.kernels.stack import Stack, apply
from headrace.compute.quantization.weight import QuantizedWeight

_ATTENTION = frozenset({"plan_attention", "rope_write_kv", "paged_attention"})


class TimedKernels:
    """`Kernels` around other kernels. ``totals`` sums seconds by part: ``linear``, ``head``, ``attention``,
    ``elementwise``. What a stack has read is counted when they are read, so that a step does not take the time for it.

    ``linear bytes`` and ``linear products`` are the size of the weights and the number of multiplications.
    ``numbers["linear"]`` lists the number types that may be used, and how many products of each a multiplication is:
    activations in 16 bits are two bytes for quantized weights. The same holds for the head.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        parts = ("linear", "head", "attention", "elementwise")
        counts = [f"{part} {count}" for part in parts[:2] for count in ("bytes", "products")]
        self.numbers: dict[str, dict[str, int]] = {}
        self._totals = dict.fromkeys((*parts, *counts), 0.0)
        self._uncounted: Callable[[], None] | None = None
        # [experts, 2] of each mixture: bytes, and products of a row
        self._expert_sizes: dict[NativeExperts, Tensor] = {}

    @property
    def totals(self) -> dict[str, float]:
        """The sums so far."""
        if self._uncounted is not None:
            self._uncounted()
            self._uncounted = None
        return self._totals

    def __getattr__(self, name: str) -> Any:
        inner: Callable[..., Any] = getattr(self._kernels, name)
        if not callable(inner):
            return inner
        part = "attention" if name in _ATTENTION else "elementwise"

        def timed(*given: Any) -> Any:
            began = time.perf_counter()
            result = inner(*given)
            self._totals[part] += time.perf_counter() - began
            return result

        setattr(self, name, timed)
        return timed

    def run_stack(self, stack: Stack | NativeStack, batch: Batch, pages: Sequence[Pages]) -> Tensor:
        """In one call if the kernels have one, which times its parts itself; else call by call."""
        if isinstance(stack, Stack):
            return apply(self, stack, batch, pages)
        totals, layers = self.totals, stack.stack.layers
        mixtures = [layer.feed.each for layer in layers if isinstance(layer.feed, Mixture)]
        before = [each.loads.numpy().copy() for each in mixtures]
        seconds = torch.zeros(3, dtype=torch.float64)
        out: Tensor = self._kernels.run_stack(stack, batch, pages, seconds)  # type: ignore[call-arg]
        for part, spent in zip(("linear", "attention", "elementwise"), seconds.tolist(), strict=True):
            totals[part] += spent
        rows_of = [each.loads.numpy() - loads for each, loads in zip(mixtures, before, strict=True)]

        def count() -> None:
            for layer in layers:
                wanted = len(batch.logits_indices) if layer is layers[-1] else len(batch.tokens)
                beside = layer.beside and layer.beside.first
                for each in layer.linears:
                    first = any(each is other for other in (layer.qkv, layer.gates, beside))
                    rows, weight = len(batch.tokens) if first else wanted, each.weight
                    self._count("linear", weight, rows * weight.inputs * weight.outputs, stack.stack.dtype)
                if isinstance(layer.feed, Mixture):
                    self._count_router(layer.feed.router, wanted)
            for mixture, computed in zip(mixtures, rows_of, strict=True):
                self._count_experts(mixture, computed)

        self._uncounted = count
        return out

    def prepare_greedy(self, stack: Any, head: Any) -> None:
        """No call of both: stack and head are timed apart."""

    def route(self, x: Tensor, router: Any) -> tuple[Tensor, Tensor]:
        if not isinstance(router, NativeRouter):
            return experts.route(x, router)
        began = time.perf_counter()
        chosen = self._kernels.route(x, router)
        self._totals["linear"] += time.perf_counter() - began
        self._count_router(router, len(x))
        return chosen

    def experts(
        self,
        x: Tensor,
        indices: Tensor,
        weights: Tensor,
        each: Any,
        activation: Activation,
        add: AddOfTokens | None = None,
    ) -> Tensor:
        """In one call if the kernels have one; else each expert's linear layers are timed."""
        if not isinstance(each, NativeExperts):
            return experts.apply(self, x, indices, weights, each, activation, add)
        began, before = time.perf_counter(), each.loads.numpy().copy()
        out = self._kernels.experts(x, indices, weights, each, activation, add)
        self._totals["linear"] += time.perf_counter() - began
        self._count_experts(each, each.loads.numpy() - before)
        return out

    def mlp(self, x: Tensor, of: Mlp, activation: Activation) -> Tensor:
        """In one call if the weights allow it; else linear layers and activation are timed one by one."""
        if not all(isinstance(each.weight, PackedWeight) for each in of):
            return experts.mlp(self, x, of, activation)
        began = time.perf_counter()
        out = self._kernels.mlp(x, of, activation)
        self._totals["linear"] += time.perf_counter() - began
        for each in of:
            self._count("linear", each.weight, len(x) * each.weight.inputs * each.weight.outputs, x.dtype)
        return out

    def linear(self, x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
        return self._timed("linear", self._kernels.linear, x, weight, bias)

    def logits(self, x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
        return self._timed("head", self._kernels.logits, x, weight, bias)

    def likeliest_outputs(self, x: Tensor, weight: Any) -> Tensor:
        if not isinstance(weight, PackedWeight):
            return self._kernels.likeliest(self.logits(x, weight))
        began = time.perf_counter()
        tokens = self._kernels.likeliest_outputs(x, weight)
        self._totals["head"] += time.perf_counter() - began
        self._count("head", weight, len(x) * weight.inputs * weight.outputs, x.dtype)
        if weight.screen is not None:  # what a step must read then, and multiply in bytes
            self._totals["head bytes"] += weight.screen.nbytes - weight_bytes(weight)
            self.numbers["head"] = {"int8": 1, str(x.dtype).removeprefix("torch."): 1}
        return tokens

    def _timed(
        self, part: str, multiply: Callable[..., Tensor], x: Tensor, weight: Any, bias: Tensor | None
    ) -> Tensor:
        began = time.perf_counter()
        out = multiply(x, weight, bias)
        self._totals[part] += time.perf_counter() - began
        self._count(part, weight, x.numel() * out.shape[1], x.dtype)
        return out

    def _count_router(self, router: NativeRouter, rows: int) -> None:
        weight = router.packed
        self._totals["linear bytes"] += weight_bytes(weight)
        self._totals["linear products"] += rows * weight.inputs * weight.outputs

    def _count_experts(self, each: NativeExperts, rows_of: np.ndarray[Any, Any]) -> None:
        """Count the linear layers of the experts that have computed rows: how many each, int64 [experts]."""
        if (sizes := self._expert_sizes.get(each)) is None:
            weights = [(mlp.gate_up.weight, mlp.down.weight) for mlp in each.each]
            sizes = torch.tensor(
                [
                    [sum(map(weight_bytes, pair)), sum(weight.inputs * weight.outputs for weight in pair)]
                    for pair in weights
                ],
                dtype=torch.float64,
            )
            self._expert_sizes[each] = sizes
            self._note_numbers("linear", weights[0][0], each.dtype)
        rows = torch.from_numpy(rows_of).double()
        self._totals["linear bytes"] += float((rows > 0).double() @ sizes[:, 0])
        self._totals["linear products"] += float(rows @ sizes[:, 1])

    def _count(self, part: str, weight: Any, products: int, dtype: torch.dtype) -> None:
        self._note_numbers(part, weight, dtype)
        self._totals[f"{part} bytes"] += weight_bytes(weight)
        self._totals[f"{part} products"] += products

    def _note_numbers(self, part: str, weight: Any, dtype: torch.dtype) -> None:
        in_bytes = {"int8": weight.planes(dtype)} if isinstance(weight, PackedIntegers) else {}
        self.numbers[part] = {**in_bytes, str(dtype).removeprefix("torch."): 1}


def weight_bytes(weight: Any) -> int:
    """The size of a prepared weight in memory."""
    if isinstance(weight, Tensor | QuantizedWeight):
        return weight.nbytes
    return sum(weight_bytes(part) for part in weight if isinstance(part, Tensor | tuple))


# Measures how fast this CPU reads memory and multiplies, for comparison in `headrace bench roofline`.

_READ_BYTES = 512 << 20
"""Far more than the size of any cache."""
_ROWS, _INPUTS, _OUTPUTS = 768, 1024, 4096
_FEW_ROWS = 24
_LONG_SECONDS = 4.0
"""A product of all rows that would take longer is measured with few: the CPU has no instructions for it."""
_TRIES = 5


def read_rates(kernels: CppKernels) -> dict[int, float]:
    """Bytes per second read from memory, by number of threads from 1 to the kernels' own.

    The memory is of the kind that packed weights are in: with small pages, reading it was slower than a step.
    """
    words = huge_memory(_READ_BYTES).view(torch.int64).fill_(1)

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
