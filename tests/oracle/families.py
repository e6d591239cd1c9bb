"""Tiny models of every family, with random weights made by transformers, and options that matter switched on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LENGTH = 40
WINDOW = 7
TRAINED = 16
VOCAB = 96

_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
_LISTED = {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}
_MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.3,
    "logits_scaling": 0.4,
}
_EXPERTS = {"num_experts_per_tok": 3}
_PLAIN_OSS = {
    "head_dim": 8,
    "sliding_window": WINDOW,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
_GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": WINDOW, "tie_word_embeddings": True}
_GEMMA4 = {
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": WINDOW,
    "tie_word_embeddings": True,
    "vocab_size_per_layer_input": VOCAB,
}

_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 20,
    "q_lora_rank": 12,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 10,
    "v_head_dim": 6,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
}


def _rope(kind: str, **options: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **options}}


_LONGROPE = _rope(
    "longrope",
    short_factor=[1.0, 1.1, 1.2, 1.3],
    long_factor=[1.0, 2.0, 3.0, 4.0],
    original_max_position_embeddings=TRAINED,
)


_MAMBA = {"mamba_n_heads": 4, "mamba_d_state": 10, "mamba_d_conv": 4, "mamba_chunk_size": 16}
_FALCON = {
    **_MAMBA,
    "mamba_d_ssm": 72,
    "mamba_d_head": 18,
    "head_dim": 12,
    "embedding_multiplier": 3.0,
    "lm_head_multiplier": 0.4,
    "mlp_multipliers": [0.8, 0.6],
    "key_multiplier": 0.4,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.9,
    "ssm_multipliers": [0.35, 0.25, 0.4, 0.5, 0.3],
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.7,
}
_BLOCKS = ["linear_attention", "mlp", "linear_attention", "linear_attention", "mlp", "full_attention", "mlp"]
_NEMOTRON = {
    "layers_block_type": [*_BLOCKS, "full_attention"],
    "head_dim": 12,
    "mamba_num_heads": 4,
    "mamba_head_dim": 18,
    "n_groups": 2,
    "ssm_state_size": 10,
    "conv_kernel": 4,
    "chunk_size": 16,
}
_NEMOTRON_EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "moe_shared_expert_intermediate_size": 24,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}
_CONV = {"layer_types": ["conv", "full_attention", "conv"]}
_DELTA = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "head_dim": 16,
}
_SHARED = {"num_experts": 6, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 28}


@dataclass(frozen=True)
class Case:
    """``grows``: its rope depends on the length of the running sequence, so only equal lengths compare."""

    model_type: str
    options: dict[str, Any]
    grows: bool = False

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of its config."""
        return _SMALL | self.options

    def build(self, folder: Path) -> PreTrainedModel:
        """Make the model, save it as safetensors, return it for reference."""
        from transformers import AutoConfig, AutoModelForCausalLM  # a second, and fast tests read the cases

        torch.manual_seed(0)
        config = AutoConfig.for_model(self.model_type, **self.fields)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():  # norms and biases too, which start as ones and zeros
                parameter.add_(torch.randn_like(parameter) * 0.15)
            for name, buffer in model.named_buffers():
                if name.endswith(("e_score_correction_bias", "layer_scalar")):
                    buffer.add_(torch.randn_like(buffer) * 0.15)
        model.eval().save_pretrained(folder)
        return model


CASES: dict[str, Case] = {
    "llama": Case("llama", {}),
    "llama-all-heads-biases": Case(
        "llama", {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True, "head_dim": 12}
    ),
    "llama-linear": Case("llama", _rope("linear", factor=4.0)),
    "llama-dynamic": Case(
        "llama", _rope("dynamic", factor=2.0) | {"max_position_embeddings": TRAINED}, grows=True
    ),
    "llama-llama3": Case(
        "llama",
        _rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=TRAINED,
        ),
    ),
    "llama-yarn": Case("llama", _rope("yarn", factor=4.0, original_max_position_embeddings=TRAINED)),
    "bamba": Case(
        "bamba",
        _MAMBA
        | {"num_hidden_layers": 4, "attn_layer_indices": [1, 3], "mamba_proj_bias": True, "mlp_bias": True},
    ),
    "granitemoehybrid": Case(
        "granitemoehybrid",
        _MAMBA
        | _MULTIPLIERS
        | {"shared_intermediate_size": 40, "num_local_experts": 0, "mamba_n_groups": 2}
        | {"layer_types": ["mamba", "attention", "mamba"]},
    ),
    "granitemoehybrid-attention": Case(
        "granitemoehybrid",
        _MAMBA
        | _MULTIPLIERS
        | {"shared_intermediate_size": 40, "num_local_experts": 0, "position_embedding_type": "rope"}
        | {"layer_types": ["full_attention"] * 3},
    ),
    "granitemoehybrid-experts": Case(
        "granitemoehybrid",
        _MAMBA
        | _EXPERTS
        | _MULTIPLIERS
        | {"shared_intermediate_size": 24, "num_local_experts": 5, "position_embedding_type": "rope"}
        | {"layer_types": ["mamba", "attention", "mamba"], "mamba_conv_bias": False},
    ),
    "lfm2": Case("lfm2", _CONV | {"conv_bias": True, "block_multiple_of": 16, "intermediate_size": 60}),
    "lfm2_moe": Case(
        "lfm2_moe",
        _CONV | _EXPERTS | {"num_experts": 6, "moe_intermediate_size": 20, "num_dense_layers": 1},
    ),
    "qwen3_5": Case("qwen3_5_text", _DELTA | {"attention_bias": True}),
    "qwen3_5-default-layers": Case(
        "qwen3_5_text", _DELTA | {"num_hidden_layers": 5, "linear_num_key_heads": 4, "layer_types": None}
    ),
    "qwen3_5_moe": Case("qwen3_5_moe_text", _DELTA | _EXPERTS | _SHARED),
    "qwen3_next": Case(
        "qwen3_next", _DELTA | _EXPERTS | _SHARED | {"mlp_only_layers": [1], "norm_topk_prob": True}
    ),
    "falcon_h1": Case("falcon_h1", _FALCON),
    "falcon_h1-norms": Case(
        "falcon_h1",
        _FALCON
        | {"mamba_rms_norm": True, "mamba_norm_before_gate": False, "mamba_n_groups": 2, "mlp_bias": True}
        | {"mamba_conv_bias": False, "tie_word_embeddings": True},
    ),
    "falcon_h1-norms-first": Case("falcon_h1", _FALCON | {"mamba_rms_norm": True, "mamba_n_groups": 4}),
    "nemotron_h": Case("nemotron_h", _NEMOTRON),
    "nemotron_h-biases": Case(
        "nemotron_h",
        _NEMOTRON
        | {"use_bias": True, "mlp_bias": True, "attention_bias": True, "n_groups": 4}
        | {"layers_block_type": _BLOCKS[2:] + _BLOCKS[:2]},
    ),
    "nemotron_h-experts": Case(
        "nemotron_h",
        _NEMOTRON
        | _NEMOTRON_EXPERTS
        | {"layers_block_type": ["moe" if each == "mlp" else each for each in _BLOCKS]},
    ),
    "nemotron_h-experts-and-mlps": Case(
        "nemotron_h",
        _NEMOTRON
        | _NEMOTRON_EXPERTS
        | {"layers_block_type": [*_BLOCKS, "linear_attention", "moe"]}
        | {"n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    ),
    "smollm2": Case(
        "llama",
        {"tie_word_embeddings": True, "num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 24},
    ),
    "mistral": Case("mistral", {"sliding_window": WINDOW, "head_dim": 16}),
    "mistral-unbounded": Case("mistral", {"sliding_window": None}),
    "qwen2": Case("qwen2", {}),
    "qwen2-window": Case(
        "qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
    ),
    "qwen3": Case("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "phi3": Case("phi3", {"sliding_window": WINDOW}),
    "phi3-partial": Case("phi3", _rope("default", partial_rotary_factor=0.5)),
    "phi3-longrope": Case(
        "phi3", _LONGROPE | {"original_max_position_embeddings": TRAINED, "tie_word_embeddings": True}
    ),
    "gemma2": Case("gemma2", _GEMMA | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0}),
    "gemma3": Case("gemma3_text", _GEMMA | {"num_hidden_layers": 7}),
    "gemma3-linear": Case(
        "gemma3_text",
        _GEMMA
        | {
            "attn_logit_softcapping": 0.7,  # a field of its config that its attention does not heed
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            },
        },
    ),
    "gemma4": Case(
        "gemma4_text",
        _GEMMA4
        | {"num_hidden_layers": 7, "num_kv_shared_layers": 3, "use_double_wide_mlp": True}
        | {"layer_types": [*["sliding_attention", "full_attention"] * 3, "full_attention"]}
        | {"hidden_size_per_layer_input": 8, "final_logit_softcapping": 8.0},
    ),
    "gemma4-values-from-keys": Case(
        "gemma4_text",
        _GEMMA4
        | {"num_hidden_layers": 6, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
        | {"hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision"},
    ),
    "deepseek_v3": Case("deepseek_v3", _LATENT | {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}),
    "deepseek_v3-yarn": Case(
        "deepseek_v3",
        _LATENT
        | {
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 2,
            "q_lora_rank": None,
            "rope_interleave": False,
        }
        | _rope("yarn", factor=4.0, original_max_position_embeddings=TRAINED, mscale=1.0, mscale_all_dim=0.7),
    ),
    "glm4_moe_lite": Case(
        "glm4_moe_lite",
        _LATENT | {"mlp_layer_types": ["dense", "sparse", "dense"], "n_group": 1, "topk_group": 1},
    ),
    "gemma": Case("gemma", {"head_dim": 16, "tie_word_embeddings": True}),
    "vaultgemma": Case(
        "vaultgemma", _GEMMA | {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0}
    ),
    "ministral": Case("ministral", _LISTED | {"sliding_window": WINDOW, "head_dim": 12}),
    "cwm": Case(
        "cwm",
        {"head_dim": 12, "sliding_window": WINDOW, "num_hidden_layers": 5, "mlp_bias": True}
        | {"bos_token_id": 1, "eos_token_id": [1, 2]},
    ),
    "ernie4_5": Case("ernie4_5", {"head_dim": 12, "use_bias": True}),
    "exaone4": Case("exaone4", {"sliding_window": WINDOW, "num_hidden_layers": 5, "num_key_value_heads": 1}),
    "exaone4-unbounded": Case("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}),
    "glm": Case("glm", {"head_dim": 16}),
    "glm4": Case("glm4", {"head_dim": 16}),
    "glm4_moe": Case(
        "glm4_moe",
        _EXPERTS
        | {"moe_intermediate_size": 20, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "head_dim": 16}
        | {"use_qk_norm": True, "routed_scaling_factor": 2.5, "n_shared_experts": 2, "attention_bias": True},
    ),
    "granite": Case("granite", _MULTIPLIERS | {"tie_word_embeddings": True}),
    "granite-biases": Case("granite", _MULTIPLIERS | {"attention_bias": True, "mlp_bias": True}),
    "granitemoe": Case("granitemoe", _EXPERTS | _MULTIPLIERS | {"num_local_experts": 6}),
    "helium": Case("helium", {"head_dim": 8, "attention_bias": True, "mlp_bias": True}),
    "hunyuan": Case("hunyuan_v1_dense", {"head_dim": 12, "attention_bias": True}),
    "hunyuan-alpha": Case(
        "hunyuan_v1_dense",
        {"head_dim": 8, "tie_word_embeddings": True, **_rope("dynamic", alpha=1000.0, factor=1.0)},
    ),
    "hyperclovax": Case("hyperclovax", _MULTIPLIERS),
    "hyperclovax-plain": Case("hyperclovax", _MULTIPLIERS | {"use_post_norm": False}),
    "gpt_oss": Case(
        "gpt_oss",
        _EXPERTS
        | {"num_local_experts": 6, "head_dim": 12, "sliding_window": WINDOW, "attention_bias": True}
        | _rope("yarn", factor=4.0, truncate=False, original_max_position_embeddings=TRAINED),
    ),
    "gpt_oss-quantizable": Case(
        "gpt_oss",
        _EXPERTS | {"num_local_experts": 4, "hidden_size": 64, "intermediate_size": 32} | _PLAIN_OSS,
    ),
    "minimax_m2": Case(
        "minimax_m2",
        _EXPERTS | _rope("default", partial_rotary_factor=0.5) | {"num_local_experts": 8, "head_dim": 12},
    ),
    "mixtral": Case("mixtral", _EXPERTS | {"num_local_experts": 4, "sliding_window": WINDOW}),
    "olmo2": Case("olmo2", {"attention_bias": True}),
    "olmo3": Case("olmo3", {"sliding_window": WINDOW, "num_hidden_layers": 5}),
    "olmo3-yarn": Case(
        "olmo3",
        _LISTED
        | {
            "sliding_window": WINDOW,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "rope_theta": 500_000.0,
                    "original_max_position_embeddings": TRAINED,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 500_000.0},
            },
        },
    ),
    "olmoe": Case("olmoe", _EXPERTS | {"num_experts": 8, "norm_topk_prob": True}),
    "qwen2_moe": Case(
        "qwen2_moe",
        _EXPERTS
        | {"moe_intermediate_size": 20, "shared_expert_intermediate_size": 28, "num_experts": 6}
        | {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    ),
    "qwen3_moe": Case(
        "qwen3_moe",
        _EXPERTS | {"moe_intermediate_size": 20, "num_experts": 6, "mlp_only_layers": [1], "head_dim": 12},
    ),
    "qwen3_moe-steps": Case(
        "qwen3_moe",
        _EXPERTS
        | {"moe_intermediate_size": 20, "num_experts": 6, "decoder_sparse_step": 2, "norm_topk_prob": True},
    ),
    "qwen3_moe-quantizable": Case(
        "qwen3_moe", _EXPERTS | {"moe_intermediate_size": 32, "num_experts": 4, "num_hidden_layers": 2}
    ),
    "seed_oss": Case("seed_oss", {"head_dim": 12, "attention_out_bias": True, "mlp_bias": True}),
    "smollm3": Case("smollm3", {"no_rope_layers": [1, 0, 1], "tie_word_embeddings": True}),
    "smollm3-window": Case(
        "smollm3",
        {
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "attention_bias": True,
        },
    ),
}
