"""Kernels that pass everything on and sum what it took: where the time of a forward goes.

The bytes and operations of linear layers are those of the weights they are given, whatever these are packed as.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from headrace.compute.batch import Batch
from headrace.compute.kernels import Kernels, Pages
from headrace.compute.kernels.native_stack import NativeStack
from headrace.compute.kernels.packed import PackedIntegers
from headrace.compute.kernels.stack import Stack, apply
from headrace.compute.quantization.weight import QuantizedWeight

_ATTENTION = frozenset({"plan_attention", "rope_write_kv", "paged_attention"})


class TimedKernels:
    """`Kernels` around others. ``totals`` sums seconds by part: ``linear``, ``head``, ``attention``, ``elementwise``.

    ``linear bytes`` and ``linear products`` beside them are what the weights take and how many multiplications there
    were, of ``numbers["linear"]``; so for the head, which is the linear layer of ``head_outputs`` outputs.
    """

    def __init__(self, kernels: Kernels, head_outputs: int) -> None:
        self._kernels = kernels
        self._head_outputs = head_outputs
        parts = ("linear", "head", "attention", "elementwise")
        counts = [f"{part} {count}" for part in parts[:2] for count in ("bytes", "products")]
        self.numbers: dict[str, str] = {}
        self.totals = dict.fromkeys((*parts, *counts), 0.0)

    def __getattr__(self, name: str) -> Any:
        inner: Callable[..., Any] = getattr(self._kernels, name)
        if not callable(inner):
            return inner
        part = "attention" if name in _ATTENTION else "elementwise"

        def timed(*given: Any) -> Any:
            began = time.perf_counter()
            result = inner(*given)
            self.totals[part] += time.perf_counter() - began
            return result

        setattr(self, name, timed)
        return timed

    def run_stack(
        self,
        stack: Stack | NativeStack,
        batch: Batch,
        pages: Sequence[Pages],
    ) -> Tensor:
        """Layers call by call, so that each is timed, even where the kernels would run them all at once."""
        plain = stack.stack if isinstance(stack, NativeStack) else stack
        return apply(self, plain, batch, pages)

    def linear(self, x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
        began = time.perf_counter()
        out = self._kernels.linear(x, weight, bias)
        seconds = time.perf_counter() - began
        part = "head" if out.shape[1] == self._head_outputs else "linear"
        integers = isinstance(weight, PackedIntegers)
        self.numbers[part] = "int8" if integers else str(x.dtype).removeprefix("torch.")
        planes = weight.planes(x.dtype) if integers else 1
        self.totals[part] += seconds
        self.totals[f"{part} bytes"] += weight_bytes(weight)
        self.totals[f"{part} products"] += planes * x.numel() * out.shape[1]
        return out


def weight_bytes(weight: Any) -> int:
    """What a prepared weight takes in memory."""
    if isinstance(weight, Tensor | QuantizedWeight):
        return weight.nbytes
    return sum(weight_bytes(part) for part in weight if isinstance(part, Tensor | tuple))
