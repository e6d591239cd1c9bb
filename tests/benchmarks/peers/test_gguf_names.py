from __future__ import annotations

from collections import Counter

import pytest
import torch
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from benchmarks.peers.gguf_names import interleaved, rope_factors, to_gguf
from benchmarks.peers.shapes import SHAPES


@pytest.mark.parametrize("shape", SHAPES.values(), ids=lambda shape: shape.name)
def test_only_the_experts_of_a_layer_share_a_name_in_gguf(shape):
    there = Counter(to_gguf(name, shape.model_type) for name, _ in shape.tensors())
    experts = shape.experts.count if shape.experts else 1
    assert {name: count for name, count in there.items() if count != (experts if "exps" in name else 1)} == {}


def test_names_are_those_that_llama_cpp_reads():
    assert to_gguf("model.embed_tokens.weight") == "token_embd.weight"
    assert to_gguf("model.layers.3.self_attn.o_proj.weight") == "blk.3.attn_output.weight"
    assert to_gguf("model.layers.11.post_attention_layernorm.weight") == "blk.11.ffn_norm.weight"
    assert to_gguf("model.layers.2.mlp.gate.weight") == "blk.2.ffn_gate_inp.weight"
    assert to_gguf("model.layers.2.mlp.experts.17.up_proj.weight") == "blk.2.ffn_up_exps.weight"
    assert to_gguf("model.layers.0.linear_attn.A_log") == "blk.0.ssm_a"
    assert to_gguf("model.layers.0.linear_attn.dt_bias") == "blk.0.ssm_dt.bias"
    norm = "model.layers.3.post_attention_layernorm.weight"
    assert to_gguf(norm, "qwen3_5_text") == "blk.3.post_attention_norm.weight"


@pytest.mark.parametrize("name", ["model.layers.0.mlp.experts.weight", "lm_head.weight"])
def test_a_tensor_of_another_family_is_refused(name):
    with pytest.raises(KeyError):
        to_gguf(name)


def test_interleaving_brings_the_halves_of_each_head_side_by_side():
    assert interleaved(8, heads=1) == [0, 4, 1, 5, 2, 6, 3, 7]
    assert interleaved(8, heads=2) == [0, 2, 1, 3, 4, 6, 5, 7]


def test_frequencies_of_llama_3_are_divided_as_hugging_face_divides_them():
    shape = SHAPES["llama-3.2-1b"]
    config = AutoConfig.for_model(**shape.config())
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2) / shape.head_dim)
    torch.testing.assert_close(torch.tensor(rope_factors(shape)), plain / scaled, rtol=1e-4, atol=0.0)
