from __future__ import annotations

from headrace.compute.model.families import parse_config
from headrace.wiring.model import parameter_counts


def test_a_mixture_has_fewer_parameters_for_a_token() -> None:
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "vocab_size": 1000,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "moe_intermediate_size": 32,
        "num_experts": 16,
        "num_experts_per_tok": 2,
    }
    counts = parameter_counts(parse_config(config).shape)
    assert counts["num_parameters"] - counts["active_parameters"] == 2 * 14 * 3 * 64 * 32
