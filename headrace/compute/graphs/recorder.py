"""What graphs need of a device: memory that it copies from by itself, a queue, and a recording of work.

`CudaRecorder` is CUDA. Tests have a device of their own, which replays on CPU tensors and watches what is read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor


class Mark(Protocol):
    """A place in the queue of a device."""

    def synchronize(self) -> None:
        """Wait until all that was queued before this place is done."""
        ...


class Recorder(Protocol):
    """A device that can replay work. All of its work is done in the order in which it was queued."""

    def pinned(self, words: int) -> Tensor:
        """Memory of the host, int64 [words], that `copy` does not wait for; its content is undefined."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Queue a copy between the host and the device."""
        ...

    def mark(self) -> Mark:
        """The end of the queue."""
        ...

    def join(self) -> None:
        """Let operations of torch from now on come after what has been queued."""
        ...

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Record ``work``, which may run any number of times meanwhile; returns what queues a replay of it.

        A replay repeats the same operations on the same memory: it calls no code of the host.

        Raises:
            RuntimeError: the device cannot record it, for instance because its memory is full.
        """
        ...

    def used_bytes(self) -> int:
        """The device's memory that is in use, by whomever."""
        ...


class CudaRecorder:
    """Graphs of CUDA, which share one pool of memory. They are replayed on torch's current stream."""

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
        # The first run compiles kernels and opens libraries, neither of which can be recorded.
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            work()
        current.wait_stream(self._stream)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may allocate pinned memory meanwhile, which a stricter mode would take for an error.
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
