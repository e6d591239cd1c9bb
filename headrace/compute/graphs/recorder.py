"""The device interface for graphs: pinned memory, a queue, and recording of work.

`CudaRecorder` implements it with CUDA. Tests use a fake device that replays on CPU tensors and checks reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class Mark(Protocol):
    """A position in the queue of a device."""

    def synchronize(self) -> None:
        """Wait until all work before this position is done."""
        ...


class Recorder(Protocol):
    """A device that can replay work. All work runs in the order in which it was queued."""

    def pinned(self, words: int) -> Tensor:
        """Uninitialized pinned host memory, int64 [words], from and to which `copy` is asynchronous."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy between the host and the device."""
        ...

    def mark(self) -> Mark:
        """The end of the queue."""
        ...

    def join(self) -> None:
        """Make later torch operations wait for all queued work."""
        ...

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record ``work``, which may be run several times meanwhile; returns a function that queues a replay.

        A replay repeats the same operations on the same memory, without running host code.

        Raises:
            RuntimeError: the device cannot record it, for instance because its memory is full.
        """
        ...

    def used_bytes(self) -> int:
        """Memory of the device in use by all processes."""
        ...


class CudaRecorder:
    """CUDA graphs that share one memory pool; they are replayed on torch's current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def pinned(self, words: int) -> Tensor:
        return torch.empty(words, dtype=torch.int64, pin_memory=True)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def mark(self) -> Mark:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def join(self) -> None:
        pass  # the queue is torch's current stream

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        # The first run compiles kernels and initializes libraries, which cannot be recorded.
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            work()
        current.wait_stream(self._stream)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may allocate pinned memory meanwhile, which a stricter capture mode rejects.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                work()
        except RuntimeError:
            torch.cuda.set_stream(
                current
            )  # torch leaves its own stream in place if ending the capture fails, too
            raise
        replay: Callable[[], None] = graph.replay
        return replay

    def used_bytes(self) -> int:
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free
