"""Tiny checkpoints of model types that transformers has: each default config with small sizes and random weights."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from transformers.utils import logging

TYPES = {
    "causal": tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
    "image-text": tuple(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES),
}
"""The model types of transformers by what their models are for."""

_AUTO = {"causal": AutoModelForCausalLM, "image-text": AutoModelForImageTextToText}
_MOST_PARAMETERS = 30_000_000

_SIZES: tuple[tuple[str, int], ...] = (
    (r"(unpadded_)?vocab_size(_per_layer_input)?", 256),
    (r"hidden_size|n_embd|d_model|dim|embedding_size|hidden_dim|model_dim|lru_width|conv_dim|embed_dim", 64),
    (r"(text|vision|out|word_embed|projection)_?(hidden_size|proj_dim|dim)|projection_dim", 64),
    (
        r"intermediate_size(_mlp)?|n_inner|ffn_(hidden_size|dim)|d_ff|(de|en)coder_ffn_dim|intermediate_dim",
        96,
    ),
    (r"(dense|mlp)_intermediate_size", 96),
    (r"(moe|shared_expert|shared|moe_shared_expert)_intermediate_size|expert_ffn_hidden_size", 32),
    (r"num_hidden_layers|n_layers?|num_layers|(de|en)coder_layers|depth|num_decoder_layers", 4),
    (r"num_attention_heads|n_heads?|num_heads|((de|en)coder_)?attention_heads", 4),
    (r"(num|n)_(key_value|kv)_heads|num_global_key_value_heads|multi_query_group_num", 2),
    (r"head_dim|v_head_dim|kv_channels|attention_head_dim|global_head_dim|swa_(v_)?head_dim", 16),
    (r"rotary_dim|qk_rope_head_dim|laurel_rank", 8),
    (r"qk_nope_head_dim|kv_lora_rank|o_lora_rank|index_head_dim|hidden_size_per_layer_input", 16),
    (r"qk_head_dim|query_pre_attn_scalar", 24),
    (r"q_lora_rank", 32),
    (r"(num|n_routed|moe_num|num_local)_experts", 4),
    (r"num_experts_per_tok(en)?|moe_topk|moe_k|top_k_experts|max_window_layers", 2),
    (r"n_group|topk_group|n(um)?_shared_experts|first_k_dense_replace|num_dense_layers", 1),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|seq_length|max_sequence_length", 128),
    (r"sliding_window|attention_window_size|attention_chunk_size|local_window", 16),
    (r"linear_num_value_heads|mamba_n_heads|(mamba|n_mamba)_(num_)?heads", 4),
    (r"linear_num_key_heads|index_n_heads|attn_layer_period|expert_layer_period", 2),
    (r"attn_layer_offset|expert_layer_offset|mamba_n_groups|n_groups|mamba_ngroups", 1),
    (
        r"linear_(key|value)_head_dim|(mamba_d|mamba|ssm)?_?state(_size|_dim)?|mamba_(chunk_size)|chunk_size",
        16,
    ),
    (r"mamba_(d_head|headdim|head_dim)", 32),
    (r"mamba_d_ssm", 128),
    (r"mamba_dt_rank|time_step_rank", 4),
    (r"num_kv_shared_layers", 0),
    (r"image_size", 28),
    (r"patch_size", 14),
    (r"index_topk", 64),
)
"""Names of fields, and their sizes where the default config has a whole number."""

_LISTS = re.compile(
    r"(mlp_)?layer_types|layers_block_type|(attn_type|layer_type)_list|no_rope_layers|block_types|attn_types"
    r"|attention_types|hybrid_(layer_ids|override_pattern|layer_pattern)|moe_layers|full_attn_idxs|mlp_only_layers"
    r"|intermediate_size|activation_sparsity_pattern|moe_layer_freq|compress_ratios|num_attention_heads_per_layer"
)
_IDS = re.compile(r"(image|video|audio|vision_start|vision_end|boi|eoi|eoa|boa)_token_(id|index)")
_MIXED = ["mamba", "attention", "mamba", "attention"]
_MLA = {"head_dim": 8, "qk_head_dim": 24}
_ENCODERS = (
    *(
        "bert",
        "bert-generation",
        "big_bird",
        "camembert",
        "data2vec-text",
        "electra",
        "ernie",
        "megatron-bert",
        "rembert",
    ),
    *(
        "reformer",
        "roberta",
        "roberta-prelayernorm",
        "roc_bert",
        "roformer",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xmod",
    ),
)
"""Types that generate text only if their config says that they decode."""

_ROUTED = {
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
}


def _sections(*sizes: int) -> dict[str, Any]:
    """Rotary features of time, height and width."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sizes)}}


_IN_TEXT = {"text_config": _sections(2, 3, 3)}
_BY_LAYER_TYPE = {
    "rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")
    },
}
"""A rotation for each type of layer, which the default config lacks."""
_PICTURES: dict[str, Any] = {
    "vocabulary_map": {"<image>": 255, "IMGIMGAZ": 254},
    "vq_config": {"base_channels": 32, "num_embeddings": 64, "codebook_size": 64},
}
_OWN: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": {"layer_types": _MIXED, "layers_block_type": _MIXED},
    "zaya": {"num_experts_per_tok": 1},
    "gemma4_assistant": {"hidden_size_per_layer_input": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    **{kind: {"is_decoder": True} for kind in _ENCODERS},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "deepseek_v2": {**_MLA, **_ROUTED},
    "dots1": _ROUTED,
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen2_5_omni_thinker", "glm46v", "glm4v"), _IN_TEXT),
    **dict.fromkeys(("glm_ocr", "glmga", "paddleocr_vl"), _IN_TEXT),
    "glm4v_moe": {"text_config": _sections(2, 1, 1)},
    **dict.fromkeys(
        (
            "deepseek_v3",
            "deepseek_v32",
            "glm4_moe_lite",
            "youtu",
            "longcat_flash",
            "sarvam_mla",
            "axk1",
            "axk2",
        ),
        _MLA,
    ),
    **dict.fromkeys(("glm_moe_dsa", "minicpm3"), _MLA),
    "xmod": {"is_decoder": True, "default_language": "en_XX"},
    "bailing_hybrid": {"num_group": 2, "n_group": 2},
    "cohere_compass_text": _BY_LAYER_TYPE,
    "cohere_compass": {"text_config": _BY_LAYER_TYPE},
    "step3p7": {"text_config": {"sliding_window": 16, "share_expert_dim": 32, "n_routed_experts": 4}},
    "hunyuan_vl": {"text_config": {"head_dim": 16}},
    "kimi_k25": {"text_config": _MLA},
    "mistral4": {"text_config": _MLA},
    "granite4_vision": {"deepstack_layer_map": [[-2, 1]], "spatial_target_layers": [2, 3]},
    "cosmos3_edge": _IN_TEXT,
    "ernie4_5_vl_moe": {"text_config": _sections(3, 3, 2)},
    "deepseek_ocr2": {
        "text_config": {"mlp_layer_types": ["dense", *["sparse"] * 3], "num_experts_per_tok": 2},
    },
    "molmo2": {"adapter_config": {"vision_feature_layer": [3, 2]}},
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    "muse_spark": {
        "projector_hidden_size": 64,
        "out_hidden_size": 64,
        "audio_config": {"hidden_sizes": [16, 16, 32, 32], "out_hidden_size": 64},
    },
    **dict.fromkeys(("chameleon", "emu3"), _PICTURES),
    "janus": {"vq_config": {"base_channels": 32, "num_embeddings": 64}},
}
"""What the rules do not get right."""


class Tiny(NamedTuple):
    """The sizes of tiny models: layers, a window in tokens, and a seed of their weights."""

    layers: int = 4
    window: int = 16
    seed: int = 0


DEFAULT = Tiny()
_NOTHING: Mapping[str, Any] = {}


def build(kind: str, use: str, tiny: Tiny = DEFAULT, own: Mapping[str, Any] = _NOTHING) -> Any:
    """A tiny model of a type with random weights in float32, whose norms and biases are perturbed too; ``own`` are
    further fields of its config.

    Raises:
        RuntimeError: no rule makes a model of it.
    """
    cls, auto, errors = CONFIG_MAPPING[kind], _AUTO[use], ["no config"]
    for keep_lists, fill in ((True, False), (False, False), (False, True), (True, True)):
        try:
            fields = _small(cls().to_dict(), tiny, keep_lists=keep_lists, fill=fill)
            for key, given in (_OWN.get(kind, {}) | dict(own)).items():
                fields[key] = fields.get(key, {}) | given if isinstance(given, dict) else given
            fields.pop("model_type", None)
            with _quiet():
                with torch.device("meta"):
                    size = sum(each.numel() for each in auto.from_config(cls(**fields)).parameters())
                if size > _MOST_PARAMETERS:
                    raise ValueError(f"{size / 1e6:.0f} M parameters after shrinking")
                torch.manual_seed(tiny.seed)
                model = auto.from_config(
                    cls(**fields), attn_implementation="eager", dtype=torch.float32
                ).eval()
                _perturb(model, tiny.seed)
                row = torch.arange(1, 9)[None]
                with torch.inference_mode():
                    if not model(input_ids=row, use_cache=False).logits.isfinite().all():
                        raise ValueError("its logits are not finite")
            return model
        except Exception as error:  # whatever a config of wrong sizes raises
            errors.append(f"{type(error).__name__}: {str(error)[:160]}")
    raise RuntimeError(errors[-1])


def _perturb(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.is_floating_point() and "A_log" not in name and "dt_bias" not in name:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise * (0.15 if parameter.ndim > 1 else 0.1))


def _small(fields: dict[str, Any], tiny: Tiny, *, keep_lists: bool, fill: bool) -> dict[str, Any]:
    """The fields of a config that differ from the default, by the rules."""
    out: dict[str, Any] = {}
    for key, value in fields.items():
        if isinstance(value, dict) and key.endswith("config") and key != "quantization_config":
            own = {"model_type": value["model_type"]} if "model_type" in value else {}
            out[key] = _small(value, tiny, keep_lists=keep_lists, fill=fill) | own
        elif _LISTS.fullmatch(key) and isinstance(value, list | tuple) and value:
            if keep_lists:
                kinds = list(dict.fromkeys(map(str, value)))
                firsts = [next(each for each in value if str(each) == kind) for kind in kinds]
                out[key] = (firsts + list(value))[: tiny.layers]
        elif key.endswith("token_id"):
            ends = key in ("bos_token_id", "eos_token_id")
            if _IDS.fullmatch(key):
                out[key] = 255 - len([each for each in out if _IDS.fullmatch(each)])
            elif value is not None or fill:
                out[key] = {"bos_token_id": 1, "eos_token_id": 2}[key] if ends else 0
        elif _IDS.fullmatch(key):
            out[key] = 255 - len([each for each in out if _IDS.fullmatch(each)])
        elif (
            fill
            and value is None
            and re.fullmatch(r"head_dim|num_(key_value|attention)_heads|ffn_hidden_size", key)
        ):
            out[key] = _size(key, tiny)
        elif (
            isinstance(value, int) and not isinstance(value, bool) and (size := _size(key, tiny)) is not None
        ):
            same = key.endswith(("key_value_heads", "kv_heads")) and value == fields.get(
                "num_attention_heads"
            )
            out[key] = 4 if same else size
    return out


def _size(key: str, tiny: Tiny) -> int | None:
    size = next((size for pattern, size in _SIZES if re.fullmatch(pattern, key)), None)
    if size == 4 and re.fullmatch(r"num_hidden_layers|n_layers?|num_layers", key):
        return tiny.layers
    return tiny.window if key == "sliding_window" else size


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.set_verbosity(level)
