"""What the configs of Gemma 4 say beyond those of other families: heads by layer, layers that share keys and values,
inputs of each layer, and numbers that multiply the results of layers.

Models with experts (26B-A4B) have an MLP and experts side by side, which is not computed natively.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headrace.compute.checkpoint import ModelError
from headrace.compute.kernels import HeadShape
from headrace.compute.model.config_reader import ConfigReader
from headrace.compute.model.spec import DecoderSpec, LayerSpec, PerLayerSpec

DEFAULTS: Mapping[str, Any] = {
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "vocab_size": 262_144,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "max_position_embeddings": 131_072,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262_144,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1_000_000.0,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    },
}
"""Values of fields that a config omits."""

_BY_LAYER = {"head_dim", "num_key_value_heads"}
"""The fields that ``per_layer_config`` may give for a layer."""


def not_native(read: ConfigReader) -> str:
    """Why a model is left to transformers; empty if it is not."""
    if read.flag("enable_moe_block"):
        return "experts beside an MLP"
    return "attention_bias" if read.flag("attention_bias") else ""


def complete(read: ConfigReader, spec: DecoderSpec) -> DecoderSpec:
    """The specification with all that differs by layer.

    Raises:
        ModelError: a layer would share what none before it has, or has heads that do not fit.
    """
    # The last layer always attends to all keys.
    layers = [*spec.layers[:-1], replace(spec.layers[-1], window=None, rope=0)]
    heads = _heads(read, spec, layers)
    shares = _shares(read, layers)
    double = read.flag("use_double_wide_mlp")
    keys_again = read.flag("attention_k_eq_v")
    both_ways = read.get("use_bidirectional_attention") == "vision"
    usual = HeadShape(spec.num_heads, spec.num_kv_heads, spec.head_dim)
    done = tuple(
        replace(
            layer,
            heads=None if own == usual else own,
            shares=source,
            intermediate_size=2 * spec.intermediate_size if double and source is not None else None,
            values_from_keys=keys_again and layer.window is None and source is None,
            joint=both_ways and layer.window is not None,
        )
        for layer, own, source in zip(layers, heads, shares, strict=True)
    )
    full, *others = spec.ropes
    wide = {own.head_dim for layer, own in zip(layers, heads, strict=True) if layer.rope == 0}
    if len(wide) != 1 or any(own.head_dim != spec.head_dim for own in heads if own.head_dim not in wide):
        raise ModelError(f"{read.architecture}: layers of one type have heads of different sizes")
    return replace(
        spec,
        layers=done,
        ropes=(replace(full, rotary_dim=wide.pop()), *others),
        attention_scale=1.0,
        layer_scales=True,
        per_layer=_per_layer(read),
    )


def _per_layer(read: ConfigReader) -> PerLayerSpec | None:
    """The inputs of all layers, if they have any."""
    if not read.get("hidden_size_per_layer_input"):
        return None
    vocab_size, width = (
        read.integer("vocab_size_per_layer_input"),
        read.count("hidden_size_per_layer_input"),
    )
    padding = read.count("pad_token_id") if read.given("pad_token_id") else 0
    if padding >= vocab_size:
        raise ModelError(f"{read.architecture}: pad_token_id is {padding}, with {vocab_size} tokens in all")
    return PerLayerSpec(vocab_size, width, padding)


def _heads(read: ConfigReader, spec: DecoderSpec, layers: list[LayerSpec]) -> list[HeadShape]:
    """The heads of each layer: what ``per_layer_config`` says, else those of layers that attend to all keys."""
    usual = HeadShape(spec.num_heads, spec.num_kv_heads, spec.head_dim)
    if read.given("per_layer_config"):
        given = read.object("per_layer_config")
        unknown = set(given) - {str(index) for index in range(len(layers))}
        if unknown:
            raise ModelError(f"{read.architecture}: per_layer_config has no layer {sorted(unknown)[0]}")
        return [_own_heads(read, given.get(str(index)), usual) for index in range(len(layers))]
    keys = read.optional_integer("num_global_key_value_heads") if read.flag("attention_k_eq_v") else None
    wide = HeadShape(usual.heads, keys or usual.kv_heads, read.integer("global_head_dim"))
    return [_fitting(read, wide if layer.window is None else usual) for layer in layers]


def _own_heads(read: ConfigReader, given: Any, usual: HeadShape) -> HeadShape:
    if given is None:
        return usual
    if not isinstance(given, Mapping) or set(given) - _BY_LAYER:
        raise ModelError(
            f"{read.architecture}: per_layer_config may give {' and '.join(sorted(_BY_LAYER))}, the config has "
            f"{str(given)[:60]}"
        )
    own = ConfigReader(f"{read.architecture} per_layer_config", given, {})
    kv_heads = own.optional_integer("num_key_value_heads") or usual.kv_heads
    size = own.optional_integer("head_dim") or usual.head_dim
    return _fitting(read, HeadShape(usual.heads, kv_heads, size))


def _fitting(read: ConfigReader, heads: HeadShape) -> HeadShape:
    if heads.heads % heads.kv_heads or heads.head_dim % 2:
        raise ModelError(
            f"{read.architecture}: {heads.heads} heads of {heads.head_dim} for {heads.kv_heads} KV heads"
        )
    return heads


def _shares(read: ConfigReader, layers: list[LayerSpec]) -> list[int | None]:
    """The layer whose keys and values each layer reads: the last of its type that has its own; None: its own."""
    shared = read.count("num_kv_shared_layers")
    first = len(layers) - shared
    if first < 1:
        raise ModelError(f"{read.architecture}: num_kv_shared_layers is {shared} of {len(layers)} layers")
    sources: dict[int | None, int] = {}
    for index, layer in enumerate(layers[:first]):
        sources[layer.window] = index
    if shared and len(sources) < len({layer.window for layer in layers}):
        raise ModelError(
            f"{read.architecture}: layers share keys and values that none before them of their type has"
        )
    return [sources[layer.window] if index >= first else None for index, layer in enumerate(layers)]
