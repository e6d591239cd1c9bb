"""Mixers as tables of words, so that the extension computes one for all rows of a step in one call.

The words are those of `Mixer` in `csrc/mixers.h`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.compute.kernels.cpp_checks import DTYPES, check_cpu, shown
from headrace.compute.kernels.mixers import (
    CHUNK,
    GatedDelta,
    Mixer,
    ShortConvolution,
    StateSpace,
    StepRows,
    mix,
)
from headrace.compute.kernels.native_experts import address

_MAX_STATE = 256
_MAX_TAPS = 8
_PART_WORDS = 6


class NativeMixer:
    """A mixer for the extension; ``address`` is that of its words, 0 if only its definition computes it.

    ``inner`` is the width of its output, ``widths`` are those of its inputs, ``shapes`` those of a sequence's states.

    Raises:
        ValueError: its parts do not fit each other.
    """

    def __init__(self, mixer: Mixer) -> None:
        self.mixer = mixer
        taps, self.channels = mixer.convolution.weight.shape
        self.inner, self.widths, self.heads = _sizes(mixer, self.channels)
        self.shapes = ((taps - 1, self.channels), self.heads)[: 2 if self.heads else 1]
        self.delta, self.spaced = isinstance(mixer, GatedDelta), isinstance(mixer, StateSpace)
        self._words = torch.empty(0, dtype=torch.int64)
        self.address = 0
        if taps <= _MAX_TAPS and all(size <= _MAX_STATE for size in self.heads[1:]):
            self._words = torch.tensor(self._table(mixer, taps), dtype=torch.int64)
            self.address = self._words.data_ptr()

    def _table(self, mixer: Mixer, taps: int) -> list[int]:
        weight, bias = mixer.convolution
        words = [
            address(weight, torch.float32, taps * self.channels),
            address(bias, torch.float32, self.channels),
        ]
        sizes = (taps, self.channels)
        if isinstance(mixer, ShortConvolution):
            return [*words, 0, 0, 0, 0, 0, *sizes, 0, 0, 0, 0, 0, 0, *_doubles(*[0.0] * 5)]
        skip, norm, norm_first = None, mixer.norm, False
        if isinstance(mixer, StateSpace):
            skip, heads, groups = mixer.skip, mixer.heads, mixer.groups
            norms, norm_first = mixer.norm_groups, mixer.norm_first
            numbers = (mixer.eps, *mixer.limits, mixer.gate_scale, mixer.step_scale)
        else:
            heads, groups = mixer.value_heads, mixer.key_heads
            norms, numbers = heads, (mixer.eps, 0.0, 0.0, 1.0, 1.0)
        each = [address(part, torch.float32, heads) for part in (mixer.rate, mixer.step_bias, skip)]
        normed = address(norm, torch.float32, mixer.value_dim if self.delta else self.inner)
        shape = (*sizes, heads, groups, mixer.key_dim, mixer.value_dim, norms, int(norm_first))
        return [*words, *each, normed, 1 if self.delta else 2, *shape, *_doubles(*numbers)]


def _sizes(mixer: Mixer, channels: int) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """The width of the output, those of the inputs, and the shape of the heads' state."""
    if isinstance(mixer, ShortConvolution):
        return channels, (3 * channels,), ()
    if isinstance(mixer, GatedDelta):
        inner = mixer.value_heads * mixer.value_dim
        return (
            inner,
            (channels + inner, 2 * mixer.value_heads),
            (mixer.value_heads, mixer.key_dim, mixer.value_dim),
        )
    inner = mixer.heads * mixer.value_dim
    return inner, (channels + inner + mixer.heads,), (mixer.heads, mixer.key_dim, mixer.value_dim)


def _doubles(*numbers: float) -> tuple[int, ...]:
    return struct.unpack(f"{len(numbers)}q", struct.pack(f"{len(numbers)}d", *numbers))


class StepLines(NamedTuple):
    """The rows of a step for the extension; ``addresses`` are those of ``arrays``.

    ``largest`` is the number of tokens in the largest wave, ``ahead`` that of rows with tokens ahead of their state.
    ``parts`` is working memory.
    """

    arrays: tuple[np.ndarray[Any, Any], ...]
    addresses: tuple[int, ...]
    largest: int
    ahead: int
    parts: Tensor


def step_lines(rows: StepRows) -> StepLines:
    """The rows of a step; made once for all layers."""
    if rows.made is not None and "native" in rows.made:
        made: StepLines = rows.made["native"]
        return made
    slots, starts, kept = (
        np.ascontiguousarray(line, dtype=np.int64) for line in (rows.slots, rows.starts, rows.kept)
    )
    fresh = np.ascontiguousarray(rows.fresh, dtype=np.uint8)
    if starts.shape != (len(slots) + 1,) or not slots.shape == fresh.shape == kept.shape == (len(slots),):
        raise ValueError(f"{slots.shape} slots for rows by {starts.shape} starts, {fresh.shape} marks")
    arrays, lengths = (slots, starts, kept, fresh), np.diff(starts)
    lines = StepLines(
        arrays,
        tuple(array.ctypes.data for array in arrays),
        int(np.minimum(lengths, CHUNK).sum()),
        int((kept < lengths).sum()),
        torch.empty((len(slots), _PART_WORDS), dtype=torch.int64),
    )
    if rows.made is not None:
        rows.made["native"] = lines
    return lines


def state_words(mixer: NativeMixer, states: Sequence[Tensor]) -> tuple[int, ...]:
    """Where the states [slots, ...] of a mixer are, and how far apart (`LayerStates` in `csrc/stack.h`).

    Raises:
        ValueError: they are not those of the mixer.
    """
    check_cpu(*states)
    for state, shape in zip(states, mixer.shapes, strict=True):
        if len(state) != len(states[0]):
            raise ValueError(f"states of {len(state)} and {len(states[0])} slots")
        if state.dtype != torch.float32 or state.shape[1:] != shape or not state[:1].is_contiguous():
            raise ValueError(f"states {shown(state)} for a mixer of {list(shape)}")
    words = [word for state in states for word in (state.data_ptr(), state.stride(0))]
    return (*words, *[0] * (4 - len(words)))


def run_mixer(
    cpu: Any,
    level: int,
    inputs: Sequence[Tensor],
    mixer: NativeMixer,
    rows: StepRows,
    states: Sequence[Tensor],
) -> Tensor:
    """See `Kernels.mix`."""
    if not mixer.address:
        return mix(inputs, mixer.mixer, rows, states)
    inputs = [each.contiguous() for each in inputs]
    x = inputs[0]
    tokens, dtype = len(x), x.dtype
    if [(each.dtype, each.shape) for each in inputs] != [(dtype, (tokens, width)) for width in mixer.widths]:
        raise ValueError(f"{[shown(each) for each in inputs]} for a mixer of {list(mixer.widths)}")
    held = state_words(mixer, states)
    lines = step_lines(rows)
    out = x.new_empty((tokens, mixer.inner))
    work = [
        x.new_empty((lines.largest, mixer.channels), dtype=torch.float32),
        x.new_empty((tokens if mixer.spaced else 0, mixer.inner), dtype=torch.float32),
        lines.parts,
    ]
    ahead = [x.new_empty((lines.ahead, *shape), dtype=torch.float32) for shape in mixer.shapes]
    cpu.mix_rows(
        level,
        mixer.address,
        x.data_ptr(),
        inputs[1].data_ptr() if len(inputs) > 1 else 0,
        out.data_ptr(),
        *(each.data_ptr() for each in work),
        *lines.addresses,
        *held,
        ahead[0].data_ptr(),
        ahead[1].data_ptr() if mixer.heads else 0,
        lines.ahead,
        len(lines.parts),
        tokens,
        len(states[0]),
        DTYPES[dtype],
    )
    return out
