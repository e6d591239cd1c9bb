"""Calls that advance in slices: a thread that runs only while another one waits for it.

```
 advance(0.01)  ──>  operation, operation, part of an operation ...   until 0.01 s are over
       ^                                     │
       └─────────────────────────────────────┘   paused between two operations; the next `advance` goes on
```
The function is code of another library, so it cannot yield. A mode of torch sees each of its operations instead. Large
operations are computed in parts. These are always the same, so a result does not depend on the pauses.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from typing import Any, Generic, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

ResultT = TypeVar("ResultT")

PART_PRODUCTS = 1 << 28
"""Products of a part of a linear layer: 3 ms of one core of 2023."""
MIN_ROWS = 64
"""Minimum rows of a part: with fewer, reading the weights takes longer than the products."""
PART_SCORES = 1 << 22
"""Scores of attention above which its heads are computed one by one."""

_BY_HEAD = (torch.matmul, F.softmax, F.scaled_dot_product_attention)
"""The operations of attention, on tensors [B, heads, ...]."""


def rows_of_a_part(elements: int) -> int:
    """The most rows of a part of a linear layer whose weight has so many elements."""
    return max(MIN_ROWS, PART_PRODUCTS // elements)


class Stopped(BaseException):
    """The call has been stopped. No handler of the function catches this."""


class SlicedCall(Generic[ResultT]):
    """A call of ``function`` on the only thread of ``thread``, which runs within `advance`."""

    def __init__(self, thread: ThreadPoolExecutor, function: Callable[[], ResultT]) -> None:
        self._go, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        self._until, self._stopped = 0.0, False
        self.done = False
        self._future = thread.submit(self._run, function)

    def advance(self, seconds: float) -> None:
        """Let it run until the first operation that ends after so many seconds, or until it returns or raises."""
        self._until = time.perf_counter() + seconds
        self._go.release()
        self._paused.acquire()

    def result(self) -> ResultT:
        """What it returned, or raises what it raised, when it is ``done``."""
        return self._future.result()

    def stop(self) -> None:
        """End it where it is paused, or at its next operation; `advance` may not be called any more."""
        self._stopped = True
        self._go.release()

    def _run(self, function: Callable[[], ResultT]) -> ResultT:
        try:
            self._wait()
            with _InParts(self._operated):
                return function()
        finally:
            self.done = True
            self._paused.release()

    def _operated(self) -> None:
        if self._stopped or time.perf_counter() >= self._until:
            self._paused.release()
            self._wait()

    def _wait(self) -> None:
        self._go.acquire()
        if self._stopped:
            raise Stopped


class _InParts(TorchFunctionMode):
    """Calls ``operated`` after each operation, and after each part of a large one."""

    def __init__(self, operated: Callable[[], None]) -> None:
        super().__init__()
        self._operated = operated

    def __torch_function__(
        self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if function is F.linear:
            result: Any = self._linear(*args, **named)
        elif function in _BY_HEAD:
            result = self._by_head(function, args, named)
        else:
            result = function(*args, **named)
        self._operated()
        return result

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """A linear layer, by rows of its input [..., inputs]."""
        most = rows_of_a_part(weight.numel())
        rows = input.reshape(-1, input.shape[-1])
        if len(rows) <= most:
            return F.linear(input, weight, bias)
        parts = self._each(F.linear(part, weight, bias) for part in torch.split(rows, most))
        return torch.cat(parts).reshape(*input.shape[:-1], -1)

    def _by_head(self, function: Any, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """An operation of attention, head by head; as a whole if it is small, or its tensors have other forms."""
        tensors = tuple(takewhile(lambda each: isinstance(each, Tensor), args))
        rest, mask = args[len(tensors) :], named.get("attn_mask")
        dim = rest[0] if rest and function is F.softmax else named.get("dim", -1)
        alike = all(each.dim() == 4 and each.shape[1] == tensors[0].shape[1] for each in tensors)
        masked = mask is not None and mask.dim() == 4 and mask.shape[1] > 1
        if not tensors or not alike or masked or dim != -1:
            return function(*args, **named)
        heads, tokens = tensors[0].shape[1:3]
        if heads * tokens**2 <= PART_SCORES:
            return function(*args, **named)
        parts = zip(*(each.chunk(heads, dim=1) for each in tensors), strict=True)
        return torch.cat(self._each(function(*each, *rest, **named) for each in parts), dim=1)

    def _each(self, parts: Iterator[Tensor]) -> list[Tensor]:
        found = []
        for part in parts:
            found.append(part)
            self._operated()
        return found
