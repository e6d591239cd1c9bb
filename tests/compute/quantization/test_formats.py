"""What a quantization_config asks for: taken, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.compute.checkpoint import ModelError
from headrace.compute.quantization.formats import read_format
from headrace.compute.quantization.layouts import (
    AwqLayout,
    Fp8Layout,
    GptqLayout,
    Int8Layout,
    Mxfp4Layout,
    PackedLayout,
)

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
UP, DOWN = "model.layers.3.mlp.up_proj", "model.layers.3.mlp.down_proj"


def compressed(
    weights: dict[str, Any] | None = None, stored: str = "pack-quantized", **fields: Any
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": WEIGHTS | (weights or {})}
    group |= {name: fields.pop(name) for name in ("input_activations", "targets") if name in fields}
    return {
        "quant_method": "compressed-tensors",
        "format": stored,
        "config_groups": {"group_0": group},
        **fields,
    }


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"quant_method": "bitsandbytes"},
            "quant_method 'bitsandbytes' is not supported; supported are gptq",
        ),
        ({}, "quant_method 'None' is not supported"),
        (GPTQ | {"method": "qqq"}, "quant_method 'qqq' is not supported"),
        (GPTQ | {"data_type": "mx_fp4"}, "gptq data_type 'mx_fp4' is not supported; it can be int"),
        (GPTQ | {"act_bits": 8}, "gptq: the field act_bits"),
        (AWQ | {"format": "gemv_fast"}, "awq format 'gemv_fast' is not supported; it can be gemm"),
        (AWQ | {"desc_act": True}, "awq: the field desc_act"),
        (GPTQ | {"bits": 3}, "gptq bits 3 is not supported; it can be 4, 8"),
        (GPTQ | {"checkpoint_format": "marlin"}, "gptq checkpoint_format 'marlin'"),
        (GPTQ | {"dynamic": {"-:[": {}}}, r"dynamic '-:\[' is not a valid pattern"),
        (GPTQ | {"dynamic": ["x"]}, "dynamic must be an object of fields by pattern"),
        (GPTQ | {"dynamic": {"x": 4}}, "dynamic 'x' must have an object of fields, it has 4"),
        (GPTQ | {"dynamic": {"x": {"bits": 3}}}, "gptq bits 3 is not supported; it can be 4, 8"),
        (GPTQ | {"dynamic": {"x": {"method": "qqq"}}}, "dynamic 'x': the field method"),
        (GPTQ | {"dynamic": {"x": {"group_size": 0}}}, "group_size must be a positive number or -1, it is 0"),
        (AWQ | {"w_bit": 8}, "w_bit is 8, and bits is 4"),
        (AWQ | {"dynamic": {"-:.*k_proj": {}}}, "awq: the field dynamic"),
        (GPTQ | {"group_size": 0}, "group_size must be a positive number or -1, it is 0"),
        (GPTQ | {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert must be a list of names"),
        (AWQ | {"version": "gemv"}, "awq version 'gemv' is not supported; it can be gemm"),
        (AWQ | {"bits": 8}, "awq bits 8"),
        (AWQ | {"zero_point": False}, "awq zero_point False"),
        (AWQ | {"modules_in_block_to_quantize": [["x"]]}, "awq: the field modules_in_block_to_quantize"),
        (compressed(modules_to_not_convert=["x"]), "the field modules_to_not_convert"),
        (FP8 | {"weight_block_size": [128]}, "a block must be outputs and inputs, it is"),
        (FP8 | {"modules_to_convert": ["x"]}, "fp8: the field modules_to_convert"),
        ({"quant_method": "compressed-tensors", "format": "dense"}, "has no config_groups"),
        (
            compressed(stored="marlin-24"),
            "format 'marlin-24' of 4-bit int with strategy 'group' is not supported",
        ),
        (compressed({"num_bits": 3}), "of 3-bit int"),
        (compressed({"type": "float"}, "nvfp4-pack-quantized"), "nvfp4-pack-quantized"),
        (
            compressed({"num_bits": 8, "type": "float"}, input_activations=TOKEN),
            "with quantized activations is not supported",
        ),
        (compressed(input_activations=TOKEN | {"num_bits": 4}), r"input_activations \(num_bits 4"),
        (compressed(kv_cache_scheme={"num_bits": 8}), "the field kv_cache_scheme"),
        (compressed(sparsity_config={"format": "sparse-bitmask"}), "the field sparsity_config"),
        (compressed(transform_config={"config_groups": {"u": {}}}), "the field transform_config"),
        (
            compressed({"num_bits": 8}, "int-quantized", input_activations=TOKEN | {"dynamic": False}),
            r"input_activations \(num_bits 8, .* dynamic False\): only 8-bit int, symmetric, dynamic, per token",
        ),
        (MXFP4 | {"weight_block_size": [128, 128]}, "mxfp4: the field weight_block_size"),
        (MXFP4 | {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert must be a list of names"),
        (compressed() | {"config_groups": {"g": 5}}, "compressed-tensors g must be an object, it is 5"),
        (compressed(ignore=["re:["]), r"ignore: 're:\[' is not a valid pattern"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_format(config)


def test_fields_that_ask_for_nothing_or_tell_how_it_was_made_pass() -> None:
    read_format(
        GPTQ | {"dynamic": None, "meta": {"quantizer": "x"}, "true_sequential": True, "lm_head": False}
    )
    read_format(AWQ | {"modules_to_not_convert": None, "do_fuse": False})
    rounded = {"provider": "auto-round", "autoround_version": "0.9", "data_type": "int", "iters": 200}
    of_gptqmodel = {"method": "gptq", "meta": {"quantizer": ["gptqmodel:5"]}, "pack_dtype": "int32"}
    read_format(GPTQ | of_gptqmodel)
    read_format(GPTQ | rounded)
    of_transformers = {"damp_percent": 0.1, "sym": True, "true_sequential": True, "desc_act": False}
    read_format(AWQ | of_gptqmodel | of_transformers | {"method": "awq", "format": "gemm"})
    read_format(compressed(sparsity_config={"format": "dense", "global_sparsity": 0.14}))
    read_format(compressed(kv_cache_scheme=None, sparsity_config={}, transform_config={}, version="0.12"))


def test_only_experts_are_in_mxfp4() -> None:
    experts = "model.layers.3.mlp.experts.1.gate_proj"
    assert read_format(MXFP4).layout_of(experts) == Mxfp4Layout()
    for plain in ("model.layers.3.self_attn.q_proj", "lm_head", UP):
        assert read_format(MXFP4).layout_of(plain) is None
    for entry, excepted in (
        ("model.layers.*.mlp", True),
        ("model.layers.4.mlp", False),
        ("*.experts.1", True),
    ):
        found = read_format(MXFP4 | {"modules_to_not_convert": [entry]}).layout_of(experts)
        assert (found is None) == excepted


def test_layouts_are_those_that_the_fields_say() -> None:
    assert read_format(GPTQ).layout_of(UP) == GptqLayout(4, 128, zeros_less_one=True)
    assert read_format(GPTQ | {"checkpoint_format": "gptq_v2", "group_size": -1}).layout_of(UP) == GptqLayout(
        4, None, zeros_less_one=False
    )
    assert read_format(compressed()).layout_of(UP) == PackedLayout(4, 128, True)
    int8 = compressed({"num_bits": 8, "strategy": "channel"}, "int-quantized", input_activations=TOKEN)
    assert read_format(int8).layout_of(UP) == Int8Layout(None, True, 8)
    assert read_format(FP8 | {"weight_block_size": None}).layout_of(UP) == Fp8Layout(None, 8)
    assert read_format(FP8 | {"weight_block_size": [128, 64]}).layout_of(UP) == Fp8Layout((128, 64))


@pytest.mark.parametrize(
    ("config", "plain"),
    [
        (GPTQ, {"lm_head"}),
        (GPTQ | {"lm_head": True}, set()),
        (GPTQ | {"modules_to_not_convert": ["mlp.up_proj"]}, {UP, "lm_head"}),
        (GPTQ | {"modules_in_block_to_quantize": [["mlp.up_proj"]]}, {DOWN, "lm_head"}),
        (AWQ | {"modules_to_not_convert": ["model.layers.3"]}, {UP, DOWN, "lm_head"}),
        (AWQ | {"modules_to_not_convert": ["model.layers.33", "up"]}, {UP, "lm_head"}),
        (FP8 | {"ignored_layers": [DOWN]}, {DOWN, "lm_head"}),
        (compressed(), set()),
        (compressed(ignore=["lm_head", "re:.*up_proj$"]), {UP, "lm_head"}),
        (compressed(ignore=["re:up_proj"]), set()),
        (compressed(ignore=["language_model." + UP]), {UP}),
        (compressed(ignore=["model.language_model." + UP.removeprefix("model.")]), {UP}),
        (compressed(targets=["re:.*down_proj"]), {UP, "lm_head"}),
    ],
)
def test_exceptions_are_honoured(config: dict[str, Any], plain: set[str]) -> None:
    found = read_format(config)
    assert {module for module in (UP, DOWN, "lm_head") if found.layout_of(module) is None} == plain


@pytest.mark.parametrize("named", [["re:.*down_proj"], [DOWN], ["re:.*x_proj", "re:.*down"]])
@pytest.mark.parametrize("first", [True, False])
def test_groups_may_have_layouts_of_their_own_and_the_closest_target_counts(
    named: list[str], first: bool
) -> None:
    """By name before by pattern before by class, in whatever order the groups are written."""
    int8 = WEIGHTS | {"num_bits": 8, "strategy": "channel"}
    groups = [
        ("a", {"targets": named, "weights": WEIGHTS}),
        ("b", {"targets": ["Linear"], "format": "int-quantized", "weights": int8}),
    ]
    found = read_format(compressed() | {"config_groups": dict(groups if first else groups[::-1])})
    assert isinstance(found.layout_of(DOWN), PackedLayout)
    assert isinstance(found.layout_of(UP), Int8Layout)


def test_of_groups_that_mean_a_module_alike_the_first_counts() -> None:
    int8 = {"targets": ["re:.*proj"], "format": "int-quantized", "weights": WEIGHTS | {"num_bits": 8}}
    groups = {"a": {"targets": ["re:.*down.*"], "weights": WEIGHTS}, "b": int8}
    found = read_format(compressed() | {"config_groups": groups})
    assert isinstance(found.layout_of(DOWN), PackedLayout)
    assert isinstance(found.layout_of(UP), Int8Layout)


@pytest.mark.parametrize(("activations", "bits"), [({}, 16), ({"input_activations": TOKEN}, 8)])
def test_packed_weights_may_have_activations_of_8_bits(activations: dict[str, Any], bits: int) -> None:
    layout = read_format(compressed(**activations)).layout_of(DOWN)
    assert isinstance(layout, PackedLayout)
    assert (layout.bits, layout.activation_bits) == (4, bits)


def test_autoawqs_own_names_of_bits_and_groups() -> None:
    config = {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "GEMM"}
    assert read_format(config).layout_of(UP) == AwqLayout(64)


@pytest.mark.parametrize(
    ("entry", "plain"), [("down", True), ("mlp.down", True), ("model.layers.3", True), ("layers.4", False)]
)
def test_awq_excludes_modules_whose_name_contains_an_entry(entry: str, plain: bool) -> None:
    stored = read_format(AWQ | {"modules_to_not_convert": [entry]})
    assert (stored.layout_of(DOWN) is None) == plain
    assert stored.layout_of("lm_head") is None


def test_the_first_rule_of_gptqs_dynamic_that_matches_applies() -> None:
    dynamic = {
        r"-:model\.layers\.3\.mlp\.down": {},
        r"+:.*\.down_proj": {"bits": 8, "group_size": 32, "desc_act": True},
        r".*\.3\.mlp\.up": {"bits": 8},
        r"-:.*\.up_proj": {},
        r"mlp": {"bits": 8},  # no name starts so
    }
    stored = read_format(GPTQ | {"dynamic": dynamic, "lm_head": True})
    assert stored.layout_of(DOWN) is None
    assert stored.layout_of("model.layers.4.mlp.down_proj") == GptqLayout(8, 32, zeros_less_one=True)
    assert stored.layout_of(UP) == GptqLayout(8, 128, zeros_less_one=True)
    assert stored.layout_of("model.layers.4.mlp.up_proj") is None
    for module in ("model.layers.4.mlp.gate_proj", "lm_head"):
        assert stored.layout_of(module) == GptqLayout(4, 128, zeros_less_one=True)


def test_a_rule_of_gptqs_dynamic_may_leave_the_head_plain() -> None:
    assert read_format(GPTQ | {"dynamic": {"-:lm_head": {}}, "lm_head": True}).layout_of("lm_head") is None
