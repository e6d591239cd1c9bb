"""How a step that nobody waits for hears, while it computes, that somebody has come."""

from __future__ import annotations

import numpy as np


class StepInterrupted(Exception):
    """A forward pass has ended before its end, between two layers; what it has written may be written again."""


class StepInterrupt:
    """One byte at ``address``: set by any thread, read between two layers by a forward pass, in the extension too."""

    __slots__ = ("_byte", "address")

    def __init__(self) -> None:
        self._byte = np.zeros(1, dtype=np.uint8)
        self.address: int = self._byte.ctypes.data

    def set(self) -> None:
        """Break off what may be."""
        self._byte[0] = 1

    def clear(self) -> None:
        """Let what begins from now on come to its end."""
        self._byte[0] = 0

    def is_set(self) -> bool:
        """Whether what may be is to be broken off."""
        return bool(self._byte[0])
