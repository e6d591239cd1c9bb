"""What the configs of models with latent keys and values say: DeepSeek-V3 and R1, Kimi K2, GLM-4.7-Flash."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headrace.compute.checkpoint import ModelError
from headrace.compute.model.config_reader import ConfigReader
from headrace.compute.model.spec import DecoderSpec, LatentSpec

DEFAULTS: Mapping[str, Any] = {
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "head_dim": 64,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "rope_interleave": True,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
}
"""Values of fields that a config of DeepSeek-V3 omits."""

GLM_DEFAULTS: Mapping[str, Any] = {
    **DEFAULTS,
    "rms_norm_eps": 1e-5,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "n_routed_experts": 64,
    "routed_scaling_factor": 1.8,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1536,
    "first_k_dense_replace": 1,
}
"""Those of a config of GLM-4.7-Flash."""


def not_native(read: ConfigReader) -> str:
    """Why a model is left to transformers; empty if it is not."""
    return "attention_bias" if read.flag("attention_bias") else ""


def complete(read: ConfigReader, spec: DecoderSpec) -> DecoderSpec:
    """The specification with latent keys and values."""
    if spec.num_kv_heads != spec.num_heads:
        raise ModelError(f"{read.architecture}: num_key_value_heads differs from num_attention_heads")
    latent = LatentSpec(
        rank=read.integer("kv_lora_rank"),
        rotary=read.integer("qk_rope_head_dim"),
        plain=read.integer("qk_nope_head_dim"),
        value=read.integer("v_head_dim"),
        query_rank=read.optional_integer("q_lora_rank"),
    )
    if latent.rotary % 2:
        raise ModelError(f"{read.architecture}: qk_rope_head_dim is {latent.rotary}, an odd number")
    return replace(
        spec,
        latent=latent,
        interleaved_rope=read.flag("rope_interleave"),
        ropes=tuple(replace(rope, rotary_dim=latent.rotary) for rope in spec.ropes),
        attention_scale=(latent.plain + latent.rotary) ** -0.5 * _stretched(read, spec) ** 2,
    )


def _stretched(read: ConfigReader, spec: DecoderSpec) -> float:
    """What multiplies queries and keys of a rope that is stretched beyond the trained length."""
    given = read.object("rope_scaling") or read.object("rope_parameters")
    weight = ConfigReader(f"{read.architecture} rope", given, {}).optional_number("mscale_all_dim")
    factor = spec.ropes[0].factor
    if spec.ropes[0].kind == "default" or weight is None or factor <= 1.0:
        return 1.0
    return 0.1 * weight * math.log(factor) + 1.0
