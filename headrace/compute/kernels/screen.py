"""A copy of a head in 8 bits, by which the C++ kernels find likeliest tokens without multiplying most of the head.

A product of the copy tells each output to within a known bound, with half the bytes of bfloat16 and half the work. Only
outputs that could be the largest are computed from the head itself, so the tokens are those of all its outputs, bit for
bit: see csrc/screen.h.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from headrace.compute.quantization.scheme import W8A8, round_to_nearest
from headrace.compute.quantization.weight import QuantizedWeight

_LONGEST = 1e15
"""Of an output's weights, so that no product with activations overflows."""
_MOST_INPUTS = 1 << 16
"""Sums of products of bytes of more could overflow."""
_SLACK = 1.001
"""More than lengths lose where they are summed in float32."""
_ELEMENTS_AT_ONCE = 1 << 24
_LONGEST_PAUSE = 1024


class Copy(NamedTuple):
    """The weights of a head [outputs, inputs] in 8 bits with one scale for each output.

    ``norms`` float32 [outputs] are the lengths of each output's weights, ``errors`` those of what the copy leaves of
    them; no less than they are.
    """

    weight: QuantizedWeight
    norms: Tensor
    errors: Tensor


def copy_in_bytes(weight: Tensor) -> Copy | None:
    """The copy of a head; None if products with it have no bounds: of too many inputs, or of too large weights."""
    outputs, inputs = weight.shape
    if inputs > _MOST_INPUTS:
        return None
    copy, step = round_to_nearest(weight, W8A8), max(1, _ELEMENTS_AT_ONCE // inputs)
    norms, errors = weight.new_empty((2, outputs), dtype=torch.float32)
    for at in range(0, outputs, step):
        wide, some = weight[at : at + step].float(), copy.rows(at, at + step)
        # In float64: squares of small elements would be zero in float32, and so would the errors that they bound.
        rest = wide.sub(some.values * some.scales)
        torch.mul(wide.norm(dim=1, dtype=torch.float64), _SLACK, out=norms[at : at + step])
        torch.mul(rest.norm(dim=1, dtype=torch.float64), _SLACK, out=errors[at : at + step])
    return Copy(copy, norms, errors) if bool((norms < _LONGEST).all()) else None


class Screen:
    """The copy of a head in the layout of the kernels: ``parts`` own the memory at ``addresses``.

    Where too many outputs could be the largest, the head is multiplied after all, and the time of the copy's product is
    lost. After such a call the copy pauses: for one call, then for two, four and so on until it helps again.
    """

    def __init__(self, parts: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
        self.nbytes = sum(part.nbytes for part in parts)
        self.addresses = tuple(part.data_ptr() for part in parts)
        self._parts = parts
        self._left = 0
        self._pause = 1

    def helps(self) -> bool:
        """Whether the next call shall use the copy; that call is counted."""
        if self._left:
            self._left -= 1
            return False
        return True

    def note(self, groups: int) -> None:
        """Learn how many groups of outputs were computed in a call that used the copy; negative: all outputs."""
        if groups >= 0:
            self._pause = 1
            return
        self._left = self._pause
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
