"""The step interrupt: a flag that ends a step of background work early when a request arrives."""

from __future__ import annotations

import numpy as np


class StepInterrupted(Exception):
    """A forward pass was interrupted between two layers; it can be repeated."""


class StepInterrupt:
    """One byte at ``address``: set by any thread, and read between two layers by a forward pass, also in the
    extension.
    """

    __slots__ = ("_byte", "address")

    def __init__(self) -> None:
        self._byte = np.zeros(1, dtype=np.uint8)
        self.address: int = self._byte.ctypes.data

    def set(self) -> None:
        """Interrupt steps that may be interrupted."""
        self._byte[0] = 1

    def clear(self) -> None:
        """Let steps that start from now on run to their end."""
        self._byte[0] = 0

    def is_set(self) -> bool:
        """Whether steps that may be interrupted should be."""
        return bool(self._byte[0])
