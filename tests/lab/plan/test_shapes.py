from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from headrace.compute.model.families import parse_config
from headrace.compute.model.weights import dummy_weights
from headrace.lab.plan.roofline import SHAPES, WEIGHTS, Replica, WindowLayers, decoding, device
from headrace.wiring.simulation import planned_shape

PUBLISHED = {
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "smollm2-135m": 134_515_008,
    "mistral-7b": 7_248_023_552,
    "phi-3-mini": 3_821_079_552,
    "gemma-2-9b": 9_241_705_984,
    "gemma-3-1b": 999_885_952,
}
"""Numbers of weights as the models' safetensors files have them."""


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_are_the_published_ones(name):
    assert SHAPES[name].num_parameters == PUBLISHED[name]


@pytest.mark.parametrize(
    ("name", "kib"),
    [("llama-3.1-8b", 128), ("qwen3-8b", 144), ("qwen3-4b", 144), ("qwen3-0.6b", 112), ("phi-3-mini", 384)],
)
def test_bytes_of_keys_and_values(name, kib):
    assert SHAPES[name].kv_bytes_per_token() == kib * 1024
    assert SHAPES[name].kv_bytes_per_token(element_bytes=1) == kib * 512


def test_a_step_reads_the_experts_that_its_tokens_are_expected_to_have():
    moe = Replica(SHAPES["qwen3-30b-a3b"], device("H200"))
    one, many = decoding(1, 100), decoding(4096, 100)
    active = SHAPES["qwen3-30b-a3b"].num_parameters - 48 * 120 * 3 * 2048 * 768
    head = SHAPES["qwen3-30b-a3b"].table_parameters
    assert moe.weight_bytes_read(one) == pytest.approx(2 * (active - head), rel=1e-3)
    assert moe.weight_bytes_read(many) == pytest.approx(moe.weight_bytes - 2 * head, rel=1e-3)
    assert moe.flops(one) == pytest.approx(2 * (active - head), rel=0.02)


def test_the_size_of_a_model_that_is_loaded_is_the_planned_one():
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "moe_intermediate_size": 768,
    }
    shape = parse_config(config).shape
    planned = replace(planned_shape("", shape), qk_norm=True)
    assert planned == replace(SHAPES["qwen3-30b-a3b"], name="")
    norms = 48 * 2 * 128  # those of heads are not counted
    assert shape.num_parameters == PUBLISHED["qwen3-30b-a3b"] - norms


def test_the_memory_of_experts_in_mxfp4_is_the_planned_one():
    config = {
        "architectures": ["GptOssForCausalLM"],
        "vocab_size": 300,
        "hidden_size": 320,
        "intermediate_size": 320,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "max_position_embeddings": 8192,
        "num_local_experts": 8,
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    }
    spec = parse_config(config)
    weights = dummy_weights(spec, torch.bfloat16, "cpu")
    assert weights.quantization == "5 bfloat16, 32 fp4 W4A16 in groups of 32"
    replica = Replica(planned_shape("", spec.shape), device("cpu"), precision=WEIGHTS["mxfp4"])
    assert replica.weight_bytes == pytest.approx(weights.nbytes, rel=0.02)
    active = replica.weight_bytes_read(decoding(1, 100))
    experts = 2 * 8 * 3 * 320 * 320 * 0.625
    assert active == pytest.approx(replica.weight_bytes - experts / 2 - 300 * 320 * 2, rel=0.02)


def test_layers_that_differ_are_planned_by_their_sums():
    e2b = {
        "architectures": ["Gemma4ForCausalLM"],
        "vocab_size": 262_144,
        "hidden_size": 1536,
        "intermediate_size": 6144,
        "num_hidden_layers": 35,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 20,
        "use_double_wide_mlp": True,
        "layer_types": [*["sliding_attention"] * 4, "full_attention"] * 7,
    }
    shape = parse_config(e2b).shape
    planned = planned_shape("e2b", shape)
    assert planned.num_parameters == shape.num_parameters
    assert planned.kv_bytes_per_token() == 2 * 2 * (12 * 256 + 3 * 512)
    assert planned.linear_parameters + planned.table_parameters == shape.token_parameters
    assert planned.windows == WindowLayers(2, 512, 2 * 3 * 512)


def test_latents_take_what_a_token_keeps():
    config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "vocab_size": 129_280,
        "hidden_size": 7168,
        "intermediate_size": 18_432,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "max_position_embeddings": 163_840,
    }
    shape = parse_config(config).shape
    planned = planned_shape("deepseek", shape)
    assert planned.kv_bytes_per_token() == 61 * 576 * 2
    assert shape.num_parameters == pytest.approx(671e9, rel=0.001)
    assert shape.token_parameters == pytest.approx(37.5e9, rel=0.02)
    assert planned.num_parameters == shape.num_parameters


def test_layers_with_mixers_count_as_what_they_are():
    config = {
        "architectures": ["Qwen3_5ForCausalLM"],
        "vocab_size": 248_320,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 262_144,
        "tie_word_embeddings": True,
    }
    shape = parse_config(config).shape
    planned = planned_shape("hybrid", shape)
    assert planned.num_layers == 24
    assert planned.state_bytes == shape.state_bytes == 18 * (3 * 8192 + 32 * 128 * 128) * 4
    assert planned.num_parameters == shape.num_parameters
    assert planned.kv_bytes_per_token() == 2 * 2 * 6 * 2 * 256
