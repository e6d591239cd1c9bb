"""Configs, older and newer spellings, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from headrace.compute.checkpoint import ModelError
from headrace.compute.model.families import FAMILIES, UnknownArchitecture, parse_config
from headrace.compute.model.spec import DecoderSpec, LayerSpec
from tests.compute.model.configs import LLAMA


def parse(architecture: str = "LlamaForCausalLM", **fields: Any) -> DecoderSpec:
    return parse_config(LLAMA | {"architectures": [architecture]} | fields)


def windows(spec: DecoderSpec) -> list[int | None]:
    return [layer.window for layer in spec.layers]


def test_llama() -> None:
    spec = parse()
    assert (spec.head_dim, spec.num_kv_heads, spec.attention_scale) == (8, 2, 8**-0.5)
    assert (spec.dtype, spec.tied_embeddings, spec.qk_norm) == ("bfloat16", False, None)
    assert spec.layers == (LayerSpec(), LayerSpec())


def test_heads_default_to_one_key_head_per_query_head() -> None:
    config = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert parse_config(config).num_kv_heads == 4
    assert parse_config(LLAMA | {"num_key_value_heads": None}).num_kv_heads == 4


def test_biases_follow_the_family_or_the_config() -> None:
    assert [parse("Qwen2ForCausalLM").qkv_bias, parse("Qwen2ForCausalLM").output_bias] == [True, False]
    assert [parse(attention_bias=True).qkv_bias, parse(attention_bias=True).output_bias] == [True, True]
    assert not parse("Qwen3ForCausalLM").qkv_bias
    assert not parse("MistralForCausalLM", attention_bias=True).qkv_bias


def test_which_layers_slide() -> None:
    assert windows(parse("MistralForCausalLM", sliding_window=9)) == [9, 9]
    assert windows(parse("MistralForCausalLM", sliding_window=None)) == [None, None]
    qwen = {"sliding_window": 9, "max_window_layers": 1}
    assert windows(parse("Qwen2ForCausalLM", **qwen)) == [None, None]
    assert windows(parse("Qwen2ForCausalLM", use_sliding_window=True, **qwen)) == [None, 9]
    every = qwen | {"max_window_layers": 0}
    assert windows(parse("Qwen2ForCausalLM", use_sliding_window=True, **every)) == [9, 9]
    with pytest.raises(ModelError, match="max_window_layers must be a positive integer"):
        parse("Qwen2ForCausalLM", use_sliding_window=True, **qwen | {"max_window_layers": -1})
    assert windows(parse("Gemma2ForCausalLM", sliding_window=9)) == [9, None]
    gemma3 = parse("Gemma3ForCausalLM", sliding_window=9, num_hidden_layers=7)
    assert windows(gemma3) == [9, 9, 9, 9, 9, None, 9]
    assert [layer.rope for layer in gemma3.layers] == [1, 1, 1, 1, 1, 0, 1]
    listed = ["full_attention", "sliding_attention"]
    assert windows(parse("Gemma2ForCausalLM", sliding_window=9, layer_types=listed)) == [None, 9]


def test_a_sparse_gemma3_config_is_filled_with_the_family_defaults() -> None:
    inner = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "sliding_window": 9}
    scaled = inner | {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    spec = parse_config({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": scaled})
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.vocab_size) == (8, 4, 256, 262_208)
    assert [(rope.theta, rope.kind, rope.factor) for rope in spec.ropes] == [
        (1_000_000.0, "linear", 8.0),
        (10_000.0, "default", 1.0),
    ]
    assert spec.tied_embeddings
    assert spec.embedding_scale == 8.0


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}},
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
            "rope_scaling": {"type": "linear", "factor": 4.0},
        },
    ],
)
def test_spellings_of_rope_mean_the_same(fields: dict[str, Any]) -> None:
    (rope,) = parse(**fields).ropes
    assert (rope.kind, rope.theta, rope.factor, rope.rotary_dim) == ("linear", 5e5, 4.0, 8)


@pytest.mark.parametrize(
    ("rope", "reach"),
    [
        (None, 64),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, 64),
        ({"type": "yarn", "original_max_position_embeddings": 16}, 64),
        ({"type": "linear", "factor": 2.5}, 160),
        ({"type": "dynamic", "factor": 2.0}, 128),
        ({"type": "llama3", "factor": 8.0, "original_max_position_embeddings": 16}, 64),
    ],
)
def test_how_far_stretched_rotations_reach(rope: dict[str, Any] | None, reach: int) -> None:
    spec = parse(max_position_embeddings=64, rope_scaling=rope)
    assert (spec.max_positions, spec.reach) == (64, reach)


def test_rotations_that_only_some_layers_stretch_reach_no_further() -> None:
    stretched = {"rope_type": "linear", "factor": 8.0}
    assert parse("Gemma3ForCausalLM", max_position_embeddings=64, rope_scaling=stretched).reach == 64


def test_phi3_longrope() -> None:
    factors = {"type": "su", "short_factor": [1.0] * 3, "long_factor": [2.0] * 3}
    spec = parse(
        "Phi3ForCausalLM",
        rope_scaling=factors,
        partial_rotary_factor=0.75,
        original_max_position_embeddings=32,
    )
    (rope,) = spec.ropes
    assert (rope.kind, rope.rotary_dim, rope.original_positions) == ("longrope", 6, 32)
    assert rope.attention_factor == pytest.approx((1 + 2 / 5) ** 0.5)
    assert (spec.merged_qkv, spec.merged_gate_up) == (True, True)


def test_an_unknown_architecture_is_refused_with_the_list() -> None:
    with pytest.raises(ModelError, match="names MambaForCausalLM; supported architectures are") as error:
        parse("MambaForCausalLM")
    assert all(name in str(error.value) for name in FAMILIES)
    with pytest.raises(ModelError, match="no architecture at all"):
        parse_config({})


def test_a_type_with_other_names_of_tensors_is_no_native_family() -> None:
    with pytest.raises(UnknownArchitecture, match="LlamaForCausalLM"):
        parse("LlamaForCausalLM", model_type="exaone")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
        (
            {"quantization_config": {"quant_method": "hqq"}},
            "quant_method 'hqq' is not supported; supported are",
        ),
        ({"quantization_config": "gptq"}, "quantization_config must be an object"),
        ({"compression_config": {"quant_method": "sparseml"}}, "quant_method 'sparseml'"),
        ({"rope_scaling": {"rope_type": "proportional", "factor": 2.0}}, "rope type 'proportional'"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope type 'llama3' needs a factor"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 1]}}, "rope type 'mrope'"),
        ({"rope_scaling": {"mrope_section": [1, 1]}}, "mrope_section"),
        ({"rope_scaling": {"factor": 2.0}}, "rope type 'default': factor is not supported"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0, "alpha": 1e3}},
            "'dynamic': alpha is not supported",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 32}}, "'linear': beta_fast is not"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "attn_factor": 0.5}}, "'yarn': attn_factor is not"),
        (
            {"rope_parameters": {"type": "yarn", "factor": 2, "llama_4_scaling_beta": 0.1}},
            "llama_4_scaling_beta",
        ),
        ({"rope_parameters": {"mrope_interleaved": True}}, "mrope_interleaved"),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": "no"}},
            "truncate must be true or false",
        ),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "needs short_factor, a list of 4"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": ["one"] * 4}},
            "needs long_factor, a list of 4 numbers",
        ),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object, the config has 'linear'"),
        ({"rope_parameters": [1]}, "rope_parameters must be an object"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types: linear_attention"),
        ({"layer_types": ["full_attention"]}, "layer_types has 1 entries for 2 layers"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"hidden_size": "many"}, "hidden_size must be a positive integer, the config has 'many'"),
        ({"num_attention_heads": 0}, "num_attention_heads must be a positive integer"),
        ({"num_key_value_heads": 3}, "not a multiple of num_key_value_heads"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps must be a positive number"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"vocab_size": None}, "lacks vocab_size"),
        ({"head_dim": 7}, "features in pairs, but head_dim is 7"),
        ({"hidden_size": 2, "num_attention_heads": 4}, "features in pairs, but head_dim is 0"),
        (
            {"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.4},
            "partial_rotary_factor 0.4 of head_dim 8 does not give an even number",
        ),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number, the config has nan"),
        ({"rope_theta": float("inf")}, "rope_theta must be a positive number, the config has inf"),
        ({"rope_theta": 10**400}, "rope_theta must be a positive number"),
        ({"partial_rotary_factor": float("inf")}, "partial_rotary_factor must be a positive number"),
        (
            {"architectures": "LlamaForCausalLM"},
            "architectures must be a list of names, the config has 'Llama",
        ),
        ({"architectures": 3}, "architectures must be a list of names"),
        ({"architectures": [["LlamaForCausalLM"]]}, "architectures must be a list of names"),
        ({"layer_types": 3}, "layer_types must be a list of names, the config has 3"),
        ({"layer_types": [0, {}]}, "layer_types must be a list of names"),
        ({"hidden_act": ["silu"]}, "hidden_act '.*' is not supported"),
    ],
)
def test_unsupported_and_malformed_fields_are_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse(**fields)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "factor": None},
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "finetuned": True},
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "mscale": 1.0,
        },
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "attention_factor": 1.2,
            "mscale_all_dim": 1.0,
            "rope_theta": 1e4,
        },
        {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 16},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        | {"original_max_position_embeddings": 16, "partial_rotary_factor": 1.0},
    ],
)
def test_every_field_that_a_rope_type_has_is_accepted(rope: dict[str, Any]) -> None:
    for name in ("rope_scaling", "rope_parameters"):
        (parsed,) = parse(max_position_embeddings=64, **{name: rope}).ropes
        assert parsed.kind == (rope.get("rope_type") or rope["type"])
        assert parsed.truncate == rope.get("truncate", True)


def test_ropes_by_layer_type_have_no_other_fields() -> None:
    layers = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
    spec = parse("Gemma3ForCausalLM", rope_parameters=layers | {"rope_theta": 1e6})
    assert [rope.theta for rope in spec.ropes] == [1e6, 1e4]
    with pytest.raises(ModelError, match="by layer type: factor is not supported"):
        parse("Gemma3ForCausalLM", rope_parameters=layers | {"factor": 8.0})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_hidden_layers", 10**9, "num_hidden_layers must be at most 4096, the config has 1000000000"),
        ("hidden_size", 10**400, "hidden_size must be at most 9007199254740992, the config has 1000000"),
        ("max_position_embeddings", 2**80, "max_position_embeddings must be at most 9007199254740992"),
        ("num_attention_heads", -4, "num_attention_heads must be a positive integer"),
        ("vocab_size", "64", "vocab_size must be a positive integer, the config has '64'"),
        ("rms_norm_eps", float("nan"), "rms_norm_eps must be a positive number"),
        ("rope_theta", 10**400, "rope_theta must be a positive number"),
    ],
)
def test_sizes_of_a_malicious_config_are_refused_by_name(field: str, value: object, message: str) -> None:
    with pytest.raises(ModelError, match=message) as raised:
        parse_config(LLAMA | {field: value})
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("field", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    "left",
    [
        {"factor": 4.0, "original_max_position_embeddings": 32},
        {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"attention_factor": 2.0, "beta_fast": 8, "mscale": 1.5, "truncate": False, "finetuned": True},
        {"short_factor": [2.0], "long_factor": [2.0]},
    ],
)
def test_a_default_rope_ignores_fields_of_other_types(field: str, left: dict[str, Any]) -> None:
    assert parse_config(LLAMA | {field: {"rope_type": "default"} | left}).ropes == parse_config(LLAMA).ropes


def test_multipliers_of_granite() -> None:
    """The residual is scaled, so that neither weights nor steps know of its multiplier."""
    multipliers = {"embedding_multiplier": 12.0, "residual_multiplier": 0.25, "logits_scaling": 8.0}
    spec = parse("GraniteForCausalLM", attention_multiplier=0.5, **multipliers)
    assert (spec.embedding_scale, spec.residual_scale, spec.output_scale) == (48.0, 4.0, 1.0)
    assert (spec.norm_eps, spec.attention_scale, spec.logits_scale) == (16e-5, 0.5, 0.125)
    after = parse("HyperCLOVAXForCausalLM", **multipliers)
    assert (after.embedding_scale, after.residual_scale, after.output_scale) == (12.0, 1.0, 0.25)
    assert (after.norm_eps, after.attention_scale, after.logits_scale) == (1e-5, 8**-0.5, 8.0)
    assert parse("HyperCLOVAXForCausalLM", use_post_norm=False, **multipliers).residual_scale == 4.0


def test_layers_without_rope() -> None:
    spec = parse("SmolLM3ForCausalLM", num_hidden_layers=5)
    assert [layer.rope for layer in spec.layers] == [0, 0, 0, 1, 0]
    assert [rope.kind for rope in spec.ropes] == ["default", "none"]
    assert spec.reach == 128
    listed = parse("SmolLM3ForCausalLM", no_rope_layers=[0, 1])
    assert [layer.rope for layer in listed.layers] == [1, 0]
    with pytest.raises(ModelError, match="no_rope_layers has 1 entries, layer 1 has none"):
        parse("SmolLM3ForCausalLM", no_rope_layers=[0])
    with pytest.raises(ModelError, match="no_rope_layers must be a list of integers"):
        parse("SmolLM3ForCausalLM", no_rope_layers=["yes"])
    exaone = parse("Exaone4ForCausalLM", num_hidden_layers=4, sliding_window=9)
    assert [(layer.window, layer.rope) for layer in exaone.layers] == [(9, 0), (9, 0), (9, 0), (None, 1)]


HEEDING = {name for name, family in FAMILIES.items() if family.rope.partial}


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("kind", ["default", "linear"])
def test_partial_rotation_is_computed_or_refused(architecture: str, kind: str) -> None:
    rope = {"rope_type": kind, "factor": 2.0, "partial_rotary_factor": 0.5}
    sizes = {"head_dim": 16, "global_head_dim": 16, "qk_rope_head_dim": 16}
    latent = "kv_lora_rank" in FAMILIES[architecture].defaults
    fields = sizes | {"rope_parameters": rope, "num_key_value_heads": 4 if latent else 2}
    if FAMILIES[architecture].mixer is not None:
        attending = ["full_attention"] * 2
        fields |= {"layer_types": attending, "layers_block_type": attending, "mamba_n_heads": 4}
    if architecture in HEEDING:
        assert parse(architecture, **fields).ropes[0].rotary_dim == 8
    else:
        with pytest.raises(
            ModelError, match=r"partial_rotary_factor is 0\.5, .* rotates whole heads; remove"
        ):
            parse(architecture, **fields)
    whole = rope | {"partial_rotary_factor": 1.0}
    assert parse(architecture, **fields | {"rope_parameters": whole}).ropes[0].rotary_dim == 16


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"residual_multiplier": 0.5},
            r"LlamaForCausalLM: residual_multiplier is 0\.5, which this family does not",
        ),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"query_pre_attn_scalar": 64}, "query_pre_attn_scalar"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"clip_qkv": 8.0}, "clip_qkv"),
        ({"hidden_act": "relu"}, "hidden_act 'relu' is not supported; supported are: silu"),
        (
            {
                "architectures": ["MistralForCausalLM"],
                "sliding_window": 9,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            "layer_types differs from the windows of this family",
        ),
    ],
)
def test_fields_that_mean_something_elsewhere_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as error:
        parse_config(LLAMA | fields)
    assert "\n" not in str(error.value)


GPT_OSS = {"architectures": ["GptOssForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2}


def test_gpt_oss_has_sinks_windows_in_turn_and_a_gate_of_its_own() -> None:
    spec = parse_config(LLAMA | GPT_OSS)
    assert (spec.sinks, spec.activation, spec.qkv_bias, spec.output_bias) == (
        True,
        "clamped_swiglu",
        True,
        True,
    )
    assert [layer.window for layer in spec.layers] == [128, None]
    assert (spec.ropes[0].kind, spec.ropes[0].truncate, spec.ropes[0].factor) == ("yarn", False, 32.0)
    assert spec.experts is not None
    assert spec.experts.biased
    assert spec.experts.routing.normalized
    assert not parse_config(LLAMA).sinks


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (GPT_OSS | {"swiglu_limit": 10.0}, r"swiglu_limit is 10\.0, supported is 7\.0"),
        (GPT_OSS | {"swiglu_alpha": 1.0}, r"swiglu_alpha is 1\.0, supported is 1\.702"),
        (GPT_OSS | {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; supported are: silu"),
        (
            {"swiglu_limit": 7.0},
            r"LlamaForCausalLM: swiglu_limit is 7\.0, which this family does not compute",
        ),
    ],
)
def test_another_gate_than_that_of_gpt_oss_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse_config(LLAMA | fields)


def test_fields_that_change_nothing_are_accepted() -> None:
    same = {
        "residual_multiplier": 1.0,
        "final_logit_softcapping": None,
        "num_local_experts": 1,
        "alibi": False,
    }
    assert parse(**same) == parse()
    assert parse(torch_dtype="torch.bfloat16").dtype == "bfloat16"
    kinds = ["sliding_attention"] * 2
    assert windows(parse("MistralForCausalLM", sliding_window=9, layer_types=kinds)) == [9, 9]


def test_the_text_part_of_a_larger_model() -> None:
    text = {name: value for name, value in LLAMA.items() if name != "architectures"}
    outer = {
        "architectures": ["LlavaForConditionalGeneration"],
        "text_config": text,
        "torch_dtype": "float16",
    }
    spec = parse_config(outer)
    assert (spec.architecture, spec.nested_checkpoint, spec.tied_embeddings) == (
        "LlavaForConditionalGeneration",
        True,
        False,
    )
    assert parse_config(outer | {"text_config": text | {"model_type": "qwen2"}}).qkv_bias
    assert parse_config(outer | {"tie_word_embeddings": True}).tied_embeddings
    sparse = parse_config(outer | {"text_config": {"model_type": "llama", "vocab_size": 32_064}})
    assert (sparse.vocab_size, sparse.hidden_size, sparse.num_layers) == (32_064, 4096, 32)
    with pytest.raises(ModelError, match="model_type 'mamba'; supported are: "):
        parse_config(outer | {"text_config": text | {"model_type": "mamba"}})
    with pytest.raises(ModelError, match="the config has no text_config"):
        parse_config({"architectures": ["LlavaForConditionalGeneration"]})


def test_sections_of_positions_are_one_for_text() -> None:
    rope = {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}
    flat = LLAMA | {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "vision_config": {}} | rope
    spec = parse_config(flat)
    assert (spec.ropes[0].kind, spec.ropes[0].theta, spec.qkv_bias) == ("default", 1e6, True)
    assert spec.ropes[0].axes == (0, 1, 2, 2)
    nested = {"architectures": flat["architectures"], "text_config": LLAMA | rope}
    assert parse_config(nested).ropes == spec.ropes


def test_sections_between_each_other() -> None:
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
    text = LLAMA | {"model_type": "qwen3_vl_text", "head_dim": 8} | rope
    spec = parse_config({"architectures": ["Qwen3VLForConditionalGeneration"], "text_config": text})
    assert spec.ropes[0].axes == (0, 1, 2, 0)
    assert parse().ropes[0].axes == ()


@pytest.mark.parametrize(
    ("sections", "reason"),
    [
        ([1, 1, 1], r"mrope_section \[1, 1, 1\] divides 3 pairs of features, but 4 rotate"),
        ([4], "a list of three whole numbers"),
        ([1, 1, "2"], "a list of three whole numbers"),
        ([5, -2, 1], "a list of three whole numbers"),
    ],
)
def test_sections_that_do_not_divide_a_head_are_refused(sections: list[Any], reason: str) -> None:
    rope = {"rope_scaling": {"type": "mrope", "mrope_section": sections}}
    with pytest.raises(ModelError, match=reason):
        parse_config(LLAMA | {"architectures": ["Qwen2VLForConditionalGeneration"]} | rope)


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
def test_the_stored_dtype_is_a_name_of_torch(field: str) -> None:
    assert parse(**{field: "torch.bfloat16"}).dtype == "bfloat16"
    assert parse(**{field: "float64"}).dtype == "float64"
    for wrong in ("junk", "", 5, True, ["bfloat16"], {"a": 1}, "int64", "__class__"):
        with pytest.raises(ModelError, match=f"{field} must be one of bfloat16, .*, got"):
            parse(**{field: wrong})


_DEEP: Any = []
for _ in range(150):
    _DEEP = [_DEEP]

HOSTILE: list[Any] = [
    *(-1, 0, 1, 2**31, 10**30, 1e308, math.nan, math.inf, 1e-320, 0.5, "x" * 100_000, "64", "", True, None),
    *([], {}, [0] * 100_000, ["x"] * 3, [None, 1, {}], _DEEP, {"rope_type": {"a": [1]}}, {"a": {"a": {}}}),
]
SWEPT = {
    "LlamaForCausalLM": {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.0}},
    "Qwen3ForCausalLM": {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
    "Gemma2ForCausalLM": {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 9},
    "Phi3ForCausalLM": {"partial_rotary_factor": 0.5},
}


@pytest.mark.parametrize("architecture", SWEPT)
def test_a_field_with_any_value_is_read_or_refused_in_one_short_line(architecture: str) -> None:
    base = LLAMA | {"architectures": [architecture], "model_type": "any"} | SWEPT[architecture]
    parse_config(base)
    ropes = [name for name, value in base.items() if isinstance(value, dict)]
    places = [(name,) for name in base] + [(name, inner) for name in ropes for inner in base[name]]
    for name, *inner in places:
        for value in HOSTILE:
            changed = base | {name: base[name] | {inner[0]: value} if inner else value}
            try:
                parse_config(changed)
            except ModelError as error:
                message = str(error)
                assert len(message) < 2500
                assert "\n" not in message
