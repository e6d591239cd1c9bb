"""Configs of hybrid models: which layers are recurrent, the sizes of their states, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from headrace.compute.checkpoint import ModelError
from headrace.compute.model.families import UnknownArchitecture, parse_config
from headrace.compute.model.layout import linear_modules, other_tensors
from headrace.compute.model.sharding import Place, check_sizes
from headrace.compute.model.spec import DecoderSpec
from tests.compute.model.configs import LLAMA

DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
DELTA |= {"linear_key_head_dim": 8, "linear_value_head_dim": 16, "head_dim": 16}
NEMOTRON = {"mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2, "mlp_hidden_act": "relu2"}
FALCON = {"mamba_n_heads": 4, "mamba_d_ssm": 32, "mamba_d_state": 8}
MAMBA = {"mamba_n_heads": 4, "mamba_d_state": 8, "num_local_experts": 0}


def parse(architecture: str, **fields: Any) -> DecoderSpec:
    return parse_config(LLAMA | {"architectures": [architecture], "num_hidden_layers": 4} | fields)


def recurrent(spec: DecoderSpec) -> list[bool]:
    return [layer.recurrent for layer in spec.layers]


def test_layers_by_list_or_as_usual() -> None:
    usual = parse("Qwen3_5ForCausalLM", **DELTA)
    assert recurrent(usual) == [True, True, True, False]
    assert len(usual.shape.layers) == 1
    assert recurrent(parse("Lfm2ForCausalLM", full_attn_idxs=[1, 2])) == [True, False, False, True]
    listed = ["mamba", "attention", "linear_attention", "full_attention"]
    assert recurrent(parse("GraniteMoeHybridForCausalLM", layer_types=listed, **MAMBA)) == [True, False] * 2
    assert recurrent(parse("BambaForCausalLM", attn_layer_indices=[3], **MAMBA)) == [True] * 3 + [False]


def test_a_model_whose_layers_all_attend_is_as_any_other() -> None:
    spec = parse("GraniteMoeHybridForCausalLM", layer_types=["attention"] * 4, **MAMBA)
    assert (spec.mixer, spec.shape.state_bytes, len(spec.shape.layers)) == (None, 0, 4)
    check_sizes(spec, Place(0, 2, 2))


def test_states_take_float32_for_each_recurrent_layer() -> None:
    convolved, heads = 3 * (2 * 2 * 8 + 4 * 16), 4 * 8 * 16
    assert parse("Qwen3_5ForCausalLM", **DELTA).shape.state_bytes == 3 * 4 * (convolved + heads)


def test_width_of_lfm2_is_adjusted() -> None:
    fields = {"full_attn_idxs": [0], "block_ff_dim": 100, "block_multiple_of": 16}
    assert parse("Lfm2ForCausalLM", **fields).intermediate_size == 80
    assert parse("Lfm2ForCausalLM", **fields, block_auto_adjust_ff_dim=False).intermediate_size == 100


def nemotron(blocks: str, **fields: Any) -> DecoderSpec:
    return parse("NemotronHForCausalLM", hybrid_override_pattern=blocks, **NEMOTRON, **fields)


def test_blocks_of_nemotron_are_layers_with_the_mlp_behind_them() -> None:
    spec = nemotron("M-MM-*-*")
    kinds = [(layer.recurrent, layer.feeds) for layer in spec.layers]
    assert kinds == [(True, True), (True, False), (True, True), (False, True), (False, False)]
    assert (len(spec.shape.layers), spec.shape.recurrent_layers) == (2, 3)
    assert ("model.layers.6.mixer.", "model.layers.3.mlp.") in spec.renamed
    kinds_listed = ["mamba", "mlp", "linear_attention", "attention"]
    listed = parse("NemotronHForCausalLM", layers_block_type=kinds_listed, **NEMOTRON)
    assert recurrent(listed) == [True, True, False]
    names = {name for name, _ in other_tensors(spec)}
    assert "model.layers.0.post_attention_layernorm.weight" in names
    assert "model.layers.1.post_attention_layernorm.weight" not in names


def test_experts_of_nemotron_have_no_gates() -> None:
    sizes = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
    spec = nemotron("MEM*-", **sizes, moe_shared_expert_intermediate_size=24)
    assert [(layer.experts, layer.feeds) for layer in spec.layers] == [
        (True, True),
        (False, False),
        (False, True),
    ]
    assert spec.experts is not None
    assert (spec.experts.routing.scoring, spec.experts.routing.shared) == ("sigmoid", "plain")
    linears = dict(linear_modules(spec))
    assert linears["model.layers.0.mlp.experts.7.up_proj"] == (20, spec.hidden_size)
    assert linears["model.layers.0.mlp.shared_experts.down_proj"] == (spec.hidden_size, 24)
    assert not any("gate_proj" in name for name in linears)
    assert spec.shape.sparse is not None
    assert spec.shape.sparse.size == 2 * 20 * spec.hidden_size
    weights = sum(math.prod(shape) for _, shape in (*linears.items(), *other_tensors(spec)))
    biases = sum(math.prod(shape) for name, shape in other_tensors(spec) if _is_small(name))
    assert spec.num_parameters == weights - biases


def _is_small(name: str) -> bool:
    """Whether a tensor is none of the matrices, norms and convolutions that parameters are counted of."""
    return name.endswith(("A_log", "dt_bias", ".D", ".bias", "correction_bias"))


def test_every_layer_of_falcon_keeps_keys_and_a_state() -> None:
    spec = parse("FalconH1ForCausalLM", key_multiplier=0.5, attention_in_multiplier=2.0, **FALCON)
    assert (len(spec.shape.layers), spec.shape.recurrent_layers) == (4, 4)
    assert spec.attention_scale == pytest.approx(2.0 * spec.head_dim**-0.5)
    assert spec.multipliers == (2.0, 1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("architecture", "fields", "message"),
    [
        ("NemotronHForCausalLM", NEMOTRON | {"hybrid_override_pattern": "MFM*"}, "kind 'F' are not"),
        ("NemotronHForCausalLM", NEMOTRON | {"hybrid_override_pattern": "ME-*"}, "block 2 is an MLP behind"),
        (
            "NemotronHForCausalLM",
            NEMOTRON | {"hybrid_override_pattern": "M-E*"},
            "block 2 are experts behind",
        ),
        (
            "NemotronHForCausalLM",
            NEMOTRON | {"hybrid_override_pattern": "ME*", "moe_latent_size": 16},
            r"with experts over latents \(moe_latent_size\) is not",
        ),
        (
            "NemotronHForCausalLM",
            NEMOTRON | {"hybrid_override_pattern": "ME*", "mlp_bias": True},
            "with biases of a shared expert alone",
        ),
        ("NemotronHForCausalLM", NEMOTRON | {"hybrid_override_pattern": "M--*"}, "block 2 is an MLP behind"),
        ("NemotronHForCausalLM", NEMOTRON | {"hybrid_override_pattern": "-M*"}, "block 0 is an MLP behind"),
        ("NemotronHForCausalLM", NEMOTRON | {"hybrid_override_pattern": "M-M"}, "no layer attends"),
        ("NemotronHForCausalLM", NEMOTRON | {"hybrid_override_pattern": 7}, "must be a string"),
        ("NemotronHForCausalLM", NEMOTRON | {"hybrid_override_pattern": ""}, "lists no blocks"),
        (
            "NemotronHForCausalLM",
            NEMOTRON | {"hybrid_override_pattern": "M*", "n_groups": 3},
            "not a multiple",
        ),
        (
            "NemotronHForCausalLM",
            NEMOTRON | {"hybrid_override_pattern": "M*", "mamba_d_conv": 2},
            "with mamba_d_conv is not of a native family",
        ),
        (
            "NemotronHForCausalLM",
            NEMOTRON | {"hybrid_override_pattern": "M*", "attention_head_dim": 7},
            "with attention_head_dim is not",
        ),
        (
            "NemotronHForCausalLM",
            NEMOTRON | {"hybrid_override_pattern": "M*", "mamba_hidden_act": "gelu"},
            "mamba_hidden_act 'gelu' of a recurrent layer",
        ),
        ("FalconH1ForCausalLM", FALCON | {"attention_bias": True}, "with attention_bias is not"),
        ("FalconH1ForCausalLM", FALCON | {"mamba_d_ssm": 33}, r"are not mamba_d_ssm \(33\)"),
        ("FalconH1ForCausalLM", FALCON | {"ssm_multipliers": [1.0]}, "ssm_multipliers must be 5 numbers"),
        ("Qwen3_5ForCausalLM", DELTA | {"layer_types": ["linear_attention"] * 4}, "no layer attends"),
        (
            "Qwen3_5ForCausalLM",
            DELTA | {"layer_types": ["full_attention"]},
            "layer_types has 1 entries for 4",
        ),
        (
            "Qwen3_5ForCausalLM",
            DELTA | {"layer_types": ["sparse"] * 4},
            "layer_types: sparse is not supported",
        ),
        (
            "Qwen3_5ForCausalLM",
            DELTA | {"hidden_act": "gelu_new"},
            "hidden_act 'gelu_new' of a recurrent layer",
        ),
        (
            "Qwen3_5ForCausalLM",
            DELTA | {"linear_num_value_heads": 3},
            r"linear_num_value_heads \(3\) is not a",
        ),
        (
            "Qwen3_5ForCausalLM",
            DELTA | {"linear_conv_kernel_dim": 9},
            "linear_conv_kernel_dim must be 2 to 8",
        ),
        ("BambaForCausalLM", MAMBA | {"attn_layer_indices": [0], "mamba_d_head": 7}, r"mamba_d_head \(7\)"),
        (
            "BambaForCausalLM",
            MAMBA | {"attn_layer_indices": [0], "time_step_limit": [2, 1]},
            "two numbers in",
        ),
        ("Lfm2MoeForCausalLM", {"full_attn_idxs": [0], "use_expert_bias": False}, "use_expert_bias is False"),
    ],
)
def test_options_of_transformers_code_are_left_to_it(
    architecture: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnknownArchitecture, match=message) as refused:
        parse(architecture, **fields)
    assert refused.value.why


def test_states_are_kept_by_one_process() -> None:
    spec = parse("Qwen3_5ForCausalLM", **DELTA)
    with pytest.raises(
        ModelError, match="--tensor-parallel-size 2: Qwen3_5ForCausalLM keeps recurrent states"
    ):
        check_sizes(spec, Place(0, 2))
    with pytest.raises(
        ModelError, match="--pipeline-parallel-size 2: Qwen3_5ForCausalLM keeps recurrent states"
    ):
        check_sizes(spec, Place(0, 1, 2))


def test_activations_have_what_a_mixer_computes_with() -> None:
    spec = parse("Qwen3_5ForCausalLM", **DELTA)
    assert spec.mixer is not None
    dense = max(spec.intermediate_of(index) for index in range(spec.num_layers))
    assert 3 * (spec.shape.intermediate_size - dense) - spec.mixer.features in range(3)
    convolved, values = (
        spec.mixer.states[0].shape[1],
        spec.mixer.states[1].shape[0] * spec.mixer.states[1].shape[2],
    )
    # What is convolved: 2 bytes of it come from the linear layer, 4 go out. Gates and result: 2 bytes each.
    assert 2 * spec.mixer.features == 6 * convolved + 4 * values + 4 * spec.mixer.states[1].shape[0]
