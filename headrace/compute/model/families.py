"""The model families as data: how each differs from the generic decoder; and reading a Hugging Face ``config.json``.

A new family of the same shape is an entry of `FAMILIES`; one that is the text part of a model that also reads images
is an entry of `COMPOSITES`. An option that the decoder does not support is rejected by name; nothing that changes the
result is ignored. It does not need transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from headrace.compute.checkpoint import ModelError
from headrace.compute.kernels import SWIGLU_ALPHA, SWIGLU_LIMIT, Activation, HeadNorm, HeadShape
from headrace.compute.kernels.experts import MAX_EXPERTS, Routing, Scoring, Shared
from headrace.compute.model import deepseek, falcon_h1, gemma4, nemotron_h
from headrace.compute.model.config_reader import ConfigReader
from headrace.compute.model.hybrids import (
    FamilyMixer,
    but_some,
    each_fourth_attends,
    gated_delta,
    lfm2_width,
    short_convolution,
    state_space,
)
from headrace.compute.model.mixers import MixerSpec
from headrace.compute.model.rope import PLAIN_ROPE, RopeReading, Sections, ropes_of
from headrace.compute.model.spec import (
    EXPERT_NAMES,
    MODULE_NAMES,
    NORMS_BEFORE,
    DecoderSpec,
    ExpertNames,
    ExpertsSpec,
    LayerSpec,
    ModuleNames,
    Norms,
    RopeSpec,
)
from headrace.compute.quantization.formats import read_format
from headrace.compute.quantization.scheme import StoredFormat

MAX_LAYERS = 4096
"""More layers than any model has; each one takes memory before the weights are read."""

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


Slides = Callable[[ConfigReader, int], bool]


class UnknownArchitecture(ModelError):
    """A config that no native family computes, and ``why``."""

    def __init__(self, architecture: str, message: str, why: str = "") -> None:
        super().__init__(message)
        self.why = why or str(ModelError(f"no native family has {architecture}"))


@dataclass(frozen=True, slots=True)
class FamilyExperts:
    """How a family's configs describe experts; the count is in one of `_EXPERT_COUNTS`.

    ``width`` is the field of an expert's width. ``normalized`` is a value, or the field that has it; ``scale`` is a
    field. ``shared`` is the field of the shared expert's width, or with ``shared_count`` of a number of experts as
    wide as the others. ``sparse(config, layer)`` says which layers have experts. ``biased`` and ``interleaved`` as in
    `ExpertsSpec`.
    """

    width: str = "moe_intermediate_size"
    scoring: Scoring = "softmax"
    normalized: bool | str = "norm_topk_prob"
    scale: str | None = None
    grouped: bool = False
    corrected: bool = False
    shared: str | None = None
    shared_count: bool = False
    shared_gate: bool = False
    sparse: Callable[[ConfigReader, int], bool] = lambda config, layer: True
    names: ExpertNames = EXPERT_NAMES
    biased: bool = False
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class Family:
    """Differences from a Llama.

    ``defaults`` are used for fields that a config omits. ``slides(config, layer)`` says which layers have the sliding
    window if the config does not list them (``layer_types``); without ``lists_layers`` its code does not read that
    list. ``rotates(config, layer, slides)`` says which layers have a rotary embedding, and ``rope`` how it is read.
    ``qkv_bias``, ``output_bias`` and ``mlp_bias`` are whether there is one, or the field of the config that says so.
    ``activation`` is the field that names the activation, ``activations`` its names. ``scaled_embedding``: embeddings
    are multiplied by the square root of the hidden size. ``multiplied_logits``: its ``logits_scaling`` is a factor,
    not a divisor.

    ``heeds`` are the fields of `_MEANINGS` that it computes, ``ignores`` those that its code does not read although
    its configs have them. ``post_norm_flag`` is the field that says whether the norms after attention and MLP exist.
    ``qk_norm_flag`` says the same of the norms of queries and keys. ``sinks``: attention has sinks. ``experts``: layers
    may have experts.

    ``mixer``: layers may have one in place of attention. ``gated_attention`` and ``names``: see `DecoderSpec`. ``eps``
    is the field of the norms' epsilon, ``width`` reads the width of the MLP. ``count`` reads the number of layers, and
    ``feeds(config, layer)`` says which of them have an MLP or experts.

    ``not_native(config)`` says what a model has that only transformers computes, if anything. ``complete(config,
    spec)`` adds what only this family's configs say.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    slides: Slides = lambda config, layer: False
    lists_layers: bool = False
    rotates: Callable[[ConfigReader, int, bool], bool] = lambda config, layer, slides: True
    rope: RopeReading = PLAIN_ROPE
    interleaved_rope: bool = False
    activation: str = "hidden_act"
    activations: Mapping[str, Activation] = field(default_factory=lambda: _ACTIVATIONS)
    qkv_bias: bool | str = "attention_bias"
    output_bias: bool | str = "attention_bias"
    mlp_bias: bool | str = "mlp_bias"
    qk_norm: HeadNorm | None = None
    norms: Norms = NORMS_BEFORE
    post_norm_flag: str | None = None
    qk_norm_flag: str | None = None
    not_native: Callable[[ConfigReader], str] = lambda config: ""
    complete: Callable[[ConfigReader, DecoderSpec], DecoderSpec] = lambda config, spec: spec
    norm_offset: float = 0.0
    merged_qkv: bool = False
    merged_gate_up: bool = False
    scaled_embedding: bool = False
    multiplied_logits: bool = False
    heeds: frozenset[str] = frozenset()
    ignores: frozenset[str] = frozenset()
    sinks: bool = False
    experts: FamilyExperts | None = None
    mixer: FamilyMixer | None = None
    gated_attention: bool = False
    names: ModuleNames = MODULE_NAMES
    eps: str = "rms_norm_eps"
    width: Callable[[ConfigReader], int] = lambda config: config.integer("intermediate_size")
    count: Callable[[ConfigReader], int] = lambda config: config.integer("num_hidden_layers")
    feeds: Callable[[ConfigReader, int], bool] = lambda config, layer: True


_MEANINGS: dict[str, tuple[Any, ...]] = {
    "query_pre_attn_scalar": (),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "logits_scaling": (1,),
    "attention_multiplier": (),
    "logit_scale": (1,),
    "scale_emb": (1,),
    "scale_depth": (),
    "clip_qkv": (),
    "alibi": (),
    "no_rope_layers": ([],),
    "use_cla": (),
    "use_qk_norm": (),
    "qk_layernorm": (),
    "attention_chunk_size": (),
    "cross_attention_layers": ([],),
    "kv_lora_rank": (),
    "num_experts": (0, 1),
    "num_local_experts": (0, 1),
    "n_routed_experts": (0, 1),
    "use_bidirectional_attention": (),
    "hidden_size_per_layer_input": (0,),
    "swiglu_alpha": (),
    "swiglu_limit": (),
}
"""Fields that change results in families that read them, with the values that change nothing beside null and false."""


def _always(config: ConfigReader, layer: int) -> bool:
    return True


def _from_layer(config: ConfigReader, layer: int) -> bool:
    return config.flag("use_sliding_window") and layer >= config.count("max_window_layers")


def _every_other(config: ConfigReader, layer: int) -> bool:
    return layer % 2 == 0


def _but_each_nth(config: ConfigReader, layer: int) -> bool:
    return (layer + 1) % config.integer("sliding_window_pattern") != 0


def _but_each_fourth(config: ConfigReader, layer: int) -> bool:
    return (layer + 1) % 4 != 0


def _but_each_fourth_from_the_first(config: ConfigReader, layer: int) -> bool:
    return layer % 4 != 0


def _listed_for_rope(config: ConfigReader, layer: int, slides: bool) -> bool:
    """SmolLM3: a list of ones and zeros, else each n-th layer has none."""
    listed = config.integers("no_rope_layers")
    if listed is None:
        return (layer + 1) % config.integer("no_rope_layer_interval") != 0
    if layer >= len(listed):
        raise ModelError(f"no_rope_layers has {len(listed)} entries, layer {layer} has none")
    return bool(listed[layer])


def _without_rope_if_windowed(config: ConfigReader, layer: int) -> bool:
    windowed = config.flag("use_sliding_window") and config.get("sliding_window") is not None
    return windowed and not _listed_for_rope(config, layer, False)


def _where_it_slides(config: ConfigReader, layer: int, slides: bool) -> bool:
    """EXAONE 4: layers that see all tokens have no rope, if others have a window."""
    return slides or config.get("sliding_window") is None


def _sparse_steps(config: ConfigReader, layer: int) -> bool:
    """Qwen: each n-th layer, except those of a list."""
    dense = config.integers("mlp_only_layers") or []
    return layer not in dense and (layer + 1) % config.integer("decoder_sparse_step") == 0


def _joint_images(read: ConfigReader, spec: DecoderSpec) -> DecoderSpec:
    """Tokens of an image attend to each other both ways, in all layers."""
    return replace(spec, layers=tuple(replace(layer, joint=True) for layer in spec.layers))


def _behind_the_first(config: ConfigReader, layer: int) -> bool:
    return layer >= config.count("first_k_dense_replace")


def _listed_as_sparse(config: ConfigReader, layer: int) -> bool:
    """GLM-4.7-Flash: layers whose type in a list is sparse; without it all behind the first ones."""
    kinds = config.names("mlp_layer_types")
    if kinds is None:
        return _behind_the_first(config, layer)
    if layer >= len(kinds) or kinds[layer] not in ("dense", "sparse"):
        raise ModelError(f"{config.architecture}: mlp_layer_types does not say what layer {layer} is")
    return kinds[layer] == "sparse"


def _before_layer(config: ConfigReader, layer: int) -> bool:
    """Qwen2-MoE: every other layer up to one."""
    windowed = config.flag("use_sliding_window") and layer < config.count("max_window_layers")
    return windowed and (layer + 1) % 2 == 1


_LLAMA = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "rope_theta": 10_000.0, "tie_word_embeddings": False}
_QWEN = _LLAMA | {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_GEMMA1 = _LLAMA | {
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "head_dim": 256,
}
_GEMMA = _LLAMA | {
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
_GEMMA2 = _GEMMA | {
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "max_position_embeddings": 8192,
}
_GEMMA3 = _GEMMA | {
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "sliding_window_pattern": 6,
}
_OLMO = _LLAMA | {"rms_norm_eps": 1e-5}
_GLM = _LLAMA | {
    "rms_norm_eps": 1.5625e-7,
    "head_dim": 128,
    "num_key_value_heads": 2,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}
_CWM_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 150_000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_GEMMA_NORMS = Norms(
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_NORMS_AFTER = Norms(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
_SOFTCAPS = frozenset(("attn_logit_softcapping", "final_logit_softcapping"))
_MULTIPLIERS = frozenset(
    ("embedding_multiplier", "residual_multiplier", "logits_scaling", "attention_multiplier")
)

_QWEN_EXPERTS = {
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
}
_BLOCK_SPARSE = ExpertNames(
    "block_sparse_moe", gate="w1", up="w3", down="w2", correction="e_score_correction_bias"
)

_QWEN_HYBRID = (
    _LLAMA
    | {"head_dim": 256, "partial_rotary_factor": 0.25, "full_attention_interval": 4, "attention_bias": False}
    | {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
    | {"linear_num_key_heads": 16, "linear_num_value_heads": 32}
)
_QWEN3_5 = Family(
    _QWEN_HYBRID,
    rope=RopeReading(partial=True, sections=Sections((11, 11, 10), interleaved=True)),
    mlp_bias=False,
    qk_norm="head",
    norm_offset=1.0,
    mixer=FamilyMixer(partial(gated_delta, fused=False), ("linear_attention",), each_fourth_attends),
    gated_attention=True,
)
_QWEN_HYBRID_EXPERTS = FamilyExperts(
    normalized=True,
    shared="shared_expert_intermediate_size",
    shared_gate=True,
    names=ExpertNames(shared="shared_expert"),
)
_QWEN3_5_MOE = replace(
    _QWEN3_5,
    defaults=_QWEN_HYBRID
    | {"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512}
    | {"shared_expert_intermediate_size": 512, "num_key_value_heads": 2},
    width=lambda config: config.integer("moe_intermediate_size"),  # every layer has experts
    experts=_QWEN_HYBRID_EXPERTS,
)
_LFM2 = Family(
    _LLAMA
    | {"norm_eps": 1e-5, "rope_theta": 1_000_000.0, "tie_word_embeddings": True, "conv_bias": False}
    | {"conv_L_cache": 3, "num_key_value_heads": 8, "max_position_embeddings": 128_000},
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm="head",
    norms=Norms("operator_norm", None, "ffn_norm", None),
    mixer=FamilyMixer(short_convolution, ("conv",), but_some("full_attn_idxs"), activated=None),
    names=ModuleNames(
        mlp="feed_forward",
        gate="w1",
        up="w3",
        down="w2",
        output="out_proj",
        query_norm="q_layernorm",
        key_norm="k_layernorm",
        final_norm="model.embedding_norm",
    ),
    eps="norm_eps",
)
_MAMBA = (
    _LLAMA
    | {"mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_head": "auto"}
    | {"mamba_d_conv": 4, "mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False}
)
_MAMBA_LAYERS = ("mamba", "linear_attention")
_GROUPED_EXPERTS = FamilyExperts(
    scoring="sigmoid",
    scale="routed_scaling_factor",
    grouped=True,
    corrected=True,
    shared="n_shared_experts",
    shared_count=True,
    sparse=_behind_the_first,
)
"""DeepSeek-V3's."""
_DEEPSEEK_V3 = Family(
    deepseek.DEFAULTS,
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    heeds=frozenset(("kv_lora_rank",)),
    not_native=deepseek.not_native,
    complete=deepseek.complete,
    experts=_GROUPED_EXPERTS,
)

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(_LLAMA),
    "MistralForCausalLM": Family(
        _LLAMA | {"sliding_window": 4096}, slides=_always, qkv_bias=False, output_bias=False
    ),
    "MinistralForCausalLM": Family(
        _LLAMA | {"sliding_window": 4096, "num_key_value_heads": 8},
        slides=_always,
        lists_layers=True,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
    ),
    "Qwen2ForCausalLM": Family(
        _QWEN, slides=_from_layer, lists_layers=True, qkv_bias=True, output_bias=False
    ),
    "Qwen3ForCausalLM": Family(
        _QWEN | {"head_dim": 128}, slides=_from_layer, lists_layers=True, qk_norm="head"
    ),
    "Phi3ForCausalLM": Family(
        _LLAMA | {"rms_norm_eps": 1e-5, "sliding_window": None, "original_max_position_embeddings": 4096},
        slides=_always,
        rope=RopeReading(partial=True, longrope=("su", "yarn")),
        qkv_bias=False,
        output_bias=False,
        merged_qkv=True,
        merged_gate_up=True,
    ),
    "GemmaForCausalLM": Family(
        _GEMMA1,
        activations=_ACTIVATIONS
        | {"gelu": "gelu_tanh"},  # its first configs say so and mean the approximation
        mlp_bias=False,
        norm_offset=1.0,
        scaled_embedding=True,
    ),
    "Gemma2ForCausalLM": Family(
        _GEMMA2,
        slides=_every_other,
        lists_layers=True,
        activation="hidden_activation",
        norm_offset=1.0,
        norms=_GEMMA_NORMS,
        scaled_embedding=True,
        heeds=_SOFTCAPS | {"query_pre_attn_scalar"},
    ),
    "VaultGemmaForCausalLM": Family(
        _GEMMA2,
        slides=_every_other,
        lists_layers=True,
        activation="hidden_activation",
        norm_offset=1.0,
        norms=Norms("input_layernorm", None, "pre_feedforward_layernorm", None),
        scaled_embedding=True,
        heeds=_SOFTCAPS | {"query_pre_attn_scalar"},
    ),
    "Gemma3ForCausalLM": Family(
        _GEMMA3,
        slides=_but_each_nth,
        lists_layers=True,
        rope=RopeReading(local=True),
        activation="hidden_activation",
        qk_norm="head",
        norm_offset=1.0,
        norms=_GEMMA_NORMS,
        scaled_embedding=True,
        heeds=frozenset(("query_pre_attn_scalar", "final_logit_softcapping")),
        ignores=frozenset(("attn_logit_softcapping",)),
        complete=_joint_images,
    ),
    "Gemma4ForCausalLM": Family(
        gemma4.DEFAULTS,
        slides=_but_each_nth,
        lists_layers=True,
        rope=RopeReading(local=True, proportional=True),
        activation="hidden_activation",
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm="values",
        norms=_GEMMA_NORMS,
        scaled_embedding=True,
        heeds=frozenset(("final_logit_softcapping", "use_bidirectional_attention")),
        not_native=gemma4.not_native,
        complete=gemma4.complete,
    ),
    "CwmForCausalLM": Family(
        _LLAMA
        | {"rms_norm_eps": 1e-5, "head_dim": 128, "sliding_window": 8192}
        | {"rope_theta": 1_000_000.0, "rope_parameters": _CWM_ROPE},
        slides=_but_each_fourth_from_the_first,
        lists_layers=True,
        qkv_bias=False,
        output_bias=False,
    ),
    "Ernie4_5ForCausalLM": Family(
        _LLAMA
        | {"rms_norm_eps": 1e-5, "head_dim": 128, "num_key_value_heads": 2}
        | {"rope_theta": 500_000.0, "tie_word_embeddings": True},
        interleaved_rope=True,
        qkv_bias="use_bias",
        output_bias="use_bias",
        mlp_bias="use_bias",
    ),
    "Exaone4ForCausalLM": Family(
        _OLMO | {"num_key_value_heads": 32, "sliding_window": 4096, "sliding_window_pattern": 4},
        slides=_but_each_nth,
        lists_layers=True,
        rotates=_where_it_slides,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm="head",
        norms=_NORMS_AFTER,
    ),
    "GlmForCausalLM": Family(
        _GLM,
        rope=RopeReading(partial=True),
        interleaved_rope=True,
        output_bias=False,
        mlp_bias=False,
        merged_gate_up=True,
    ),
    "Glm4ForCausalLM": Family(
        _GLM,
        rope=RopeReading(partial=True),
        interleaved_rope=True,
        output_bias=False,
        mlp_bias=False,
        norms=Norms(
            "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"
        ),
        merged_gate_up=True,
    ),
    "GraniteForCausalLM": Family(_LLAMA | {"attention_multiplier": 1.0}, heeds=_MULTIPLIERS),
    "HeliumForCausalLM": Family(
        _LLAMA | {"rms_norm_eps": 1e-8, "head_dim": 128, "num_key_value_heads": 20, "rope_theta": 100_000.0},
        interleaved_rope=True,
        output_bias=False,
    ),
    "HunYuanDenseV1ForCausalLM": Family(
        _OLMO,
        rope=RopeReading(alpha=True),
        mlp_bias=False,
        qk_norm="rotated",
        ignores=frozenset(("use_qk_norm",)),
    ),
    "HyperCLOVAXForCausalLM": Family(
        _LLAMA | {"use_post_norm": True},
        norms=Norms("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2"),
        post_norm_flag="use_post_norm",
        multiplied_logits=True,
        heeds=_MULTIPLIERS,
    ),
    "Olmo2ForCausalLM": Family(_OLMO, mlp_bias=False, qk_norm="projection", norms=_NORMS_AFTER),
    "Olmo3ForCausalLM": Family(
        _OLMO | {"rope_theta": 500_000.0, "rope_local_base_freq": 500_000.0} | {"sliding_window": 4096},
        slides=_but_each_fourth,
        lists_layers=True,
        rope=RopeReading(local=True),
        mlp_bias=False,
        qk_norm="projection",
        norms=_NORMS_AFTER,
    ),
    "BambaForCausalLM": Family(
        _MAMBA
        | {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "partial_rotary_factor": 0.5}
        | {"max_position_embeddings": 262_144, "attn_layer_indices": []},
        rope=RopeReading(partial=True),
        norms=Norms("input_layernorm", None, "pre_ff_layernorm", None),
        mixer=FamilyMixer(
            state_space, _MAMBA_LAYERS, but_some("attn_layer_indices"), listed="layers_block_type"
        ),
        names=ModuleNames(mlp="feed_forward", final_norm="model.final_layernorm"),
    ),
    "GraniteMoeHybridForCausalLM": Family(
        _MAMBA
        | {"attention_multiplier": 1.0, "num_local_experts": 8, "num_experts_per_tok": 2}
        | {"shared_intermediate_size": 1024, "max_position_embeddings": 2048},
        rotates=lambda config, layer, slides: config.get("position_embedding_type") == "rope",
        mlp_bias=False,
        merged_gate_up=True,
        heeds=_MULTIPLIERS,
        experts=FamilyExperts(
            width="intermediate_size",
            normalized=True,
            shared="shared_intermediate_size",
            sparse=lambda config, layer: bool(config.count("num_local_experts")),
            names=ExpertNames("block_sparse_moe", router="router.layer", shared="shared_mlp"),
        ),
        mixer=FamilyMixer(state_space, _MAMBA_LAYERS, lambda config, layer: True),
        names=ModuleNames(mlp="shared_mlp", gate_up="input_linear", down="output_linear"),
        width=lambda config: config.integer("shared_intermediate_size"),
    ),
    "GraniteMoeForCausalLM": Family(
        _LLAMA | {"attention_multiplier": 1.0, "num_local_experts": 8, "num_experts_per_tok": 2},
        mlp_bias=False,
        heeds=_MULTIPLIERS,
        experts=FamilyExperts(
            width="intermediate_size",
            normalized=True,
            names=ExpertNames("block_sparse_moe", router="router.layer"),
        ),
    ),
    "Glm4MoeForCausalLM": Family(
        _LLAMA
        | {"rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5, "attention_bias": False, "use_qk_norm": False}
        | {"moe_intermediate_size": 1408, "num_experts_per_tok": 8, "n_shared_experts": 1}
        | {"n_routed_experts": 128, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1}
        | {"first_k_dense_replace": 1, "norm_topk_prob": True},
        rope=RopeReading(partial=True),
        output_bias=False,
        mlp_bias=False,
        qk_norm="head",
        qk_norm_flag="use_qk_norm",
        heeds=frozenset(("use_qk_norm",)),
        experts=_GROUPED_EXPERTS,
    ),
    "DeepseekV3ForCausalLM": _DEEPSEEK_V3,
    "Glm4MoeLiteForCausalLM": replace(
        _DEEPSEEK_V3,
        defaults=deepseek.GLM_DEFAULTS,
        experts=replace(_GROUPED_EXPERTS, sparse=_listed_as_sparse),
    ),
    "Lfm2ForCausalLM": replace(
        _LFM2,
        defaults={
            **_LFM2.defaults,
            "block_multiple_of": 256,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": True,
        },
        width=lfm2_width,
    ),
    "Lfm2MoeForCausalLM": replace(
        _LFM2,
        defaults={
            **_LFM2.defaults,
            "moe_intermediate_size": 1792,
            "num_dense_layers": 2,
            "num_experts_per_tok": 4,
            "num_experts": 32,
            "use_expert_bias": True,
            "routed_scaling_factor": 1.0,
            "norm_topk_prob": True,
        },
        experts=FamilyExperts(
            scoring="sigmoid",
            scale="routed_scaling_factor",
            corrected=True,
            sparse=lambda config, layer: layer >= config.count("num_dense_layers"),
            names=ExpertNames("feed_forward", gate="w1", up="w3", down="w2", correction="expert_bias"),
        ),
    ),
    "FalconH1ForCausalLM": Family(
        falcon_h1.DEFAULTS,
        qkv_bias=False,
        output_bias=False,
        norms=Norms("input_layernorm", None, "pre_ff_layernorm", None),
        heeds=frozenset(("embedding_multiplier",)),
        not_native=falcon_h1.not_native,
        complete=falcon_h1.complete,
        mixer=falcon_h1.MIXER,
        names=ModuleNames(mlp="feed_forward", final_norm="model.final_layernorm"),
    ),
    "NemotronHForCausalLM": Family(
        nemotron_h.DEFAULTS,
        qkv_bias=False,
        output_bias=False,
        rotates=lambda config, layer, slides: False,
        activation="mlp_hidden_act",
        activations={"relu2": "squared_relu"},
        not_native=nemotron_h.not_native,
        complete=nemotron_h.complete,
        experts=FamilyExperts(
            scoring="sigmoid",
            scale="routed_scaling_factor",
            grouped=True,
            corrected=True,
            shared="moe_shared_expert_intermediate_size",
            sparse=lambda config, layer: nemotron_h.layers_of(config)[layer].experts,
        ),
        mixer=nemotron_h.MIXER,
        eps="layer_norm_epsilon",
        count=lambda config: len(nemotron_h.layers_of(config)),
        feeds=lambda config, layer: nemotron_h.layers_of(config)[layer].mlp is not None,
    ),
    "GptOssForCausalLM": Family(
        _LLAMA
        | {"rms_norm_eps": 1e-5, "rope_theta": 150_000.0, "rope_parameters": _GPT_OSS_ROPE, "head_dim": 64}
        | {"num_key_value_heads": 8, "attention_bias": True, "sliding_window": 128, "intermediate_size": 2880}
        | {"num_local_experts": 128, "num_experts_per_tok": 4}
        | {"swiglu_alpha": SWIGLU_ALPHA, "swiglu_limit": SWIGLU_LIMIT},
        slides=_every_other,
        lists_layers=True,
        activations={"silu": "clamped_swiglu"},
        mlp_bias=False,
        sinks=True,
        experts=FamilyExperts(
            width="intermediate_size",
            normalized=True,
            names=ExpertNames(router="router"),
            biased=True,
            interleaved=True,
        ),
    ),
    "MiniMaxM2ForCausalLM": Family(
        _LLAMA
        | {"head_dim": 128, "num_key_value_heads": 8, "rope_theta": 5_000_000.0}
        | {"num_local_experts": 256, "num_experts_per_tok": 8},
        rope=RopeReading(partial=True, dimensions=True),
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm="projection",
        heeds=frozenset(("use_qk_norm",)),
        experts=FamilyExperts(
            width="intermediate_size",
            scoring="sigmoid",
            normalized=True,
            corrected=True,
            names=_BLOCK_SPARSE,
        ),
    ),
    "MixtralForCausalLM": Family(
        _LLAMA
        | {"rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0, "num_key_value_heads": 8}
        | {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
        slides=_always,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        experts=FamilyExperts(width="intermediate_size", normalized=True, names=_BLOCK_SPARSE),
    ),
    "OlmoeForCausalLM": Family(
        _OLMO | {"num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False},
        mlp_bias=False,
        qk_norm="projection",
        experts=FamilyExperts(width="intermediate_size"),
    ),
    "Qwen2MoeForCausalLM": Family(
        _LLAMA
        | _QWEN_EXPERTS
        | {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408}
        | {"shared_expert_intermediate_size": 5632, "max_window_layers": 28, "qkv_bias": True},
        slides=_before_layer,
        lists_layers=True,
        qkv_bias="qkv_bias",
        output_bias=False,
        mlp_bias=False,
        experts=FamilyExperts(
            shared="shared_expert_intermediate_size",
            shared_gate=True,
            sparse=_sparse_steps,
            names=ExpertNames(shared="shared_expert"),
        ),
    ),
    "Qwen3MoeForCausalLM": Family(
        _LLAMA
        | _QWEN_EXPERTS
        | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
        | {"num_key_value_heads": 4},
        slides=lambda config, layer: config.flag("use_sliding_window"),
        mlp_bias=False,
        qk_norm="head",
        experts=FamilyExperts(sparse=_sparse_steps),
    ),
    "Qwen3NextForCausalLM": Family(
        _QWEN_HYBRID
        | {"num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512}
        | {"shared_expert_intermediate_size": 512, "norm_topk_prob": True, "num_key_value_heads": 2}
        | {"decoder_sparse_step": 1, "mlp_only_layers": []},
        rope=RopeReading(partial=True),
        mlp_bias=False,
        qk_norm="head",
        norm_offset=1.0,
        experts=replace(_QWEN_HYBRID_EXPERTS, normalized="norm_topk_prob", sparse=_sparse_steps),
        mixer=FamilyMixer(partial(gated_delta, fused=True), ("linear_attention",), each_fourth_attends),
        gated_attention=True,
    ),
    "Qwen3_5ForCausalLM": _QWEN3_5,
    "Qwen3_5MoeForCausalLM": _QWEN3_5_MOE,
    "SeedOssForCausalLM": Family(
        _LLAMA | {"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True},
        output_bias="attention_out_bias",
    ),
    "SmolLM3ForCausalLM": Family(
        _LLAMA
        | {"num_key_value_heads": 4, "rope_theta": 2_000_000.0, "tie_word_embeddings": True}
        | {"no_rope_layer_interval": 4},
        slides=_without_rope_if_windowed,
        lists_layers=True,
        rotates=_listed_for_rope,
        heeds=frozenset(("no_rope_layers",)),
    ),
}
"""By the name under ``architectures``; SmolLM2 and Phi-4-mini use the names of Llama and Phi-3."""


@dataclass(frozen=True, slots=True)
class TextType:
    """A type of text model within another: its family, and the sizes that its configs omit."""

    family: Family
    sizes: Mapping[str, Any] = field(default_factory=dict)


def _sizes(
    vocabulary: int, hidden: int, inner: int, layers: int, heads: int, kv_heads: int | None, positions: int
) -> dict[str, int | None]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": positions,
    }


_SECTIONS = RopeReading(sections=Sections((16, 24, 24)))
_MIXED_SECTIONS = RopeReading(sections=Sections((24, 20, 20), interleaved=True))
_QWEN2_VL = TextType(
    replace(
        FAMILIES["Qwen2ForCausalLM"],
        defaults=_QWEN | {"rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0, "max_window_layers": 80},
        rope=_SECTIONS,
    ),
    _sizes(152_064, 8192, 29_568, 80, 64, 8, 32_768),
)

TEXT_TYPES: dict[str, TextType] = {
    "exaone4": TextType(FAMILIES["Exaone4ForCausalLM"], _sizes(102_400, 4096, 16_384, 32, 32, 32, 2048)),
    "gemma3_text": TextType(FAMILIES["Gemma3ForCausalLM"]),
    "gemma4_text": TextType(FAMILIES["Gemma4ForCausalLM"]),
    "granite_docling_text": TextType(
        replace(
            FAMILIES["GraniteForCausalLM"],
            defaults=_LLAMA
            | {"rms_norm_eps": 1e-5, "embedding_multiplier": 12.0, "attention_multiplier": 0.015625}
            | {"logits_scaling": 4.0, "residual_multiplier": 0.263},
        ),
        _sizes(133_800, 1024, 2048, 28, 16, 4, 32_768),
    ),
    "hyperclovax": TextType(
        FAMILIES["HyperCLOVAXForCausalLM"], _sizes(32_000, 4096, 11_008, 32, 32, None, 2048)
    ),
    "llama": TextType(FAMILIES["LlamaForCausalLM"], _sizes(32_000, 4096, 11_008, 32, 32, None, 2048)),
    "mistral": TextType(FAMILIES["MistralForCausalLM"], _sizes(32_000, 4096, 14_336, 32, 32, 8, 131_072)),
    "paddleocr_vl_text": TextType(
        replace(FAMILIES["Ernie4_5ForCausalLM"], interleaved_rope=False, rope=_SECTIONS),
        _sizes(103_424, 1024, 3072, 18, 16, 2, 131_072),
    ),
    "qwen2": TextType(FAMILIES["Qwen2ForCausalLM"], _sizes(151_936, 4096, 22_016, 32, 32, 32, 32_768)),
    "qwen2_vl_text": _QWEN2_VL,
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen3": TextType(FAMILIES["Qwen3ForCausalLM"], _sizes(151_936, 4096, 22_016, 32, 32, 32, 32_768)),
    "qwen3_5_text": TextType(_QWEN3_5, _sizes(248_320, 4096, 12_288, 32, 16, 4, 32_768)),
    "qwen3_5_moe_text": TextType(_QWEN3_5_MOE, _sizes(248_320, 2048, 512, 40, 16, 2, 32_768)),
    "qwen3_vl_text": TextType(
        Family(
            _LLAMA | {"head_dim": 128, "rope_theta": 500_000.0},
            rope=_MIXED_SECTIONS,
            mlp_bias=False,
            qk_norm="head",
        ),
        _sizes(151_936, 4096, 22_016, 32, 32, 32, 128_000),
    ),
    "qwen3_vl_moe_text": TextType(
        Family(
            _LLAMA
            | {"head_dim": 128, "rope_theta": 500_000.0, "decoder_sparse_step": 1, "mlp_only_layers": []}
            | {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408},
            rope=_MIXED_SECTIONS,
            mlp_bias=False,
            qk_norm="head",
            experts=FamilyExperts(normalized=True, sparse=_sparse_steps),
        ),
        _sizes(151_936, 2048, 5632, 24, 16, 16, 128_000),
    ),
}
"""By the ``model_type`` of a ``text_config``. Sizes are those of transformers' configs of the type."""


@dataclass(frozen=True, slots=True)
class Composite:
    """A model that also reads images, of which the text part is served.

    ``text`` is the type of its text model unless the config names it. ``tied``: its head is the embedding, unless
    the config says otherwise. ``flat``: its first configs have the fields of the text model beside those of images.
    """

    text: str
    tied: bool = False
    flat: bool = False


COMPOSITES: dict[str, Composite] = {
    "DeepseekVLForConditionalGeneration": Composite("llama", tied=True),
    "DeepseekVLHybridForConditionalGeneration": Composite("llama", tied=True),
    "Exaone4_5_ForConditionalGeneration": Composite("exaone4"),
    "Gemma3ForConditionalGeneration": Composite("gemma3_text", tied=True),
    "Gemma4ForConditionalGeneration": Composite("gemma4_text", tied=True),
    "GotOcr2ForConditionalGeneration": Composite("qwen2", tied=True),
    "GraniteDoclingForConditionalGeneration": Composite("granite_docling_text", tied=True),
    "HyperCLOVAXVisionV2ForConditionalGeneration": Composite("hyperclovax", tied=True),
    "Idefics2ForConditionalGeneration": Composite("mistral"),
    "Idefics3ForConditionalGeneration": Composite("llama"),
    "InternVLForConditionalGeneration": Composite("qwen2"),
    "LightOnOcrForConditionalGeneration": Composite("qwen3", tied=True),
    "LlavaForConditionalGeneration": Composite("llama"),
    "LlavaNextForConditionalGeneration": Composite("llama"),
    "LlavaNextVideoForConditionalGeneration": Composite("llama"),
    "LlavaOnevisionForConditionalGeneration": Composite("qwen2"),
    "Mistral3ForConditionalGeneration": Composite("mistral"),
    "Ovis2ForConditionalGeneration": Composite("qwen2", tied=True),
    "PaddleOCRVLForConditionalGeneration": Composite("paddleocr_vl_text", tied=True),
    "Qwen2VLForConditionalGeneration": Composite("qwen2_vl_text", flat=True),
    "Qwen2_5_VLForConditionalGeneration": Composite("qwen2_5_vl_text", flat=True),
    "Qwen3_5ForConditionalGeneration": Composite("qwen3_5_text"),
    "Qwen3_5MoeForConditionalGeneration": Composite("qwen3_5_moe_text"),
    "Qwen3VLForConditionalGeneration": Composite("qwen3_vl_text"),
    "Qwen3VLMoeForConditionalGeneration": Composite("qwen3_vl_moe_text"),
    "SmolVLMForConditionalGeneration": Composite("llama"),
    "VideoLlama3ForConditionalGeneration": Composite("qwen2"),
    "VideoLlavaForConditionalGeneration": Composite("llama"),
    "VipLlavaForConditionalGeneration": Composite("llama"),
}
"""By the name under ``architectures``."""


@dataclass(frozen=True, slots=True)
class _Described:
    """A config, and how it is to be read: ``text`` is the part that describes the decoder."""

    architecture: str
    family: Family
    outer: Mapping[str, Any]
    text: Mapping[str, Any]
    nested: bool
    defaults: Mapping[str, Any]


def parse_config(config: Mapping[str, Any]) -> DecoderSpec:
    """The specification of the model that a ``config.json`` describes.

    Raises:
        ModelError: an architecture or option is not supported, or a field is missing or malformed. Of a hybrid model
            it is an `UnknownArchitecture`, since transformers' code computes those with other options.
    """
    of = _described(config)
    if of.family.mixer is None:
        return _parsed(of)
    try:
        return _parsed(of)
    except ModelError as error:
        raise UnknownArchitecture(of.architecture, str(error), str(error)) from error


def _parsed(of: _Described) -> DecoderSpec:
    family, outer = of.family, of.outer
    read = ConfigReader(of.architecture, of.text, of.defaults)
    _refuse_unsupported(read, family)

    hidden = read.integer("hidden_size")
    heads, kv_heads, head_dim = _heads(read, hidden)
    layers, ropes = _layers(read, family, ropes_of(read, head_dim, family.rope))
    norms, multipliers = _norms(read, family), _multipliers(read, family)
    outputs, logits_scaling = multipliers["residual_multiplier"], multipliers["logits_scaling"]
    normed = norms.post_mlp_norm is not None
    residual_scale = 1.0 if normed else 1 / outputs
    spec = DecoderSpec(
        architecture=of.architecture,
        vocab_size=read.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=family.width(read),
        experts=_experts(read, family),
        draft_layers=_draft_layers(read, family),
        num_layers=len(layers),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=read.integer("max_position_embeddings"),
        norm_eps=read.number(family.eps) * residual_scale**2,
        activation=_activation(read, family),
        attention_scale=_attention_scale(read, family, head_dim),
        layers=layers,
        ropes=ropes,
        qkv_bias=_biased(read, family.qkv_bias),
        output_bias=_biased(read, family.output_bias),
        mlp_bias=_biased(read, family.mlp_bias),
        qk_norm=_qk_norm(read, family),
        norm_offset=family.norm_offset,
        norms=norms,
        interleaved_rope=family.interleaved_rope,
        embedding_scale=(hidden**0.5 if family.scaled_embedding else 1.0)
        * multipliers["embedding_multiplier"]
        * residual_scale,
        residual_scale=residual_scale,
        output_scale=outputs if normed else 1.0,
        logits_scale=logits_scaling if family.multiplied_logits else 1 / logits_scaling,
        attention_softcap=_heeded(read, family, "attn_logit_softcapping"),
        logits_softcap=_heeded(read, family, "final_logit_softcapping"),
        sinks=family.sinks,
        tied_embeddings=_tied(of, read),
        merged_qkv=family.merged_qkv,
        merged_gate_up=family.merged_gate_up,
        nested_checkpoint=of.nested,
        mixer=_mixer(read, family, layers),
        gated_attention=family.gated_attention,
        names=family.names,
        dtype=_dtype(of.text) or _dtype(outer) or "float32",
        stored=_stored(read, outer),
    )
    return family.complete(read, spec)


def _mixer(read: ConfigReader, family: Family, layers: Sequence[LayerSpec]) -> MixerSpec | None:
    """The mixer of the recurrent layers; none if all attend (Granite 4 Micro) without gates."""
    needed = family.gated_attention or any(layer.recurrent for layer in layers)
    return family.mixer.mixer(read) if family.mixer is not None and needed else None


def _heads(read: ConfigReader, hidden: int) -> HeadShape:
    heads = read.integer("num_attention_heads")
    kv_heads = read.optional_integer("num_key_value_heads") or heads
    if heads % kv_heads:
        raise ModelError(
            f"num_attention_heads ({heads}) is not a multiple of num_key_value_heads ({kv_heads})"
        )
    return HeadShape(heads, kv_heads, read.optional_integer("head_dim") or hidden // heads)


def _draft_layers(read: ConfigReader, family: Family) -> int:
    """The layers behind the last one that only draft."""
    named = family.experts is not None and read.given("num_nextn_predict_layers")
    return read.count("num_nextn_predict_layers") if named else 0


def _qk_norm(read: ConfigReader, family: Family) -> HeadNorm | None:
    if family.qk_norm_flag is not None and not read.flag(family.qk_norm_flag):
        return None
    return family.qk_norm


def _tied(of: _Described, read: ConfigReader) -> bool:
    """What the whole model's config says counts."""
    outer = ConfigReader(of.architecture, of.outer, {})
    return (outer if outer.given("tie_word_embeddings") else read).flag("tie_word_embeddings")


_RENAMING = frozenset(("exaone", "sarvam_moe"))
"""The types that have the architecture of a family, and other names in their checkpoints."""


def _described(config: Mapping[str, Any]) -> _Described:
    names = ConfigReader("config", config, {}).names("architectures") or []
    for name in names if str(config.get("model_type")) not in _RENAMING else ():
        if name in FAMILIES:
            return _Described(name, FAMILIES[name], config, config, False, FAMILIES[name].defaults)
        if name in COMPOSITES:
            return _composite(name, config)
    supported = ", ".join((*FAMILIES, *COMPOSITES))
    said = ", ".join(names) or "no architecture at all"
    raise UnknownArchitecture(said, f"the config names {said}; supported architectures are: {supported}")


def _composite(name: str, config: Mapping[str, Any]) -> _Described:
    """The text model of one that also reads images, whose type is in its own config."""
    composite = COMPOSITES[name]
    inner = config.get("text_config", config if composite.flat else None)
    if not isinstance(inner, Mapping):
        raise ModelError(f"{name}: the config has no text_config")
    kind = composite.text if inner is config else inner.get("model_type", composite.text)
    if not isinstance(kind, str) or kind not in TEXT_TYPES:
        raise UnknownArchitecture(
            name,
            f"{name}: text_config has the model_type {kind!r:.80}; supported are: {', '.join(TEXT_TYPES)}",
        )
    text = TEXT_TYPES[kind]
    defaults = {**text.family.defaults, **text.sizes, "tie_word_embeddings": composite.tied}
    return _Described(name, text.family, config, inner, True, defaults)


def _stored(read: ConfigReader, outer: Mapping[str, Any]) -> StoredFormat | None:
    config = outer.get("quantization_config") or read.get("quantization_config")
    if config is None:  # the earlier name in compressed-tensors
        config = outer.get("compression_config") or read.get("compression_config")
    if config is None:
        return None
    if not isinstance(config, Mapping):
        raise ModelError(f"quantization_config must be an object, the config has {config!r:.80}")
    return read_format(config)


def _refuse_unsupported(read: ConfigReader, family: Family) -> None:
    if foreign := family.not_native(read):
        named = f"{read.architecture} with {foreign}"
        raise UnknownArchitecture(
            named, f"{named} is not of a native family; --model-impl transformers serves it"
        )
    # Images attend in both directions to themselves, text never does.
    only_images = read.get("use_bidirectional_attention") == "vision"
    if read.get("use_bidirectional_attention") and not (
        only_images and "use_bidirectional_attention" in family.heeds
    ):
        raise ModelError("use_bidirectional_attention: only causal attention is supported")
    for name, neutral in _MEANINGS.items():
        value = read.get(name)
        if value is None or value is False or value in neutral:
            continue
        experts = _EXPERT_COUNTS if family.experts else ()
        if name not in family.heeds | family.ignores | set(family.defaults) | set(experts):
            raise ModelError(
                f"{read.architecture}: {name} is {str(value)[:60]}, which this family does not compute; remove the "
                "field if the model was trained without it"
            )


def _heeded(read: ConfigReader, family: Family, name: str) -> float | None:
    """A number that its family computes; other families only have the field."""
    return read.optional_number(name) if name in family.heeds else None


def _multipliers(read: ConfigReader, family: Family) -> dict[str, float]:
    """Granite's multipliers (muP, arXiv:2203.03466) of embeddings and residuals, and the divisor of logits."""
    names = ("embedding_multiplier", "residual_multiplier", "logits_scaling")
    return {name: _heeded(read, family, name) or 1.0 for name in names}


def _attention_scale(read: ConfigReader, family: Family, head_dim: int) -> float:
    multiplier = _heeded(read, family, "attention_multiplier")
    return multiplier or (_heeded(read, family, "query_pre_attn_scalar") or head_dim) ** -0.5


def _biased(read: ConfigReader, bias: bool | str) -> bool:
    """A value, or what a field says."""
    return read.flag(bias) if isinstance(bias, str) else bias


def _norms(read: ConfigReader, family: Family) -> Norms:
    if family.post_norm_flag is None or read.flag(family.post_norm_flag):
        return family.norms
    return family.norms._replace(post_attention_norm=None, post_mlp_norm=None)


def _activation(read: ConfigReader, family: Family) -> Activation:
    name, known = read.get(family.activation), family.activations
    if not isinstance(name, str) or name not in known:
        raise ModelError(f"{family.activation} '{name}' is not supported; supported are: {', '.join(known)}")
    return known[name]


def _layers(
    read: ConfigReader, family: Family, ropes: tuple[RopeSpec, ...]
) -> tuple[tuple[LayerSpec, ...], tuple[RopeSpec, ...]]:
    """The layers, and the ropes to which they refer: one of kind "none" is added if a layer has no other."""
    mixer, count = family.mixer, family.count(read)
    if count > MAX_LAYERS:
        raise ModelError(f"num_hidden_layers must be at most {MAX_LAYERS}, the config has {count}")
    recurrent = [False] * count if mixer is None else mixer.layers(read, count)
    sliding = [False] * count if mixer is not None else _sliding(read, family)
    window = read.optional_integer("sliding_window") if any(sliding) else None
    turning = [family.rotates(read, layer, slides) for layer, slides in enumerate(sliding)]
    if not all(turning):
        ropes = (*ropes, RopeSpec(1.0, 2, ropes[0].reach, kind="none"))
    layers = tuple(
        LayerSpec(
            window=window if slides else None,
            rope=int(slides and family.rope.local) if turns else len(ropes) - 1,
            experts=family.experts is not None and family.experts.sparse(read, layer),
            recurrent=recurrent[layer],
            beside=mixer is not None and mixer.beside and recurrent[layer],
            feeds=family.feeds(read, layer),
        )
        for layer, (slides, turns) in enumerate(zip(sliding, turning, strict=True))
    )
    return layers, ropes


_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""The fields with the number of experts; tools write one or another of them."""


def _expert_count(read: ConfigReader) -> int:
    given = [name for name in _EXPERT_COUNTS if read.given(name)]
    counts = {read.integer(name) for name in given or _EXPERT_COUNTS if read.get(name) is not None}
    if len(counts) > 1:
        raise ModelError(f"{read.architecture}: {' and '.join(given)} are different")
    if not counts:
        raise ModelError(f"{read.architecture}: the config lacks {_EXPERT_COUNTS[0]}")
    return counts.pop()


def _refuse_other_experts(read: ConfigReader, of: FamilyExperts) -> None:
    """Fields that name another way of routing, or other layers, than the family has."""
    computed = {
        "scoring_func": (of.scoring,),
        "topk_method": ("noaux_tc",) if of.corrected else ("greedy",),
        "qk_norm_type": ("per_layer",),
        "use_routing_bias": (of.corrected,),
        "shared_intermediate_size": (0,),
        "use_expert_bias": (of.corrected,),
        "swiglu_alpha": (SWIGLU_ALPHA,),
        "swiglu_limit": (SWIGLU_LIMIT,),
    }
    computed = {name: values for name, values in computed.items() if name != of.shared}
    for name, values in computed.items():
        value = read.get(name)
        if value is not None and value not in values:
            raise ModelError(f"{read.architecture}: {name} is {value!r:.60}, supported is {values[0]!r}")
    kinds = read.integers("attn_type_list") or []
    if any(kind != 1 for kind in kinds):
        raise ModelError(f"{read.architecture}: attn_type_list has other kinds of attention than 1")


def _experts(read: ConfigReader, family: Family) -> ExpertsSpec | None:
    """The experts of a family that has some.

    Raises:
        ModelError: as many cannot be chosen so.
    """
    of = family.experts
    if of is None:
        return None
    _refuse_other_experts(read, of)
    if not any(of.sparse(read, layer) for layer in range(family.count(read))):
        return None
    count, chosen, width = _expert_count(read), read.integer("num_experts_per_tok"), read.integer(of.width)
    shared = read.count(of.shared) if of.shared else 0
    kind: Shared = ("gated" if of.shared_gate else "plain") if shared else "none"
    groups, kept = (read.integer(each) if of.grouped else 1 for each in ("n_group", "topk_group"))
    if count > MAX_EXPERTS:
        raise ModelError(f"{read.architecture}: {count} experts, at most {MAX_EXPERTS} are supported")
    if count % groups or kept > groups or chosen > kept * (count // groups):
        raise ModelError(
            f"{read.architecture}: num_experts_per_tok {chosen} cannot be chosen of {count} experts"
            + (f" in {kept} of {groups} groups (topk_group, n_group)" if of.grouped else "")
        )
    routing = Routing(
        experts=count,
        chosen=chosen,
        scoring=of.scoring,
        normalized=_biased(read, of.normalized),
        scale=read.number(of.scale) if of.scale else 1.0,
        groups=groups,
        kept_groups=kept,
        shared=kind,
    )
    wide = shared * width if of.shared_count else shared
    return ExpertsSpec(routing, width, wide, of.corrected, of.names, of.biased, of.interleaved)


def _sliding(read: ConfigReader, family: Family) -> list[bool]:
    """Which layers have the window."""
    count = read.integer("num_hidden_layers")
    kinds = read.names("layer_types")
    if kinds is None:
        return [family.slides(read, layer) for layer in range(count)]
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown:
        raise ModelError(f"layer_types: {', '.join(sorted(unknown))} is not supported")
    if len(kinds) != count:
        raise ModelError(f"layer_types has {len(kinds)} entries for {count} layers (num_hidden_layers)")
    sliding = [kind == "sliding_attention" for kind in kinds]
    listed = family.lists_layers or read.get("sliding_window") is None
    if not listed and sliding != [family.slides(read, layer) for layer in range(count)]:
        raise ModelError(
            f"{read.architecture}: layer_types differs from the windows of this family, which does not read it; remove "
            "the field"
        )
    return sliding


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
