"""What the configs of Nemotron-H and Nemotron 3 say: a list of blocks, each Mamba-2, attention, an MLP without a gate,
or experts without gates.

A layer of the decoder is a block of the first two kinds and the MLP or the experts behind it, if such a block follows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from headrace.compute.checkpoint import ModelError
from headrace.compute.model.config_reader import ConfigReader
from headrace.compute.model.hybrids import FamilyMixer, taps_of
from headrace.compute.model.mixers import StateSpaceSpec
from headrace.compute.model.spec import DecoderSpec

DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 131_072,
    "hidden_size": 4096,
    "intermediate_size": 21_504,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rope_theta": 10_000.0,
    "layer_norm_epsilon": 1e-5,
    "mlp_hidden_act": "relu2",
    "mamba_hidden_act": "silu",
    "tie_word_embeddings": False,
    "ssm_state_size": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "use_bias": False,
    "time_step_min": 0.001,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "mlp_bias": False,
}
"""Values of fields that a config omits."""

_MAMBA, _ATTENTION, _MLP, _EXPERTS = "linear_attention", "full_attention", "mlp", "moe"
_LETTERS = {"M": _MAMBA, "*": _ATTENTION, "-": _MLP, "E": _EXPERTS}
_EARLY = {"mamba": _MAMBA, "attention": _ATTENTION}
_ALIASES = (
    *("mamba_n_groups", "mamba_d_conv", "mamba_expand", "mamba_dt_min", "mamba_conv_bias"),
    "attention_head_dim",
)


class Blocks(NamedTuple):
    """The blocks of a layer: the number of its mixer or attention, whether it is recurrent, that of its MLP or experts,
    and whether these are experts.
    """

    first: int
    recurrent: bool
    mlp: int | None = None
    experts: bool = False


def layers_of(read: ConfigReader) -> list[Blocks]:
    """The layers of the decoder.

    Raises:
        ModelError: a block is of another kind, or an MLP or experts have no other block before them.
    """
    layers: list[Blocks] = []
    for number, kind in enumerate(_kinds(read)):
        if kind in (_MAMBA, _ATTENTION):
            layers.append(Blocks(number, kind == _MAMBA))
        elif kind not in (_MLP, _EXPERTS):
            raise ModelError(f"{read.architecture}: blocks of the kind {kind!r:.40} are not supported")
        elif not layers or layers[-1].mlp is not None:
            kinds = "are experts" if kind == _EXPERTS else "is an MLP"
            raise ModelError(f"{read.architecture}: block {number} {kinds} behind no attention or mixer")
        else:
            layers[-1] = layers[-1]._replace(mlp=number, experts=kind == _EXPERTS)
    if not layers:
        raise ModelError(f"{read.architecture}: the config lists no blocks (hybrid_override_pattern)")
    return layers


def _kinds(read: ConfigReader) -> list[str]:
    """The kind of each block; the list counts if a config has both."""
    listed = read.names("layers_block_type")
    if listed is not None:
        return [_EARLY.get(kind, kind) for kind in listed]
    pattern = read.get("hybrid_override_pattern")
    if not isinstance(pattern, str):
        raise ModelError(
            f"{read.architecture}: hybrid_override_pattern must be a string, the config has {pattern!r:.60}"
        )
    return [_LETTERS.get(letter, letter) for letter in pattern]


def not_native(read: ConfigReader) -> str:
    """What a model has that is left to transformers; empty if nothing."""
    if read.get("quantization_config") is not None:
        return "quantized weights"
    if read.get("moe_latent_size") is not None:
        return "experts over latents (moe_latent_size)"
    if read.flag("mlp_bias") and _EXPERTS in _kinds(read):
        return "biases of a shared expert alone (mlp_bias)"
    wide = read.optional_integer("attention_head_dim") or read.integer("head_dim")
    others = [name for name in _ALIASES[:-1] if read.get(name) is not None]
    return "attention_head_dim" if wide != read.integer("head_dim") else ", ".join(others)


def _state_space(read: ConfigReader) -> StateSpaceSpec:
    """The mixer. Steps have the lower limit that transformers' code has for prompts."""
    heads, groups = read.integer("mamba_num_heads"), read.integer("n_groups")
    if heads % groups:
        raise ModelError(f"mamba_num_heads ({heads}) is not a multiple of n_groups ({groups})")
    return StateSpaceSpec(
        hidden=read.integer("hidden_size"),
        heads=heads,
        groups=groups,
        key_dim=read.integer("ssm_state_size"),
        value_dim=read.integer("mamba_head_dim"),
        taps=taps_of(read, "conv_kernel"),
        eps=read.number("layer_norm_epsilon"),
        norm_groups=groups,
        bias=read.flag("use_bias"),
        convolution_bias=read.flag("use_conv_bias"),
        limits=(read.number("time_step_min"), float("inf")),
    )


MIXER = FamilyMixer(
    _state_space,
    (),
    lambda read, layer: layers_of(read)[layer].recurrent,
    listed=None,
    activated="mamba_hidden_act",
)


def complete(read: ConfigReader, spec: DecoderSpec) -> DecoderSpec:
    """The specification with the names of a checkpoint, whose modules are numbered by block."""
    renamed = [("model.embeddings.", "model.embed_tokens."), ("model.norm_f.", "model.norm.")]
    for index, (first, recurrent, mlp, _) in enumerate(layers_of(read)):
        layer = f"model.layers.{index}."
        own = "mamba" if recurrent else "self_attn"
        renamed += [
            (f"model.layers.{first}.norm.", f"{layer}input_layernorm."),
            (f"model.layers.{first}.mixer.", f"{layer}{own}."),
        ]
        if mlp is not None:
            renamed += [
                (f"model.layers.{mlp}.norm.", f"{layer}post_attention_layernorm."),
                (f"model.layers.{mlp}.mixer.", f"{layer}mlp."),
            ]
    return replace(spec, renamed=tuple(renamed), draft_layers=0)  # those that draft have names of their own
