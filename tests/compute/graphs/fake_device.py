"""A device of CPU tensors that treats graphs as CUDA does, and says what CUDA would not say.

- Copies and replays are queued, and run when the host waits for them: pinned memory that is written too early, or read
  too early, gives other tokens.
- A replay runs the recorded work again. It must do the same operations with the same numbers on the same memory as when
  it was recorded, and read nothing else: a graph would not follow a choice that the host makes anew.
- Meanwhile the host's arrays hold garbage, and so do the outputs before each replay.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields as dataclass_fields
from dataclasses import is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

GARBAGE = -7_777_777

Arrays = Callable[[], Sequence[np.ndarray[Any, Any]]]
Tensors = Callable[[], Sequence[Tensor]]


class Left(AssertionError):
    """A replay did what a graph cannot do."""


@contextmanager
def untraced() -> Iterator[None]:
    """What stands for a kernel of the device: its operations are not those of a graph."""
    with _disable_current_modes():
        yield


class Trace(TorchDispatchMode):
    """The operations of a run: names, shapes and numbers, and where their inputs were.

    Memory is named by its address if it existed before, else by the order in which the run made it.
    """

    def __init__(self, known: set[int]) -> None:
        super().__init__()
        self.operations: list[tuple[Any, ...]] = []
        self._known = known
        self._made: dict[int, int] = {}
        self._kept: list[Tensor] = []  # so that no later tensor has the address of an earlier one

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = str(func)
        if "_local_scalar_dense" in name or "nonzero" in name:
            raise Left(f"{name}: a graph cannot wait for a number")
        given = [self._named(name, each) for each in (*args, *kwargs.values())]
        result = func(*args, **kwargs)
        for each in result if isinstance(result, tuple | list) else (result,):
            if isinstance(each, Tensor) and each.numel():
                self._kept.append(each)
                address = each.untyped_storage().data_ptr()
                if address not in self._known:
                    self._made.setdefault(address, len(self._made))
        self.operations.append((name, *given))
        return result

    def call(self, name: str, args: Sequence[Any]) -> None:
        """A kernel is launched with these arguments."""
        self.operations.append((name, *(self._named(name, each) for each in args)))

    def _named(self, name: str, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return tuple(self._named(name, each) for each in value)
        if not isinstance(value, Tensor):
            return repr(value)
        if value.is_mkldnn:  # a weight in the layout of a CPU's library
            return ("weight", id(value))
        where: object = None
        address = value.untyped_storage().data_ptr()
        if address in self._made:
            where = ("made", self._made[address])
        elif address in self._known:
            where = address
        elif value.dim() == 0:
            where = ("number", value.item())  # torch's form of a number of the host, which a graph would keep
        elif value.numel():
            raise Left(f"{name}: reads memory [{tuple(value.shape)}] that is none of the buffers")
        return (where, tuple(value.shape), value.stride(), value.storage_offset(), str(value.dtype))


class Place:
    """See `buffers.Mark`."""

    def __init__(self, device: FakeDevice, number: int) -> None:
        self._device, self._number = device, number

    def synchronize(self) -> None:
        self._device.run(self._number)


class FakeDevice:
    """See `buffers.Recorder`. ``room`` graphs can be recorded before its memory is full.

    Only if ``traced``, replays are compared with what was recorded, operation by operation.

    Tell it after construction what it needs for its checks: ``buffers`` are the tensors that graphs may read,
    ``outputs`` those that they must write, ``outside`` arrays of the host.
    """

    def __init__(self, room: int = 1 << 30, traced: bool = True) -> None:
        self.buffers: Tensors = lambda: ()
        self.outputs: Tensors = lambda: ()
        self.outside: Arrays = lambda: ()
        self.replays = 0
        self.recorded = 0
        self.trace: Trace | None = None
        self._room = room
        self._traced = traced
        self._queue: deque[Callable[[], None]] = deque()
        self._done = 0
        self._queued = 0

    def pinned(self, words: int) -> Tensor:
        return torch.full((words,), GARBAGE, dtype=torch.int64)

    def copy(self, target: Tensor, source: Tensor) -> None:
        self._add(lambda: target.copy_(source))

    def mark(self) -> Place:
        return Place(self, self._queued)

    def join(self) -> None:
        self.run(self._queued)

    def used_bytes(self) -> int:
        return self.recorded << 20

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        self.join()
        if self.recorded == self._room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.\nAnd more.")
        self.recorded += 1
        recorded = self._run(work)
        return lambda: self._add(lambda: self._replay(work, recorded))

    def run(self, number: int) -> None:
        """Work until ``number`` entries of the queue are done."""
        while self._done < number:
            entry = self._queue.popleft()
            self._done += 1
            with torch.inference_mode():
                entry()

    def _add(self, entry: Callable[[], None]) -> None:
        self._queue.append(entry)
        self._queued += 1

    def _run(self, work: Callable[[], None]) -> list[tuple[Any, ...]]:
        if not self._traced:
            with torch.inference_mode():
                work()
            return []
        known = {each.untyped_storage().data_ptr() for each in self.buffers() if not each.is_mkldnn}
        self.trace = trace = Trace(known)
        with torch.inference_mode(), trace:
            work()
        self.trace = None
        return trace.operations

    def _replay(self, work: Callable[[], None], recorded: list[tuple[Any, ...]]) -> None:
        self.replays += 1
        for output in self.outputs():
            output.fill_(GARBAGE)
        outside = list(self.outside())
        kept = [array.copy() for array in outside]
        for array in outside:
            array.fill(array.dtype.type(GARBAGE) if array.dtype.kind != "V" else np.zeros(1, array.dtype)[0])
        try:
            again = self._run(work)
        finally:
            for array, content in zip(outside, kept, strict=True):
                array[...] = content
        for one, other in zip(recorded, again, strict=False):
            if one != other:
                raise Left(f"recorded {one}, but replayed {other}")
        if len(recorded) != len(again):
            raise Left(f"recorded {len(recorded)} operations, but replayed {len(again)}")


def trace_triton(device: FakeDevice, patch: Any) -> None:
    """Trace Triton's kernels with their arguments, in place of what the interpreter does inside of them."""
    from triton.runtime.interpreter import InterpretedFunction

    run = InterpretedFunction.run

    def noted(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        if device.trace is not None:
            device.trace.call(kernel.fn.__name__, (*args, *(kwargs[name] for name in sorted(kwargs))))
        with untraced():
            return run(kernel, *args, **kwargs)

    patch.setattr(InterpretedFunction, "run", noted)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors of a value of tuples, lists and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from tensors_in(each)
    elif is_dataclass(value):
        for field in dataclass_fields(value):
            yield from tensors_in(getattr(value, field.name))
