"""What the configs of Falcon-H1 say: Mamba-2 beside the attention of every layer, and multipliers of most products."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headrace.compute.checkpoint import ModelError
from headrace.compute.kernels.mixers import Multipliers
from headrace.compute.model.config_reader import ConfigReader
from headrace.compute.model.hybrids import FamilyMixer, sized_state_space, state_space
from headrace.compute.model.mixers import SpaceScales, StateSpaceSpec
from headrace.compute.model.spec import DecoderSpec

DEFAULTS: Mapping[str, Any] = {
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "mamba_d_ssm": 1024,
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_norm_before_gate": True,
    "mamba_rms_norm": False,
}
"""Values of fields that a config omits."""


def not_native(read: ConfigReader) -> str:
    """What a model has that is left to transformers; empty if nothing."""
    biased = [name for name in ("attention_bias", "mamba_proj_bias", "projectors_bias") if read.flag(name)]
    return ", ".join(biased)


def _factors(read: ConfigReader, field: str, count: int) -> tuple[float, ...]:
    """A list of multipliers, which are 1 if a config has none."""
    given = read.get(field)
    if given is None:
        return (1.0,) * count
    numbers = isinstance(given, list) and all(
        isinstance(each, int | float) and not isinstance(each, bool) for each in given
    )
    if not numbers or len(given) != count:
        raise ModelError(
            f"{read.architecture}: {field} must be {count} numbers, the config has {given!r:.60}"
        )
    return tuple(float(each) for each in given)


def _factor(read: ConfigReader, field: str) -> float:
    return read.optional_number(field) or 1.0


def _state_space(read: ConfigReader) -> StateSpaceSpec:
    """The mixer; what multiplies the input of its first linear layer, without a bias, is part of its scales."""
    inner = read.optional_integer("mamba_d_ssm")
    before = _factor(read, "ssm_in_multiplier")
    return replace(
        state_space(read) if inner is None else sized_state_space(read, inner, "mamba_d_ssm"),
        normed=read.flag("mamba_rms_norm"),
        norm_first=read.flag("mamba_norm_before_gate"),
        scales=SpaceScales(*(before * each for each in _factors(read, "ssm_multipliers", 5))),
    )


MIXER = FamilyMixer(_state_space, (), lambda read, layer: True, listed=None, beside=True)


def complete(read: ConfigReader, spec: DecoderSpec) -> DecoderSpec:
    """The specification with the multipliers.

    Those of attention's input and of keys are part of the scale of the scores. What multiplies the input multiplies
    values too, and so the output.
    """
    before = _factor(read, "attention_in_multiplier")
    gate, mlp = _factors(read, "mlp_multipliers", 2)
    return replace(
        spec,
        attention_scale=spec.attention_scale * before**2 * _factor(read, "key_multiplier"),
        logits_scale=_factor(read, "lm_head_multiplier"),
        multipliers=Multipliers(
            attention=before * _factor(read, "attention_out_multiplier"),
            mixer=_factor(read, "ssm_out_multiplier"),
            gate=gate,
            mlp=mlp,
        ),
    )
