"""Mixers with a recurrent state: the launches of `recurrent` for the rows of a step.

Where each row is one token, as when decoding, nothing depends on the host: a graph may hold it. Otherwise the rows are
cut into chunks on the host, once for all layers of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.compute.kernels.mixers import (
    GatedDelta,
    LineRows,
    Mixer,
    ShortConvolution,
    StateSpace,
    StepRows,
)
from headrace.compute.kernels.triton import recurrent as device
from headrace.compute.kernels.triton.target import Target, power
from headrace.compute.transfer import upload

_CHUNK = 32
"""Tokens of a row that are computed as products of matrices."""
_MOST_STATE, _MOST_TAPS, _MOST_CHANNELS = 256, 8, 1 << 14
"""The most elements of a key or value, inputs of a convolution, and features that are normalized as one."""
_BLOCK = 256
"""Channels that a program convolves."""
_VALUES = 64
"""Features of a head's values that a program computes."""


@dataclass(frozen=True, slots=True)
class DeviceMixer:
    """A mixer that the kernels compute."""

    mixer: Mixer


class _Heads(NamedTuple):
    """Heads of a mixer, and where what they read begins: in what was convolved, and in the outputs of linears."""

    heads: int
    shared: int
    key_dim: int
    value_dim: int
    query: int
    key: int
    value: int
    gates: int
    steps: int
    scale: float
    step_scale: float
    limits: tuple[float, float]


class _Rows(NamedTuple):
    """The rows of a step on the device: ``contexts`` are 0 of padding, 1 of a row that begins its sequence.

    If some have several tokens: the row of each token, and their chunks, of which those before ``middles`` change the
    state.
    """

    slots: Tensor
    contexts: Tensor
    owners: Tensor | None = None
    starts: Tensor | None = None
    kept: Tensor | None = None
    firsts: Tensor | None = None
    middles: Tensor | None = None
    chunk_starts: Tensor | None = None
    chunk_counts: Tensor | None = None


def prepared(mixer: Mixer) -> DeviceMixer | Mixer:
    """The mixer for the kernels; as it is if only its definition computes it."""
    fits = len(mixer.convolution.weight) <= _MOST_TAPS
    if not isinstance(mixer, ShortConvolution):
        inner = _heads(mixer).heads * mixer.value_dim
        normed = mixer.value_dim if isinstance(mixer, GatedDelta) else inner // mixer.norm_groups
        fits = fits and max(mixer.key_dim, mixer.value_dim) <= _MOST_STATE and normed <= _MOST_CHANNELS
    return DeviceMixer(mixer) if fits else mixer


def _heads(mixer: GatedDelta | StateSpace) -> _Heads:
    if isinstance(mixer, GatedDelta):
        keys, values = mixer.key_heads * mixer.key_dim, mixer.value_heads * mixer.value_dim
        shared = mixer.value_heads // mixer.key_heads
        places = (0, keys, 2 * keys, 2 * keys + values, 0)
        of = (mixer.value_heads, shared, mixer.key_dim, mixer.value_dim)
        return _Heads(*of, *places, mixer.key_dim**-0.5, 1.0, (0.0, 0.0))
    inner, keys = mixer.heads * mixer.value_dim, mixer.groups * mixer.key_dim
    places = (inner + keys, inner, 0, 0, 2 * inner + 2 * keys)
    of = (mixer.heads, mixer.heads // mixer.groups, mixer.key_dim, mixer.value_dim)
    return _Heads(*of, *places, 1.0, mixer.step_scale, mixer.limits)


def mix(
    inputs: Sequence[Tensor],
    mixer: Mixer,
    rows: StepRows | LineRows,
    states: Sequence[Tensor],
    target: Target,
) -> Tensor:
    """See `Kernels.mix`."""
    x, made = inputs[0].contiguous(), _on_device(rows, inputs[0].device)
    channels = mixer.convolution.weight.shape[1]
    if isinstance(mixer, ShortConvolution):
        out = x.new_empty((len(x), channels))
        _convolve(x, (x, x[:, 2 * channels :], x[:, channels:]), mixer, made, states[0], out)
        return out
    heads = _heads(mixer)
    begin = 0 if isinstance(mixer, GatedDelta) else heads.heads * heads.value_dim
    convolved = x.new_empty((len(x), channels), dtype=torch.float32)
    _convolve(x, (x[:, begin:], x, x), mixer, made, states[0], convolved)
    steps = inputs[1].contiguous() if len(inputs) > 1 else x[:, heads.steps :]
    results = x.new_empty((len(x), heads.heads * heads.value_dim), dtype=torch.float32)
    if made.owners is None:
        _one_token(convolved, steps, mixer, heads, made, states[1], results)
    else:
        # Inputs of 16 bits are rounded more coarsely than TF32 rounds.
        precision = "tf32" if target.tf32 and x.dtype != torch.float32 else "ieee"
        _scan(convolved, steps, mixer, heads, made, states[1], results, precision)
    return _finished(x, results, mixer, heads)


def _on_device(rows: StepRows | LineRows, where: torch.device) -> _Rows:
    """The rows of a step on the device; made once for all layers."""
    if isinstance(rows, LineRows):
        return _Rows(rows.slots, rows.contexts)
    if rows.made is None:
        return _uploaded(rows, where)
    if "triton" not in rows.made:
        rows.made["triton"] = _uploaded(rows, where)
    made: _Rows = rows.made["triton"]
    return made


def _uploaded(rows: StepRows, where: torch.device) -> _Rows:
    lengths, contexts = np.diff(rows.starts), np.where(rows.fresh, 1, 2).astype(np.int32)
    if (lengths == 1).all() and (rows.kept == 1).all():
        return _Rows(*upload(where, rows.slots, contexts))
    starts, counts, firsts, middles = list[int](), list[int](), [0], list[int]()
    for start, length, kept in zip(
        rows.starts[:-1].tolist(), lengths.tolist(), rows.kept.tolist(), strict=True
    ):
        for begin, end, ends in ((start, start + kept, middles), (start + kept, start + length, firsts)):
            starts += range(begin, end, _CHUNK)
            counts += (min(_CHUNK, end - at) for at in range(begin, end, _CHUNK))
            ends.append(len(starts))
    owners = np.repeat(np.arange(len(lengths)), lengths)
    small = (owners, rows.starts, rows.kept, firsts, middles, starts, counts)
    each = (np.asarray(part, dtype=np.int32) for part in small)
    return _Rows(*upload(where, rows.slots, contexts, *each))


def _convolve(
    x: Tensor, parts: tuple[Tensor, Tensor, Tensor], mixer: Mixer, rows: _Rows, state: Tensor, out: Tensor
) -> None:
    """The convolution of all tokens, and the states behind it. ``parts`` of ``x``: inputs, their factors, gates."""
    (weight, bias), product = mixer.convolution, isinstance(mixer, ShortConvolution)
    taps, channels = weight.shape
    blocks, one = -(-channels // _BLOCK), rows.owners is None
    given, factors, gates = parts
    device.convolve[(len(x), blocks)](
        given,
        factors,
        gates,
        weight,
        weight if bias is None else bias,
        state,
        rows.slots,
        rows.contexts,
        rows.contexts if rows.owners is None else rows.owners,
        rows.contexts if rows.starts is None else rows.starts,
        out,
        x.shape[1],
        channels,
        state.stride(0),
        TAPS=taps,
        BIAS=bias is not None,
        PRODUCT=product,
        ONE=one,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    if one or taps == 1:
        return
    sizes = {"TAPS": taps, "BLOCK_TAPS": power(taps - 1, 1), "PRODUCT": product, "BLOCK": _BLOCK}
    device.keep[(len(rows.slots), blocks)](
        *(given, factors, state, rows.slots, rows.contexts, rows.starts, rows.kept),
        *(x.shape[1], channels, state.stride(0)),
        **sizes,
        num_warps=4,
    )


def _arguments(
    convolved: Tensor, steps: Tensor, mixer: GatedDelta | StateSpace, heads: _Heads, state: Tensor
) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...], dict[str, Any]]:
    """What the kernels of heads read: of decays, sizes, places, and constants."""
    skip = mixer.skip if isinstance(mixer, StateSpace) else mixer.rate
    block = min(_VALUES, power(heads.value_dim))
    constants = {"HEADS": heads.heads, "SHARED": heads.shared, "K": heads.key_dim, "V": heads.value_dim}
    constants |= {"BLOCK_K": power(heads.key_dim), "BLOCK_V": block, "DELTA": isinstance(mixer, GatedDelta)}
    sizes = (convolved.shape[1], state.stride(0), steps.stride(0))
    places = (heads.query, heads.key, heads.value, heads.scale, heads.step_scale, *heads.limits)
    return (steps, mixer.rate, mixer.step_bias, skip), sizes, places, constants


def _one_token(
    convolved: Tensor,
    steps: Tensor,
    mixer: GatedDelta | StateSpace,
    heads: _Heads,
    rows: _Rows,
    state: Tensor,
    out: Tensor,
) -> None:
    """The heads of rows of one token each."""
    decays, sizes, places, constants = _arguments(convolved, steps, mixer, heads, state)
    grid = (len(convolved), heads.heads, -(-heads.value_dim // constants["BLOCK_V"]))
    of = (state, rows.slots, rows.contexts, out)
    device.one_token[grid](convolved, *decays, *of, *sizes, *places, **constants, num_warps=4)


def _scan(
    convolved: Tensor,
    steps: Tensor,
    mixer: GatedDelta | StateSpace,
    heads: _Heads,
    rows: _Rows,
    state: Tensor,
    out: Tensor,
    precision: str,
) -> None:
    """The heads of rows of any number of tokens, chunk by chunk; ``precision`` is that of products of float32."""
    decays, sizes, places, constants = _arguments(convolved, steps, mixer, heads, state)
    constants |= {"CHUNK": _CHUNK, "PRECISION": precision}
    values = keys = out
    assert rows.chunk_starts is not None
    if isinstance(mixer, GatedDelta):
        values = torch.empty_like(out)
        keys = out.new_empty((len(out), heads.heads * heads.key_dim))
        whole = {name: value for name, value in constants.items() if name != "DELTA"}
        whole["BLOCK_V"] = power(heads.value_dim)
        device.correct[(len(rows.chunk_starts), heads.heads)](
            *(convolved, *decays[:3], rows.chunk_starts, rows.chunk_counts, values, keys),
            *(sizes[0], sizes[2], heads.key, heads.value),
            **whole,
            num_warps=8,
        )
    grid = (len(rows.slots), heads.heads, -(-heads.value_dim // constants["BLOCK_V"]))
    of = (state, rows.slots, rows.contexts, rows.firsts, rows.middles, rows.chunk_starts, rows.chunk_counts)
    device.scan[grid](
        convolved, values, keys, *decays, *of, out, *sizes, *places, **constants, num_warps=8, num_stages=1
    )


def _finished(x: Tensor, results: Tensor, mixer: GatedDelta | StateSpace, heads: _Heads) -> Tensor:
    """The results of heads behind gates and norms, in the dtype of ``x``."""
    delta, inner = isinstance(mixer, GatedDelta), results.shape[1]
    size = heads.value_dim if isinstance(mixer, GatedDelta) else inner // mixer.norm_groups
    out = x.new_empty(results.shape)
    device.finish[(len(x), inner // size)](
        results,
        x[:, heads.gates :],
        results if mixer.norm is None else mixer.norm,
        out,
        inner,
        x.shape[1],
        0 if delta else size,
        mixer.eps,
        mixer.gate_scale if isinstance(mixer, StateSpace) else 1.0,
        SIZE=size,
        NORMED=mixer.norm is not None,
        FIRST=isinstance(mixer, GatedDelta) or mixer.norm_first,
        BLOCK=power(size),
        num_warps=4,
    )
    return out
