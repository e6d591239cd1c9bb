"""Token bitmasks of grammars, applied before any other filter.

This is the definition of `Kernels.restrict` in torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from headrace.compute.batch import Ints
from headrace.compute.transfer import upload

Flags = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]
Words = np.ndarray[tuple[int, int], np.dtype[np.int32]]


class Allowed(NamedTuple):
    """The masks of the restricted rows of a batch, as host arrays.

    ``lines`` int64 [M] are rows of the logits, ascending. ``words`` int32 [M, ceil(V / 32)] hold one bit per token,
    the lowest first; bits from V on are ignored. ``ending`` bool [M]: rows that can only end (None: none).
    """

    lines: Ints
    words: Words
    ending: Flags | None = None

    def part(self, begin: int, end: int) -> Allowed | None:
        """The masks of lines ``[begin, end)``, counted from ``begin``; None if there are none."""
        first, last = np.searchsorted(self.lines, (begin, end))
        if first == last:
            return None
        ending = None if self.ending is None else self.ending[first:last]
        return Allowed(self.lines[first:last] - begin, self.words[first:last], ending)


Restrict = Callable[[torch.Tensor, Allowed], torch.Tensor]


def restrict(logits: torch.Tensor, allowed: Allowed) -> torch.Tensor:
    """A copy of ``logits`` [S, V] with minus infinity for tokens that are not allowed."""
    each = np.unpackbits(allowed.words.view(np.uint8), axis=1, bitorder="little")  # a byte per token
    lines, flat = upload(logits.device, allowed.lines, each.reshape(-1).view(np.int32))
    closed = flat.view(torch.uint8).view(len(lines), -1)[:, : logits.shape[1]] == 0
    if len(lines) == len(logits):
        return logits.masked_fill(closed, -torch.inf)
    return logits.index_copy(0, lines, logits.index_select(0, lines).masked_fill_(closed, -torch.inf))
