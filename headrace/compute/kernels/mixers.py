"""Mixers with a recurrent state, as values, and their definition in plain torch.

A mixer stands in the place of attention. It reads the outputs of one or two linear layers for all tokens of a step and
keeps a state of fixed size for each sequence, in float32:

```
 linear outputs [T, ...] ── short convolution, its state is the last inputs ──▶ keys, queries, values
   S' = decay * S + key (x) value ── query·S' ──▶ norm, gate ──▶ [T, inner], the input of the output linear layer
```
Rows of one token are one batch. Longer rows are computed in chunks, whose tokens are products of matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.compute.batch import Ints

CHUNK = 64
"""Tokens of a row that are computed as products of matrices (also in csrc/recurrent.h)."""

_NORM_EPS = 1e-6
"""Added to the square of a key's or query's length in the gated delta rule."""


class StepRows(NamedTuple):
    """The rows of a step: their slots int64 [R], their tokens by ``starts`` int64 [R + 1], and whether each begins its
    sequence (bool [R]): then its state is empty, whatever its slot has. After ``kept`` int64 [R] tokens of a row the
    state of its slot stays; the row's other tokens do not change it. ``made``: what kernels make of the rows once for
    all layers.
    """

    slots: Ints
    starts: Ints
    fresh: Any
    kept: Ints
    made: dict[str, Any] | None = None


class LineRows(NamedTuple):
    """Rows of one token each that only the device knows: their slots int64 [R], and the keys int32 [R] that they attend
    to. A row with one key begins its sequence, one with none is padding.
    """

    slots: Tensor
    contexts: Tensor


class Convolution(NamedTuple):
    """A causal convolution over each channel alone: ``weight`` float32 [taps, channels], the last one for the token
    itself, and ``bias`` float32 [channels] or None. Its state are the inputs [taps - 1, channels] of the tokens before.
    """

    weight: Tensor
    bias: Tensor | None


class ShortConvolution(NamedTuple):
    """Reads ``(b, c, x)`` [T, 3 * channels] and returns ``c * convolution(b * x)`` (LFM2)."""

    convolution: Convolution


class GatedDelta(NamedTuple):
    """The gated delta rule (arXiv:2412.06464).

    Reads queries, keys, values and gates [T, 2 * key_heads * key_dim + 2 * value_heads * value_dim], of which the first
    three are convolved; and ``(b, a)`` [T, 2 * value_heads]. With ``beta = sigmoid(b)`` and ``decay = exp(rate *
    softplus(a + step_bias))`` a head's state [key_dim, value_dim] becomes ``decay * S + k (x) (beta * (v - k·decay *
    S))``. ``rate`` is negative. ``norm`` float32 [value_dim] normalizes each head, before it is multiplied with
    ``silu(gate)``. Several value heads in a row may share a key head.
    """

    convolution: Convolution
    rate: Tensor
    step_bias: Tensor
    norm: Tensor
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    eps: float


class StateSpace(NamedTuple):
    """Mamba-2 (arXiv:2405.21060).

    Reads gates [T, inner], values, keys and queries [T, inner + 2 * groups * key_dim], which are convolved, and steps
    [T, heads]; inner is ``heads * value_dim``. With ``dt = softplus(step_scale * step + step_bias)`` within ``limits``
    a head's state [key_dim, value_dim] becomes ``exp(rate * dt) * S + k (x) (dt * v)``, and ``skip * v`` is added to
    its output. That is multiplied with ``silu(gate_scale * gate)``, before ``norm`` float32 [inner] normalizes each of
    ``norm_groups``, or after it with ``norm_first``; without a norm it is only multiplied. Heads in a row share keys
    and queries.
    """

    convolution: Convolution
    rate: Tensor
    step_bias: Tensor
    skip: Tensor
    norm: Tensor | None
    heads: int
    groups: int
    key_dim: int
    value_dim: int
    norm_groups: int
    eps: float
    limits: tuple[float, float] = (0.0, float("inf"))
    norm_first: bool = False
    gate_scale: float = 1.0
    step_scale: float = 1.0


class Multipliers(NamedTuple):
    """What a model multiplies the outputs of its attention, of the mixer beside it, of the MLP's gate and of the MLP by
    (Falcon-H1).
    """

    attention: float
    mixer: float
    gate: float
    mlp: float


NO_MULTIPLIERS = Multipliers(1.0, 1.0, 1.0, 1.0)
"""Those of other models."""

Mixer = ShortConvolution | GatedDelta | StateSpace


def tensors_of(mixer: Mixer) -> Iterator[Tensor]:
    """The weights of a mixer."""
    for part in (*mixer, *mixer.convolution):
        if isinstance(part, Tensor):
            yield part


class DefinedMixers:
    """The mixers of kernels that compute them by their definition."""

    def prepare_mixer(self, mixer: Mixer) -> Mixer:
        """See `Kernels.prepare_mixer`."""
        return mixer

    def mix(
        self, inputs: Sequence[Tensor], mixer: Mixer, rows: StepRows | LineRows, states: Sequence[Tensor]
    ) -> Tensor:
        """See `Kernels.mix`."""
        assert isinstance(rows, StepRows), "graphs are those of other kernels"
        return mix(inputs, mixer, rows, states)


def mix(inputs: Sequence[Tensor], mixer: Mixer, rows: StepRows, states: Sequence[Tensor]) -> Tensor:
    """The mixer's output [T, inner] for linear outputs of all rows.

    ``states`` float32 [slots, ...] are those of the convolution, and of heads [slots, heads, key_dim, value_dim]; they
    are read and written at the rows' slots.
    """
    if isinstance(mixer, ShortConvolution):
        b, c, x = inputs[0].float().chunk(3, -1)
        return (c * _convolved(b * x, mixer.convolution, rows, states[0])).to(inputs[0].dtype)
    if isinstance(mixer, GatedDelta):
        return _gated_delta(inputs, mixer, rows, states)
    return _state_space(inputs[0], mixer, rows, states)


def _gated_delta(
    inputs: Sequence[Tensor], mixer: GatedDelta, rows: StepRows, states: Sequence[Tensor]
) -> Tensor:
    mixed, steps = inputs
    values = mixer.value_heads * mixer.value_dim
    keys = mixer.key_heads * mixer.key_dim
    gates = _apart(mixed[:, 2 * keys + values :].float(), mixer.value_heads)
    convolved = F.silu(_convolved(mixed[:, : 2 * keys + values].float(), mixer.convolution, rows, states[0]))
    q, k, v = torch.split(convolved, [keys, keys, values], -1)
    shared = mixer.value_heads // mixer.key_heads
    q, k = (_unit(_apart(each, mixer.key_heads)).repeat_interleave(shared, 1) for each in (q, k))
    b, a = steps.float().chunk(2, -1)
    decays = mixer.rate * F.softplus(a + mixer.step_bias)
    v = _apart(v, mixer.value_heads)
    out = _heads(q * mixer.key_dim**-0.5, k, v, decays, b.sigmoid(), rows, states[1])
    out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + mixer.eps) * mixer.norm * F.silu(gates)
    return out.flatten(1).to(mixed.dtype)


def _state_space(mixed: Tensor, mixer: StateSpace, rows: StepRows, states: Sequence[Tensor]) -> Tensor:
    inner, keys = mixer.heads * mixer.value_dim, mixer.groups * mixer.key_dim
    gates, convolved, steps = torch.split(mixed.float(), [inner, inner + 2 * keys, mixer.heads], -1)
    convolved = F.silu(_convolved(convolved, mixer.convolution, rows, states[0]))
    x, k, q = torch.split(convolved, [inner, keys, keys], -1)
    shared = mixer.heads // mixer.groups
    k, q = (_apart(each, mixer.groups).repeat_interleave(shared, 1) for each in (k, q))
    steps = F.softplus(steps * mixer.step_scale + mixer.step_bias).clamp(*mixer.limits)
    x = _apart(x, mixer.heads)
    out = _heads(q, k, x * steps[..., None], mixer.rate * steps, None, rows, states[1])
    out = (out + mixer.skip[:, None] * x).flatten(1)
    gates = F.silu(gates * mixer.gate_scale)
    if mixer.norm is None or not mixer.norm_first:
        out = out * gates
    if mixer.norm is not None:
        grouped = _apart(out, mixer.norm_groups)
        scale = torch.rsqrt(grouped.square().mean(-1, keepdim=True) + mixer.eps)
        out = (grouped * scale).flatten(1) * mixer.norm
        out = out * gates if mixer.norm_first else out
    return out.to(mixed.dtype)


def _apart(x: Tensor, heads: int) -> Tensor:
    """Vectors [T, heads * N] of all heads as [T, heads, N]."""
    return x.reshape(len(x), heads, -1)


def _unit(x: Tensor) -> Tensor:
    """Vectors of length 1."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _NORM_EPS)


def _convolved(x: Tensor, of: Convolution, rows: StepRows, states: Tensor) -> Tensor:
    """The convolution of ``x`` float32 [T, channels]; ``states`` [slots, taps - 1, channels]."""
    taps, out = len(of.weight), torch.empty_like(x)
    for slots, places, before, kept in _batches(rows, states):
        whole = torch.cat((before, x[places]), 1)
        length = places.shape[1]
        y = sum(whole[:, tap : tap + length] * of.weight[tap] for tap in range(taps))
        assert isinstance(y, Tensor)
        out[places] = y if of.bias is None else y + of.bias
        if kept:
            states[slots] = whole[:, kept : kept + taps - 1]
    return out


def _heads(
    q: Tensor, k: Tensor, v: Tensor, decays: Tensor, betas: Tensor | None, rows: StepRows, states: Tensor
) -> Tensor:
    """Outputs [T, H, V] of heads with queries and keys [T, H, K], values [T, H, V] and logarithms of decays [T, H].

    With ``betas`` [T, H] the delta rule corrects the values.
    """
    out = torch.empty_like(v)
    for slots, places, state, kept in _batches(rows, states):
        run: Callable[..., tuple[Tensor, Tensor]] = _one if places.shape[1] == 1 else _chunk
        for number, tokens in enumerate((places[:, :kept], places[:, kept:])):
            for part in torch.split(tokens, CHUNK, 1) if tokens.shape[1] else ():
                given = [each[part].transpose(1, 2) for each in (q, k, v, decays)]
                beta = None if betas is None else betas[part].transpose(1, 2)
                found, state = run(state, *given, beta)
                out[part] = found.transpose(1, 2)
            if kept and not number:
                states[slots] = state
    return out


def _one(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None
) -> tuple[Tensor, Tensor]:
    """A token of each row: q, k [R, H, 1, K], v [R, H, 1, V], decay and beta [R, H, 1], state [R, H, K, V]."""
    state = state * decay.exp()[..., None]
    if beta is not None:
        v = beta[..., None] * (v - k @ state)
    state = state + k.mT @ v
    return q @ state, state


def _chunk(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None
) -> tuple[Tensor, Tensor]:
    """As `_one`, for a chunk of tokens in one row of R = 1.

    The values that the delta rule corrects depend on those before in the chunk: a triangular system.
    """
    total = decay.cumsum(-1)
    between = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    since = total.exp()[..., None]
    if beta is not None:
        beta = beta[..., None]
        system = (beta * (k @ k.mT) * between).tril(-1)
        v = torch.linalg.solve_triangular(
            system, beta * (v - since * (k @ state)), upper=False, unitriangular=True
        )
    out = since * (q @ state) + (q @ k.mT * between) @ v
    left = (total[..., -1:] - total).exp()[..., None]
    return out, state * since[..., -1:, :] + k.mT @ (left * v)


def _batches(rows: StepRows, states: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor, int]]:
    """Rows that are computed together: slots [R], places int64 [R, L] of their tokens, their states [R, ...], and the
    tokens after which these stay.

    Rows of one token are one batch, but not with one that changes no state; each other row is alone.
    """
    device = states.device
    lengths = rows.starts[1:] - rows.starts[:-1]
    usual = (lengths == 1) & (rows.kept == 1)
    ones = usual.nonzero()[0]
    for batch in [ones] * bool(len(ones)) + [[row] for row in (~usual).nonzero()[0]]:
        slots = torch.as_tensor(rows.slots[batch], device=device)
        places = torch.arange(int(lengths[batch[0]]), device=device)
        places = torch.as_tensor(rows.starts[:-1][batch], device=device)[:, None] + places
        begun = torch.as_tensor(~rows.fresh[batch], device=device).view(-1, *[1] * (states.dim() - 1))
        yield slots, places, torch.where(begun, states[slots], 0.0), int(rows.kept[batch[0]])
