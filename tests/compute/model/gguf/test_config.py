"""Metadata of a file as the fields of a ``config.json``; the family reads both alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.compute.checkpoint import ModelError
from headrace.compute.model.families import parse_config
from headrace.compute.model.gguf.config import ARCHITECTURES, config_of, generation_of
from headrace.compute.model.gguf.file import GgufFile
from headrace.compute.model.gguf.source import as_stored
from headrace.compute.model.hub import read_config
from headrace.compute.model.rope import rope_table
from headrace.compute.model.spec import DecoderSpec
from tests.compute.model.gguf.files import Entry, plain, write

SIZES = {
    "context_length": 4096,
    "embedding_length": 64,
    "block_count": 4,
    "feed_forward_length": 128,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 500000.0,
}
FIELDS = {
    "max_position_embeddings": 4096,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "vocab_size": 300,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
TABLES = ("token_embd.weight", "output.weight")
ROUTED = {"expert_count": 8, "expert_used_count": 2}
WIDTHS = ("expert_feed_forward_length", "expert_shared_feed_forward_length")
FACTORS = [1.0, 1.5, 4.0, 8.0, 8.0, 8.0, 8.0, 8.0]


def file(
    folder: Path,
    architecture: str = "llama",
    tensors: tuple[Entry, ...] = (),
    general: Any = None,
    **fields: Any,
) -> GgufFile:
    """A file of an architecture, with fields besides the sizes; dots in their names are double underscores."""
    own = SIZES | {name.replace("__", "."): value for name, value in fields.items()}
    metadata = {"general.architecture": architecture, **(general or {})}
    metadata |= {f"{architecture}.{name}": value for name, value in own.items() if value is not None}
    tables = [plain(name, np.zeros((300, 64))) for name in TABLES]
    return GgufFile.open(write(folder / "model.gguf", metadata, [*tables, *tensors]))


def spec(file: GgufFile) -> DecoderSpec:
    return parse_config(config_of(file))


@pytest.mark.parametrize(
    ("architecture", "fields", "name", "config"),
    [
        ("llama", {}, "LlamaForCausalLM", {}),
        ("llama", {"rope__dimension_count": 16}, "LlamaForCausalLM", {}),
        (
            "llama",
            {"attention__key_length": 32, "attention__value_length": 32},
            "LlamaForCausalLM",
            {"head_dim": 32},
        ),
        ("qwen2", {}, "Qwen2ForCausalLM", {}),
        ("qwen3", {"attention__key_length": 32}, "Qwen3ForCausalLM", {"head_dim": 32}),
        ("gemma", {"attention__key_length": 16}, "GemmaForCausalLM", {"head_dim": 16}),
        (
            "gemma2",
            {
                "attention__key_length": 32,
                "attention__sliding_window": 512,
                "attn_logit_softcapping": 50.0,
                "final_logit_softcapping": 30.0,
            },
            "Gemma2ForCausalLM",
            {"head_dim": 32, "sliding_window": 512, "query_pre_attn_scalar": 32},
        ),
        (
            "gemma3",
            {
                "attention__key_length": 32,
                "attention__sliding_window": 512,
                "rope__scaling__type": "linear",
                "rope__scaling__factor": 8.0,
            },
            "Gemma3ForCausalLM",
            {
                "head_dim": 32,
                "sliding_window": 512,
                "query_pre_attn_scalar": 32,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
        ),
        (
            "granite",
            {
                "attention__scale": 0.015625,
                "embedding_scale": 12.0,
                "residual_scale": 0.22,
                "logit_scale": 8.0,
            },
            "GraniteForCausalLM",
            {
                "attention_multiplier": 0.015625,
                "embedding_multiplier": 12.0,
                "residual_multiplier": 0.22,
                "logits_scaling": 8.0,
            },
        ),
        (
            "phi3",
            {"attention__sliding_window": 2047, "rope__scaling__original_context_length": 4096},
            "Phi3ForCausalLM",
            {"sliding_window": 2047, "original_max_position_embeddings": 4096},
        ),
        ("phi3", {"attention__sliding_window": 0}, "Phi3ForCausalLM", {"sliding_window": None}),
        ("phi3", {"rope__dimension_count": 12}, "Phi3ForCausalLM", {"partial_rotary_factor": 0.75}),
        (
            "qwen2",
            {
                "rope__scaling__type": "yarn",
                "rope__scaling__factor": 4.0,
                "rope__scaling__original_context_length": 1024,
            },
            "Qwen2ForCausalLM",
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}},
        ),
        (
            "llama",
            ROUTED,
            "MixtralForCausalLM",
            {"num_local_experts": 8, "num_experts_per_tok": 2},
        ),
        (
            "olmoe",
            ROUTED | {"expert_gating_func": 1, "expert_weights_norm": False},
            "OlmoeForCausalLM",
            {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": False},
        ),
        (
            "granitemoe",
            ROUTED | {"attention__scale": 0.015625},
            "GraniteMoeForCausalLM",
            {"num_local_experts": 8, "num_experts_per_tok": 2, "attention_multiplier": 0.015625},
        ),
        (
            "qwen2moe",
            ROUTED | {"expert_feed_forward_length": 32, "expert_shared_feed_forward_length": 96},
            "Qwen2MoeForCausalLM",
            {
                "num_experts": 8,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 32,
                "shared_expert_intermediate_size": 96,
                "norm_topk_prob": False,
            },
        ),
        (
            "qwen3moe",
            ROUTED | {"expert_feed_forward_length": 32, "attention__key_length": 32},
            "Qwen3MoeForCausalLM",
            {
                "num_experts": 8,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 32,
                "norm_topk_prob": True,
                "head_dim": 32,
            },
        ),
    ],
)
def test_the_specification_is_that_of_a_config(
    tmp_path: Path, architecture: str, fields: dict[str, Any], name: str, config: dict[str, Any]
) -> None:
    expected = parse_config({"architectures": [name], **FIELDS, **config})
    assert spec(file(tmp_path, architecture, **fields)) == expected


def test_every_architecture_has_a_family(tmp_path: Path) -> None:
    for name, architecture in ARCHITECTURES.items():
        of = architecture.experts
        widths = (
            {key: 32 for key, width in zip(WIDTHS, (of.width, of.shared), strict=True) if width} if of else {}
        )
        fields = ROUTED | widths if of else {}
        assert spec(file(tmp_path, name, **fields)).architecture == (of or architecture).name


def test_the_largest_gemma_divides_scores_by_another_size(tmp_path: Path) -> None:
    for architecture, layers in (("gemma2", 46), ("gemma3", 62)):
        fields = {"block_count": layers, "attention__key_length": 32}
        assert spec(file(tmp_path, architecture, **fields)).attention_scale == 16**-0.5
        assert spec(file(tmp_path, architecture, attention__key_length=32)).attention_scale == 32**-0.5


def test_llama_3_stretches_its_rotation_by_a_tensor(tmp_path: Path) -> None:
    freqs = plain("rope_freqs.weight", np.array(FACTORS))
    (rope,) = spec(file(tmp_path, tensors=(freqs,))).ropes
    assert rope.short_factor == rope.long_factor == tuple(FACTORS)
    assert (rope.attention_factor, rope.reach) == (1.0, 4096)


def test_the_tensor_gives_the_frequencies_of_the_config(tmp_path: Path) -> None:
    """The tensor as the conversion computes it from Llama 3's scheme."""
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    }
    config = {"architectures": ["LlamaForCausalLM"], **FIELDS, "rope_scaling": scaling}
    lengths = 2 * np.pi * 500000.0 ** (np.arange(0, 16, 2) / 16)
    smooth = np.clip((1024 / lengths - 1.0) / (4.0 - 1.0), 0, 1)
    freqs = plain("rope_freqs.weight", 1 / ((1 - smooth) / 8.0 + smooth))
    ours, expected = spec(file(tmp_path, tensors=(freqs,))).ropes[0], parse_config(config).ropes[0]
    assert torch.allclose(rope_table(ours, 64), rope_table(expected, 64), atol=1e-5)


def test_phi_3_has_factors_for_short_and_long_contexts(tmp_path: Path) -> None:
    tensors = tuple(
        plain(f"rope_factors_{name}.weight", np.full(8, size)) for name, size in (("short", 1), ("long", 4))
    )
    fields = {"rope__scaling__original_context_length": 1024, "rope__scaling__attn_factor": 1.25}
    (rope,) = spec(file(tmp_path, "phi3", tensors, **fields)).ropes
    assert (rope.kind, rope.attention_factor, rope.original_positions) == ("longrope", 1.25, 1024)
    assert (rope.short_factor, rope.long_factor) == ((1.0,) * 8, (4.0,) * 8)


def test_tensors_say_what_no_field_says(tmp_path: Path) -> None:
    biases = tuple(plain(f"blk.0.{name}.bias", np.zeros(64)) for name in ("attn_q", "ffn_up"))
    found = spec(file(tmp_path, tensors=biases))
    assert (found.qkv_bias, found.mlp_bias, found.vocab_size, found.tied_embeddings) == (
        True,
        True,
        300,
        False,
    )


def test_windows_by_layer_where_the_file_lists_them(tmp_path: Path) -> None:
    fields = {"attention__sliding_window": 8, "attention__sliding_window_pattern": [True, True, False, True]}
    found = spec(file(tmp_path, "gemma3", **fields))
    assert [layer.window for layer in found.layers] == [8, 8, None, 8]


def test_a_config_of_a_file_is_read_like_one_of_a_folder(tmp_path: Path) -> None:
    opened = file(tmp_path)
    assert read_config(opened.path) == config_of(opened)
    assert as_stored(opened, spec(opened)).interleaved_rope


def test_recommended_sampling_parameters(tmp_path: Path) -> None:
    general = {"general.sampling.temp": 0.6, "general.sampling.top_k": 20, "general.sampling.mirostat": 1}
    assert generation_of(file(tmp_path, general=general)) == {"temperature": 0.6, "top_k": 20}
    assert generation_of(file(tmp_path)) == {}


@pytest.mark.parametrize(
    ("architecture", "fields", "reason"),
    [
        (
            "qwen35",
            {},
            "architecture 'qwen35' is not supported; supported are: gemma, .*give the original model in safe",
        ),
        ("gemma", {"expert_count": 8}, r"gemma\.expert_count is 8; only 0 is supported"),
        ("llama", {"expert_count": 8}, r"llama\.expert_used_count is None; a positive number is expected"),
        ("qwen3moe", {}, r"qwen3moe\.expert_count is None; a positive number is expected"),
        ("olmoe", ROUTED | {"expert_gating_func": 2}, "expert_gating_func is 2; only 1 is supported"),
        ("qwen3moe", ROUTED | {"expert_weights_norm": False}, "expert_weights_norm is False; only True"),
        (
            "granitemoe",
            ROUTED | {"expert_shared_feed_forward_length": 64},
            "expert_shared_feed_forward_length is 64; this field is not supported",
        ),
        ("qwen3", {"nextn_predict_layers": 1}, "nextn_predict_layers is 1"),
        ("qwen3", {"pooling_type": 3}, "pooling_type is 3"),
        ("llama", {"attention__causal": False}, "attention.causal is False"),
        (
            "llama",
            {"attention__sliding_window": 64},
            "attention.sliding_window is 64; this field is not supported",
        ),
        ("llama", {"attention__value_length": 8}, "attention.value_length is 8; values as long as keys, 16"),
        ("llama", {"rope__dimension_count": 8}, "rope.dimension_count is 8; whole heads rotate"),
        (
            "llama",
            {"rope__scaling__type": "su"},
            "rope.scaling.type is 'su'; supported are: none, linear, yarn",
        ),
        ("llama", {"rope__scaling__alpha": 2.0}, "rope.scaling.alpha is 2.0; this field is not supported"),
        ("llama", {"rope__scaling__attn_factor": 2.0}, "rope.scaling.attn_factor is 2.0"),
        ("llama", {"embedding_length": None}, "hidden_size|embedding_length"),
        ("llama", {"feed_forward_length": [1, 2]}, "intermediate_size"),
    ],
)
def test_what_could_change_the_result_is_refused(
    tmp_path: Path, architecture: str, fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ModelError, match=reason) as raised:
        spec(file(tmp_path, architecture, **fields))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("general", "reason"),
    [
        ({"general.type": "adapter"}, "of type 'adapter', not a model"),
        ({"general.quantization_version": 1}, "quantization_version is 1, and 2 is supported"),
    ],
)
def test_files_that_hold_no_model_or_older_blocks(
    tmp_path: Path, general: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ModelError, match=reason):
        config_of(file(tmp_path, general=general))


def test_factors_that_contradict_the_fields(tmp_path: Path) -> None:
    freqs = plain("rope_freqs.weight", np.array(FACTORS))
    with pytest.raises(ModelError, match="factors of its rotary embedding"):
        config_of(file(tmp_path, tensors=(freqs,), rope__scaling__type="linear", rope__scaling__factor=2.0))
