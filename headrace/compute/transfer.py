"""Copies between host and device that let the host wait in only one place.

On a CPU both directions are views without a copy. On CUDA all arrays of a step are uploaded in one pinned copy, and
results come back by copies queued behind the work. `Download.wait` is the step's only synchronization.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

Array = np.ndarray[tuple[int, ...], np.dtype[np.generic]]


_DTYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float64): torch.float64,
    np.dtype(np.int32): torch.int32,
}


def upload(device: torch.device, *arrays: Array | torch.Tensor) -> list[torch.Tensor]:
    """One-dimensional int64, float64 and int32 arrays as device tensors of the same types, by one copy.

    Tensors are on the device already, and stay what they are: a graph may not copy from memory of the host.
    """
    host = [array for array in arrays if not isinstance(array, torch.Tensor)]
    if len(host) < len(arrays):
        if host:
            raise TypeError("arrays of the host and tensors of the device cannot be uploaded together")
        return [array for array in arrays if isinstance(array, torch.Tensor)]
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in host]
    return split(torch.from_numpy(joined(host)).pin_memory().to(device, non_blocking=True), host)


def joined(arrays: Sequence[Array]) -> Array:
    """All ``arrays`` concatenated as int64, each starting at a whole word."""
    words = np.zeros(sum(map(_words, arrays)), dtype=np.int64)
    begin = 0
    for array in arrays:
        words[begin : begin + _words(array)].view(array.dtype)[: array.size] = array
        begin += _words(array)
    return words


def split(words: torch.Tensor, arrays: Sequence[Array]) -> list[torch.Tensor]:
    """``words`` with the contents of `joined` ``arrays``, split into tensors of their types."""
    parts, begin = [], 0
    for array in arrays:
        part = words[begin : begin + _words(array)].view(_DTYPES[array.dtype])
        parts.append(part[: array.size])
        begin += _words(array)
    return parts


def _words(array: Array) -> int:
    return -(-array.nbytes // 8)


class Line:
    """The elements of a contiguous tensor, at positions that the host names.

    On a CPU numpy moves them: this takes a tenth of the time of a torch operation whose code a step has evicted from
    the caches.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._all = tensor.view(-1)
        self._host = self._all.numpy() if tensor.device.type == "cpu" else None

    def take(self, places: Array) -> torch.Tensor:
        """The elements at ``places`` int64 [N]."""
        if self._host is not None:
            return torch.from_numpy(self._host[places])
        (at,) = upload(self._all.device, places)
        return self._all.index_select(0, at)

    def write(self, begin: int, values: Array) -> None:
        """Write ``values`` [N] from the host, from ``begin`` on."""
        if self._host is not None:
            self._host[begin : begin + values.size] = values
        else:
            (known,) = upload(self._all.device, values)
            self._all[begin : begin + values.size] = known

    def put(self, places: Array, values: torch.Tensor, least: int) -> None:
        """Write ``values`` [N], of any integer type, at ``places`` int64 [N], raised to ``least`` where they are
        below it.
        """
        if self._host is not None:
            self._host[places] = np.maximum(values.numpy(), least)
        else:
            (at,) = upload(self._all.device, places)
            self._all.index_copy_(0, at, values.clamp(min=least).to(self._all.dtype))


class Download:
    """Tensors under way to the host; `wait` returns them in the order in which they were added."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._host: list[torch.Tensor] = []

    def add(self, tensor: torch.Tensor) -> int:
        """Queue a copy of ``tensor``; returns its index in the result of `wait`."""
        if self._event is not None:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            tensor = host.copy_(tensor, non_blocking=True)
        self._host.append(tensor)
        return len(self._host) - 1

    def seal(self) -> None:
        """Mark the end of the queued copies; `wait` does not wait for later work on the device."""
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._device))

    def wait(self) -> list[torch.Tensor]:
        """Block until every queued copy has arrived."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
