"""The mixers with a recurrent state that native families have: sizes, tensors in a checkpoint, states.

`kernels.mixers` defines what each computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from headrace.compute.checkpoint import LinearPlace, interleaved
from headrace.compute.kernels.mixers import Convolution, GatedDelta, Mixer, ShortConvolution, StateSpace
from headrace.compute.states import StateShape

Read = Callable[[str], Tensor]
"""Reads a tensor of a checkpoint by its name, in float32."""


@dataclass(frozen=True, slots=True)
class ShortConvolutionSpec:
    """Convolutions of LFM2 with ``taps``; ``bias``: those and the linear layers have one."""

    channels: int
    taps: int
    bias: bool = False

    def places(self, layer: str) -> dict[str, LinearPlace]:
        """The linear layers of a layer, by their fields of `weights.LayerWeights`; ``layer`` begins its names."""
        size = self.channels
        return {
            "qkv": LinearPlace({f"{layer}conv.in_proj": 3 * size}, size, self.bias),
            "output": LinearPlace({f"{layer}conv.out_proj": size}, size, self.bias),
        }

    def tensors(self, layer: str) -> dict[str, tuple[int, ...]]:
        """The other tensors of a layer and their shapes."""
        return _convolution(f"{layer}conv.conv", self.channels, self.taps, bias=self.bias)

    @property
    def states(self) -> tuple[StateShape, ...]:
        """The states of a layer."""
        return (StateShape((self.taps - 1, self.channels), torch.float32),)

    def parameters(self, hidden: int) -> int:
        """The weights of a layer."""
        return 4 * self.channels * hidden + self.channels * self.taps

    @property
    def features(self) -> int:
        """Activations of a token in a layer, in elements of 16 bits."""
        return 4 * self.channels

    def build(self, layer: str, read: Read) -> Mixer:
        """The mixer of a layer."""
        return ShortConvolution(_read_convolution(f"{layer}conv.conv", read, bias=self.bias))


@dataclass(frozen=True, slots=True)
class GatedDeltaSpec:
    """The gated delta rule of Qwen3-Next and Qwen3.5, whose checkpoints store its linears ``fused`` (Next) or apart."""

    hidden: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    eps: float
    fused: bool

    @property
    def _keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def _values(self) -> int:
        return self.value_heads * self.value_dim

    def places(self, layer: str) -> dict[str, LinearPlace]:
        """See `ShortConvolutionSpec.places`."""
        inner = f"{layer}linear_attn."
        keys, values, heads = self._keys, self._values, self.value_heads
        output = LinearPlace({f"{inner}out_proj": self.hidden}, values, False)
        if not self.fused:
            mixed = {f"{inner}in_proj_qkv": 2 * keys + values, f"{inner}in_proj_z": values}
            gates = {f"{inner}in_proj_b": heads, f"{inner}in_proj_a": heads}
            return {
                "qkv": LinearPlace(mixed, self.hidden, False),
                "gates": LinearPlace(gates, self.hidden, False),
                "output": output,
            }
        each = heads // self.key_heads
        wide = each * self.value_dim
        parts = interleaved(self.key_heads, (self.key_dim, self.key_dim, wide, wide), (0, 1, 2, 3))
        steps = interleaved(self.key_heads, (each, each), (0, 1))
        mixed, gates = {f"{inner}in_proj_qkvz": 2 * (keys + values)}, {f"{inner}in_proj_ba": 2 * heads}
        return {
            "qkv": LinearPlace(mixed, self.hidden, False, (parts,)),
            "gates": LinearPlace(gates, self.hidden, False, (steps,)),
            "output": output,
        }

    def tensors(self, layer: str) -> dict[str, tuple[int, ...]]:
        """See `ShortConvolutionSpec.tensors`."""
        inner = f"{layer}linear_attn."
        convolved = _convolution(f"{inner}conv1d", 2 * self._keys + self._values, self.taps, bias=False)
        heads = (self.value_heads,)
        return convolved | {
            f"{inner}A_log": heads,
            f"{inner}dt_bias": heads,
            f"{inner}norm.weight": (self.value_dim,),
        }

    @property
    def states(self) -> tuple[StateShape, ...]:
        """The states of a layer."""
        return (
            StateShape((self.taps - 1, 2 * self._keys + self._values), torch.float32),
            StateShape((self.value_heads, self.key_dim, self.value_dim), torch.float32),
        )

    def parameters(self, hidden: int) -> int:
        """The weights of a layer."""
        linears = hidden * (2 * self._keys + 3 * self._values + 2 * self.value_heads)
        return linears + self.taps * (2 * self._keys + self._values) + self.value_dim

    @property
    def features(self) -> int:
        """See `ShortConvolutionSpec.features`: outputs of the linears, what is convolved in float32, and the result."""
        convolved = 2 * self._keys + self._values
        return 3 * convolved + 2 * self._values + 2 * self.value_heads

    def build(self, layer: str, read: Read) -> Mixer:
        """The mixer of a layer."""
        inner = f"{layer}linear_attn."
        return GatedDelta(
            convolution=_read_convolution(f"{inner}conv1d", read, bias=False),
            rate=-read(f"{inner}A_log").exp(),
            step_bias=read(f"{inner}dt_bias"),
            norm=read(f"{inner}norm.weight"),
            key_heads=self.key_heads,
            value_heads=self.value_heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            eps=self.eps,
        )


class SpaceScales(NamedTuple):
    """What the parts of the first linear layer's outputs are multiplied by (Falcon-H1)."""

    gates: float
    values: float
    keys: float
    queries: float
    steps: float


NO_SCALES = SpaceScales(1.0, 1.0, 1.0, 1.0, 1.0)
"""Those of other models."""


@dataclass(frozen=True, slots=True)
class StateSpaceSpec:
    """Mamba-2 of Granite 4, Bamba, Nemotron-H and Falcon-H1; ``normed``: its outputs are. ``norm_first`` as in
    `StateSpace`.
    """

    hidden: int
    heads: int
    groups: int
    key_dim: int
    value_dim: int
    taps: int
    eps: float
    norm_groups: int
    bias: bool
    convolution_bias: bool
    limits: tuple[float, float]
    normed: bool = True
    norm_first: bool = False
    scales: SpaceScales = NO_SCALES

    @property
    def _inner(self) -> int:
        return self.heads * self.value_dim

    @property
    def _convolved(self) -> int:
        return self._inner + 2 * self.groups * self.key_dim

    def places(self, layer: str) -> dict[str, LinearPlace]:
        """See `ShortConvolutionSpec.places`."""
        outputs = self._inner + self._convolved + self.heads
        return {
            "qkv": LinearPlace({f"{layer}mamba.in_proj": outputs}, self.hidden, self.bias),
            "output": LinearPlace({f"{layer}mamba.out_proj": self.hidden}, self._inner, self.bias),
        }

    def tensors(self, layer: str) -> dict[str, tuple[int, ...]]:
        """See `ShortConvolutionSpec.tensors`."""
        inner, heads = f"{layer}mamba.", (self.heads,)
        convolved = _convolution(f"{inner}conv1d", self._convolved, self.taps, bias=self.convolution_bias)
        vectors = {f"{inner}{name}": heads for name in ("A_log", "dt_bias", "D")}
        return convolved | vectors | ({f"{inner}norm.weight": (self._inner,)} if self.normed else {})

    @property
    def states(self) -> tuple[StateShape, ...]:
        """The states of a layer."""
        return (
            StateShape((self.taps - 1, self._convolved), torch.float32),
            StateShape((self.heads, self.key_dim, self.value_dim), torch.float32),
        )

    def parameters(self, hidden: int) -> int:
        """The weights of a layer."""
        linears = hidden * (2 * self._inner + self._convolved + self.heads)
        return linears + self.taps * self._convolved + self._inner * self.normed

    @property
    def features(self) -> int:
        """See `GatedDeltaSpec.features`; outputs of heads are kept in float32, too."""
        return 3 * self._convolved + 4 * self._inner + self.heads

    def build(self, layer: str, read: Read) -> Mixer:
        """The mixer of a layer."""
        inner, keys = f"{layer}mamba.", self.groups * self.key_dim
        weight, bias = _read_convolution(f"{inner}conv1d", read, bias=self.convolution_bias)
        parts = torch.split(weight, [self._inner, keys, keys], 1)
        for part, scale in zip(parts, self.scales[1:4], strict=True):
            part.mul_(scale)  # a convolution of multiplied inputs is one with multiplied weights
        return StateSpace(
            convolution=Convolution(weight, bias),
            rate=-read(f"{inner}A_log").exp(),
            step_bias=read(f"{inner}dt_bias"),
            skip=read(f"{inner}D"),
            norm=read(f"{inner}norm.weight") if self.normed else None,
            heads=self.heads,
            groups=self.groups,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            norm_groups=self.norm_groups,
            eps=self.eps,
            limits=self.limits,
            norm_first=self.norm_first,
            gate_scale=self.scales.gates,
            step_scale=self.scales.steps,
        )


MixerSpec = ShortConvolutionSpec | GatedDeltaSpec | StateSpaceSpec


def _convolution(name: str, channels: int, taps: int, *, bias: bool) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": (channels, 1, taps)} | ({f"{name}.bias": (channels,)} if bias else {})


def _read_convolution(name: str, read: Read, *, bias: bool) -> Convolution:
    weight = read(f"{name}.weight")[:, 0].T.contiguous()
    return Convolution(weight, read(f"{name}.bias") if bias else None)
