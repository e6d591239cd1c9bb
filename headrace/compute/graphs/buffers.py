"""The buffers of graphs: a step's inputs as one array on host and device, and its results.

Every field has the same width, so a step of any size is one contiguous range and one copy:

    places | positions | mapping | …        each `width(lines)` words of eight bytes

The host writes into one of several pinned arrays, because the device may still copy from earlier ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from headrace.compute.shared_keys import MOST_GROUPS

# The device interface for graphs: pinned memory, a queue, and recording of work.
#
# `CudaRecorder` implements it with CUDA. Tests use a fake device that replays on CPU tensors and checks reads.


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


ArrayT = TypeVar("ArrayT")

ALIGNED_WORDS = 16
"""Each field starts at 128 bytes: kernels read aligned memory faster, and Triton compiles for it."""

_RING = 4
"""Number of pinned arrays; with more steps in flight, the host waits for the oldest copy."""


class Fields(NamedTuple, Generic[ArrayT]):
    """The inputs of N lines, [N] each unless said otherwise: arrays on the host, tensors on the device.

    Always: ``places`` int64 of their tokens in the slots' buffer; ``positions`` int64; ``mapping`` int64, where keys
    and values are written (-1: nowhere); ``table_places`` int64 and ``table_blocks`` int32, new blocks of the tables.
    Of at most N rows of attention: ``slots`` int64, and ``contexts`` int32, the keys that the row's last line attends
    to.

    With drafts, as in `Lines`: ``drafts``, ``first`` and ``offsets`` int64; and ``starts`` int32 [N + 1], where each
    row of attention begins. Otherwise each line is a row.

    With shared keys, as in `SharedKeys`: ``shared`` int32, those of each row of attention, ``order`` int32 and
    ``groups`` int32 [MOST_GROUPS * 4].

    If any is sampled, as in `TokenChoice`: ``temperature``, ``min_p``, ``top_p``, ``uniform`` float64, ``top_k`` int64;
    and ``random`` int64, which are sampled. If any is penalized: the fields of `LinePenalties`.
    """

    places: ArrayT
    positions: ArrayT
    mapping: ArrayT
    slots: ArrayT
    contexts: ArrayT
    table_places: ArrayT
    table_blocks: ArrayT
    drafts: ArrayT
    first: ArrayT
    offsets: ArrayT
    temperature: ArrayT
    min_p: ArrayT
    top_k: ArrayT
    top_p: ArrayT
    uniform: ArrayT
    random: ArrayT
    starts: ArrayT
    shared: ArrayT
    order: ArrayT
    groups: ArrayT
    lanes: ArrayT
    repetition: ArrayT
    presence: ArrayT
    frequency: ArrayT
    counted: ArrayT


_FLOATS = frozenset(("temperature", "min_p", "top_p", "uniform", "repetition", "presence", "frequency"))
_SMALL = frozenset(("contexts", "table_blocks", "starts", "shared", "order", "groups"))


def width(lines: int) -> int:
    """Words of a field of ``lines`` lines."""
    return -(-lines // ALIGNED_WORDS) * ALIGNED_WORDS


def words_of(lines: int) -> int:
    """Words of all fields of ``lines`` lines."""
    return len(Fields._fields) * width(lines)


def fields(words: ArrayT, lines: int, view: Callable[[Any, str], Any]) -> Fields[Any]:
    """The fields of ``lines`` lines in an array; ``view`` gives a part of it another type, which it names."""
    parts, each = [], width(lines)
    for number, name in enumerate(Fields._fields):
        kind = "float64" if name in _FLOATS else "int32" if name in _SMALL else "int64"
        count = {"starts": lines + 1, "groups": 4 * MOST_GROUPS}.get(name, lines)
        parts.append(view(words[number * each : (number + 1) * each], kind)[:count])  # type: ignore[index]
    return Fields(*parts)


class Staging:
    """One pinned array, and the mark behind the last copy from it."""

    def __init__(self, words: Tensor) -> None:
        self.words = words
        self.copied: Mark | None = None
        self._fields: dict[int, Fields[Any]] = {}

    def fields(self, lines: int) -> Fields[Any]:
        """The fields of ``lines`` lines, as arrays that share its memory."""
        if lines not in self._fields:
            whole = self.words.numpy()
            self._fields[lines] = fields(whole, lines, lambda part, kind: part.view(np.dtype(kind)))
        return self._fields[lines]


class StepBuffers:
    """Inputs and results of graphs of some ``sizes`` (ascending; ``most`` lines); on the device they never move.

    ``given`` are the inputs of each size, as parts of ``words``.
    ``out`` int64 [2 * most] has the drawn tokens of a graph of N lines in its first N words, and in the next N which of
    them count. ``states`` [most, hidden] are its last hidden states, if the tokens are drawn by other means.
    """

    def __init__(
        self,
        recorder: Recorder,
        device: torch.device,
        sizes: Sequence[int],
        hidden_size: int,
        dtype: torch.dtype,
    ) -> None:
        most = sizes[-1]
        self._recorder = recorder
        self.words = torch.zeros(words_of(most), dtype=torch.int64, device=device)
        self.given: dict[int, Fields[Tensor]] = {
            size: fields(self.words, size, lambda part, kind: part.view(getattr(torch, kind)))
            for size in sizes
        }
        self.out = torch.zeros(2 * most, dtype=torch.int64, device=device)
        self.states = torch.zeros(most, hidden_size, dtype=dtype, device=device)
        self._ring = [Staging(recorder.pinned(words_of(most))) for _ in range(_RING)]
        self._next = 0
        self._free: list[Tensor] = []

    def all(self) -> Sequence[Tensor]:
        """All buffers of the device."""
        return self.words, self.out, self.states

    def stage(self) -> Staging:
        """Pinned memory for the inputs of the next step."""
        staging = self._ring[self._next]
        self._next = (self._next + 1) % len(self._ring)
        if staging.copied is not None:
            staging.copied.synchronize()  # waits only if more steps are in flight than there are arrays
        return staging

    def send(self, staging: Staging, lines: int) -> None:
        """Queue the copy of the inputs of ``lines`` lines."""
        count = words_of(lines)
        self._recorder.copy(self.words[:count], staging.words[:count])
        staging.copied = self._recorder.mark()

    def fetch(self, lines: int, size: int, parts: int) -> Fetched:
        """Queue the copy of the results of the first ``lines`` lines of a graph of ``size`` lines.

        ``parts`` is 1 for the tokens, and 2 to also copy which of them count.
        """
        host = self._free.pop() if self._free else self._recorder.pinned(len(self.out))
        self._recorder.copy(host[: parts * size], self.out[: parts * size])
        return Fetched(host, self._free, self._recorder.mark(), lines, size, parts)


class Fetched:
    """Results of a graph on their way to the host: see `results.Arriving`."""

    def __init__(
        self, host: Tensor, free: list[Tensor], arrived: Mark, lines: int, size: int, parts: int
    ) -> None:
        self._host = host
        self._free = free
        self._arrived = arrived
        self._shape = (lines, size, parts)

    def wait(self) -> list[Tensor]:
        """The tokens int64 [lines], and if fetched, which of them count, bool [lines]; call it once."""
        self._arrived.synchronize()
        lines, size, parts = self._shape
        whole = self._host[: parts * size].view(parts, size)[:, :lines].clone()
        self._free.append(self._host)
        return [whole[0], *(part != 0 for part in whole[1:])]
