"""Reads from a config which layers of a hybrid model have a mixer with a recurrent state in place of attention, and the
sizes of that mixer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headrace.compute.checkpoint import ModelError
from headrace.compute.model.config_reader import ConfigReader
from headrace.compute.model.mixers import GatedDeltaSpec, MixerSpec, ShortConvolutionSpec, StateSpaceSpec

_ATTENTION = ("full_attention", "attention")


@dataclass(frozen=True, slots=True)
class FamilyMixer:
    """How a family's configs describe its recurrent layers.

    ``read`` reads the mixer. ``kinds`` are the names of such layers in ``layer_types``, or in the field that ``listed``
    names (None: no field does). Without a list, ``usual(config, layer)`` says which they are. ``beside``: such layers
    attend too. ``activated`` is the field of the mixer's activation, of which only SiLU is computed.
    """

    read: Callable[[ConfigReader], MixerSpec]
    kinds: tuple[str, ...]
    usual: Callable[[ConfigReader, int], bool]
    listed: str | None = "layer_types"
    activated: str | None = "hidden_act"
    beside: bool = False

    def layers(self, config: ConfigReader, count: int) -> list[bool]:
        """Which of so many layers are recurrent.

        Raises:
            ModelError: a layer is of an unknown kind, or all are recurrent.
        """
        names = None if self.listed is None else config.names(self.listed)
        if names is None:
            recurrent = [self.usual(config, layer) for layer in range(count)]
        elif len(names) != count:
            raise ModelError(f"{self.listed} has {len(names)} entries for {count} layers (num_hidden_layers)")
        elif unknown := set(names) - {*self.kinds, *_ATTENTION}:
            raise ModelError(f"{self.listed}: {', '.join(sorted(unknown))} is not supported")
        else:
            recurrent = [name in self.kinds for name in names]
        if all(recurrent) and not self.beside:
            raise ModelError(
                f"{config.architecture}: no layer attends, so there are no keys and values to keep"
            )
        return recurrent

    def mixer(self, config: ConfigReader) -> MixerSpec:
        """The mixer.

        Raises:
            ModelError: a size is missing, or the activation is not supported.
        """
        activation = None if self.activated is None else config.get(self.activated)
        if self.activated is not None and activation not in ("silu", "swish"):
            raise ModelError(
                f"{config.architecture}: {self.activated} {activation!r:.40} of a recurrent layer; supported: silu"
            )
        return self.read(config)


def gated_delta(config: ConfigReader, *, fused: bool) -> GatedDeltaSpec:
    """The mixer of Qwen3-Next (``fused``) and Qwen3.5."""
    key_heads, value_heads = config.integer("linear_num_key_heads"), config.integer("linear_num_value_heads")
    if value_heads % key_heads:
        raise ModelError(
            f"linear_num_value_heads ({value_heads}) is not a multiple of linear_num_key_heads ({key_heads})"
        )
    return GatedDeltaSpec(
        hidden=config.integer("hidden_size"),
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=config.integer("linear_key_head_dim"),
        value_dim=config.integer("linear_value_head_dim"),
        taps=taps_of(config, "linear_conv_kernel_dim"),
        eps=config.number("rms_norm_eps"),
        fused=fused,
    )


def short_convolution(config: ConfigReader) -> ShortConvolutionSpec:
    """The mixer of LFM2."""
    return ShortConvolutionSpec(
        config.integer("hidden_size"), taps_of(config, "conv_L_cache"), config.flag("conv_bias")
    )


def state_space(config: ConfigReader) -> StateSpaceSpec:
    """The mixer of Granite 4 and Bamba."""
    inner = config.integer("mamba_expand") * config.integer("hidden_size")
    return sized_state_space(config, inner, "mamba_expand times hidden_size")


def sized_state_space(config: ConfigReader, inner: int, size_name: str) -> StateSpaceSpec:
    """The mixer with ``inner`` channels; ``size_name`` says in errors what their number is.

    Raises:
        ModelError: they are not those of its heads, or the groups do not divide the heads.
    """
    heads, groups = config.integer("mamba_n_heads"), config.integer("mamba_n_groups")
    size = inner // heads if config.get("mamba_d_head") == "auto" else config.integer("mamba_d_head")
    if size * heads != inner or heads % groups:
        raise ModelError(
            f"mamba_n_heads ({heads}) of mamba_d_head ({size}) in {groups} mamba_n_groups are not {size_name} ({inner})"
        )
    return StateSpaceSpec(
        hidden=config.integer("hidden_size"),
        heads=heads,
        groups=groups,
        key_dim=config.integer("mamba_d_state"),
        value_dim=size,
        taps=taps_of(config, "mamba_d_conv"),
        eps=config.number("rms_norm_eps"),
        norm_groups=groups,
        bias=config.flag("mamba_proj_bias"),
        convolution_bias=config.flag("mamba_conv_bias"),
        limits=limits_of(config.get("time_step_limit")),
    )


def lfm2_width(config: ConfigReader) -> int:
    """The width of LFM2's MLP, which its configs give before an adjustment."""
    width = config.optional_integer("block_ff_dim") or config.integer("intermediate_size")
    if not config.flag("block_auto_adjust_ff_dim"):
        return width
    width = 2 * width // 3
    multiplier = config.optional_number("block_ffn_dim_multiplier")
    if multiplier is None:
        return width
    multiple = config.integer("block_multiple_of")
    return -(-int(multiplier * width) // multiple) * multiple


def each_fourth_attends(config: ConfigReader, layer: int) -> bool:
    """Qwen: every layer but each n-th is recurrent."""
    return (layer + 1) % config.integer("full_attention_interval") != 0


def but_some(field: str) -> Callable[[ConfigReader, int], bool]:
    """Every layer is recurrent, except those of a list in a config; all attend if it has none."""

    def recurrent(config: ConfigReader, layer: int) -> bool:
        attending = config.integers(field)
        return attending is not None and layer not in attending

    return recurrent


def taps_of(config: ConfigReader, field: str) -> int:
    """The length of a convolution."""
    taps = config.integer(field)
    if not 2 <= taps <= MAX_TAPS:
        raise ModelError(f"{config.architecture}: {field} must be 2 to {MAX_TAPS}, the config has {taps}")
    return taps


MAX_TAPS = 8
"""The longest convolution (also in csrc/recurrent.h)."""


_INFINITY = {"__float__": "Infinity"}
"""As transformers writes it, which JSON has no number for."""


def limits_of(given: Any) -> tuple[float, float]:
    """The range of the steps; None: all."""
    if given is None:
        return 0.0, float("inf")
    numbers = (
        [float("inf") if each == _INFINITY else each for each in given] if isinstance(given, list) else []
    )
    plain = all(isinstance(each, int | float) for each in numbers)
    if len(numbers) != 2 or not plain or not numbers[0] <= numbers[1]:
        raise ModelError(f"time_step_limit must be two numbers in order, the config has {given!r:.60}")
    return float(numbers[0]), float(numbers[1])
