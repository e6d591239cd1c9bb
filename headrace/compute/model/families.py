"""The model families as data: how each differs from the generic decoder; and reading a Hugging Face ``config.json``.

A new family of the same shape is an entry of `FAMILIES`. An option that the decoder does not support is rejected by
name; nothing that changes the result is ignored. It does not need transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.compute.kernels import Activation
from headrace.compute.model.config_reader import ConfigReader
from headrace.compute.model.rope_config import ropes_of
from headrace.compute.model.spec import DecoderSpec, LayerSpec, ModelError
from headrace.compute.quantization.formats import read_format
from headrace.compute.quantization.stored import StoredFormat

MAX_LAYERS = 4096
"""More layers than any model has; each one takes memory before the weights are read."""

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


@dataclass(frozen=True, slots=True)
class Family:
    """Differences from a Llama.

    ``defaults`` are used for fields that a config omits. ``slides(config, layer)`` says which layers have the sliding
    window if the config does not list them (``layer_types``). Biases: None means that the config's ``attention_bias``
    decides. ``scaled_embedding``: embeddings are multiplied by the square root of the hidden size.
    ``attention_softcap``: its attention applies ``attn_logit_softcapping``, which configs of other families may
    contain too. ``nested``: the text model's config is under ``text_config``, and its tensors are stored with other
    parts.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    slides: Callable[[ConfigReader, int], bool] = lambda config, layer: False
    qkv_bias: bool | None = None
    output_bias: bool | None = None
    qk_norm: bool = False
    merged_checkpoint: bool = False
    norm_offset: float = 0.0
    post_norms: bool = False
    scaled_embedding: bool = False
    local_rope: bool = False
    attention_softcap: bool = False
    nested: bool = False


def _always(config: ConfigReader, layer: int) -> bool:
    return True


def _from_layer(config: ConfigReader, layer: int) -> bool:
    return config.flag("use_sliding_window") and layer >= config.count("max_window_layers")


def _every_other(config: ConfigReader, layer: int) -> bool:
    return layer % 2 == 0


def _but_each_nth(config: ConfigReader, layer: int) -> bool:
    return (layer + 1) % config.integer("sliding_window_pattern") != 0


_LLAMA = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 10_000.0, "tie_word_embeddings": False}
_QWEN = _LLAMA | {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_GEMMA = _LLAMA | {
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_GEMMA3 = _GEMMA | {
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "sliding_window_pattern": 6,
}
_GEMMA3_FAMILY: dict[str, Any] = {
    "defaults": _GEMMA3,
    "slides": _but_each_nth,
    "qk_norm": True,
    "norm_offset": 1.0,
    "post_norms": True,
    "scaled_embedding": True,
    "local_rope": True,
}

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(_LLAMA),
    "MistralForCausalLM": Family(
        _LLAMA | {"sliding_window": 4096}, slides=_always, qkv_bias=False, output_bias=False
    ),
    "Qwen2ForCausalLM": Family(_QWEN, slides=_from_layer, qkv_bias=True, output_bias=False),
    "Qwen3ForCausalLM": Family(_QWEN | {"head_dim": 128}, slides=_from_layer, qk_norm=True),
    "Phi3ForCausalLM": Family(
        _LLAMA | {"rms_norm_eps": 1e-5, "sliding_window": None, "original_max_position_embeddings": 4096},
        slides=_always,
        qkv_bias=False,
        output_bias=False,
        merged_checkpoint=True,
    ),
    "Gemma2ForCausalLM": Family(
        _GEMMA
        | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "max_position_embeddings": 8192},
        slides=_every_other,
        norm_offset=1.0,
        post_norms=True,
        scaled_embedding=True,
        attention_softcap=True,
    ),
    "Gemma3ForCausalLM": Family(**_GEMMA3_FAMILY),
    "Gemma3ForConditionalGeneration": Family(**_GEMMA3_FAMILY, nested=True),
}
"""By the name under ``architectures``; SmolLM2 and Phi-4-mini use the names of Llama and Phi-3."""


def parse_config(config: Mapping[str, Any]) -> DecoderSpec:
    """The specification of the model that a ``config.json`` describes.

    Raises:
        ModelError: an architecture or option is not supported, or a field is missing or malformed.
    """
    architecture, family = _family(config)
    outer = config
    if family.nested:
        inner = config.get("text_config")
        if not isinstance(inner, Mapping):
            raise ModelError(f"{architecture}: the config has no text_config")
        config = inner
    read = ConfigReader(architecture, config, family.defaults)
    _refuse_unsupported(read)

    hidden, heads = read.integer("hidden_size"), read.integer("num_attention_heads")
    kv_heads = read.optional_integer("num_key_value_heads") or heads
    head_dim = read.optional_integer("head_dim") or hidden // heads
    if heads % kv_heads:
        raise ModelError(
            f"num_attention_heads ({heads}) is not a multiple of num_key_value_heads ({kv_heads})"
        )
    ropes = ropes_of(read, head_dim, family.local_rope)
    layers = _layers(read, family)
    bias = read.flag("attention_bias")
    scalar = read.optional_number("query_pre_attn_scalar")
    tied = outer.get("tie_word_embeddings") if family.nested else None
    return DecoderSpec(
        architecture=architecture,
        vocab_size=read.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=read.integer("intermediate_size"),
        num_layers=len(layers),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=read.integer("max_position_embeddings"),
        norm_eps=read.number("rms_norm_eps"),
        activation=_activation(read),
        attention_scale=(scalar or head_dim) ** -0.5,
        layers=layers,
        ropes=ropes,
        qkv_bias=bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=bias if family.output_bias is None else family.output_bias,
        mlp_bias=read.flag("mlp_bias"),
        qk_norm=family.qk_norm,
        norm_offset=family.norm_offset,
        post_norms=family.post_norms,
        embedding_scale=hidden**0.5 if family.scaled_embedding else 1.0,
        attention_softcap=read.optional_number("attn_logit_softcapping")
        if family.attention_softcap
        else None,
        logits_softcap=read.optional_number("final_logit_softcapping"),
        tied_embeddings=read.flag("tie_word_embeddings") if tied is None else bool(tied),
        merged_checkpoint=family.merged_checkpoint,
        nested_checkpoint=family.nested,
        dtype=_dtype(config) or _dtype(outer) or "float32",
        stored=_stored(read, outer),
    )


def _family(config: Mapping[str, Any]) -> tuple[str, Family]:
    names = ConfigReader("config", config, {}).names("architectures") or []
    for name in names:
        if name in FAMILIES:
            return name, FAMILIES[name]
    supported = ", ".join(FAMILIES)
    said = ", ".join(names) or "no architecture at all"
    raise ModelError(f"the config names {said}; supported architectures are: {supported}")


def _stored(read: ConfigReader, outer: Mapping[str, Any]) -> StoredFormat | None:
    config = outer.get("quantization_config") or read.get("quantization_config")
    if config is None:  # the earlier name in compressed-tensors
        config = outer.get("compression_config") or read.get("compression_config")
    if config is None:
        return None
    if not isinstance(config, Mapping):
        raise ModelError(f"quantization_config must be an object, the config has {config!r}")
    return read_format(config)


def _refuse_unsupported(read: ConfigReader) -> None:
    if read.get("use_bidirectional_attention"):
        raise ModelError("use_bidirectional_attention: only causal attention is supported")


def _activation(read: ConfigReader) -> Activation:
    # Gemma configs contain an unused "hidden_act" in addition to the "hidden_activation" that applies.
    name = read.get("hidden_activation") or read.get("hidden_act")
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise ModelError(f"hidden_act '{name}' is not supported; supported are: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _layers(read: ConfigReader, family: Family) -> tuple[LayerSpec, ...]:
    count = read.integer("num_hidden_layers")
    if count > MAX_LAYERS:
        raise ModelError(f"num_hidden_layers must be at most {MAX_LAYERS}, the config has {count}")
    window = read.optional_integer("sliding_window")
    kinds = read.names("layer_types")
    if kinds is None:
        sliding = [family.slides(read, layer) for layer in range(count)]
    else:
        unknown = set(kinds) - {"full_attention", "sliding_attention"}
        if unknown:
            raise ModelError(f"layer_types: {', '.join(sorted(unknown))} is not supported")
        if len(kinds) != count:
            raise ModelError(f"layer_types has {len(kinds)} entries for {count} layers (num_hidden_layers)")
        sliding = [kind == "sliding_attention" for kind in kinds]
    return tuple(
        LayerSpec(window=window if slides else None, rope=int(slides and family.local_rope))
        for slides in sliding
    )


_STORED_DTYPES = ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2")
"""Dtypes that a config may name; weights in those that are not computed in are converted, and the start says so."""


def _dtype(config: Mapping[str, Any]) -> str | None:
    """The name of the stored dtype, also written as ``torch.bfloat16``; None if there is none."""
    for name in ("dtype", "torch_dtype"):
        dtype = config.get(name)
        if dtype is None:
            continue
        plain = dtype.removeprefix("torch.") if isinstance(dtype, str) else ""
        if plain not in _STORED_DTYPES:
            raise ModelError(f"{name} must be one of {', '.join(_STORED_DTYPES)}, got {dtype!r:.80}")
        return plain
    return None
