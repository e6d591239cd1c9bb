"""Copies between host and device that never make the host wait until the one place where it must.

On a CPU both directions are free views. On CUDA everything of a step goes up in one pinned copy, and results
come down by copies that are queued behind the work; `Download.wait` is the step's only synchronization.
Knows nothing of plans or models.
"""

from __future__ import annotations

import numpy as np
import torch

Array = np.ndarray[tuple[int, ...], np.dtype[np.generic]]


def upload(device: torch.device, *arrays: Array) -> list[torch.Tensor]:
    """One-dimensional int64 and float64 arrays as device tensors of the same types, by one copy."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    words = np.concatenate([np.ascontiguousarray(array).view(np.int64) for array in arrays])
    packed = torch.from_numpy(words).pin_memory().to(device, non_blocking=True)
    parts, done = [], 0
    for array in arrays:
        part = packed[done : done + array.size]
        parts.append(part.view(torch.float64) if array.dtype == np.float64 else part)
        done += array.size
    return parts


class Download:
    """Tensors on their way to the host; `wait` gives them back in the order in which they were added."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._host: list[torch.Tensor] = []

    def add(self, tensor: torch.Tensor) -> int:
        """Queue a copy of ``tensor``; returns its index in what `wait` gives."""
        if self._event is not None:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            tensor = host.copy_(tensor, non_blocking=True)
        self._host.append(tensor)
        return len(self._host) - 1

    def seal(self) -> None:
        """Mark the end of the queued copies; later work on the device is not waited for."""
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._device))

    def wait(self) -> list[torch.Tensor]:
        """Block until every queued copy has arrived."""
        if self._event is not None:
            self._event.synchronize()
        return self._host
