"""Parts of a model as data: together they are the whole, and sizes that cannot work are refused by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from headrace.compute.checkpoint import ModelError
from headrace.compute.model.families import parse_config
from headrace.compute.model.sharding import Place, Range, Shard, check_sizes, shard_of
from headrace.compute.model.spec import DecoderSpec
from headrace.compute.model.weights import dummy_weights
from headrace.compute.quantization.scheme import W4A16, W8A8, round_to_nearest
from tests.compute.model.configs import LLAMA


def spec(**fields: Any) -> DecoderSpec:
    return parse_config(LLAMA | fields)


def shards(whole: DecoderSpec, tensor: int, stages: int) -> list[Shard]:
    return [shard_of(whole, Place(rank, tensor, stages)) for rank in range(tensor * stages)]


def joined(ranges: list[Range]) -> list[int]:
    return [element for each in ranges for element in range(*each)]


@pytest.mark.parametrize(("tensor", "stages"), [(1, 1), (2, 1), (4, 1), (1, 3), (2, 3)])
def test_the_parts_are_the_whole(tensor: int, stages: int) -> None:
    whole = spec(num_hidden_layers=7, num_key_value_heads=4, vocab_size=65)
    parts = shards(whole, tensor, stages)
    assert joined([each.heads for each in parts[:tensor]]) == list(range(4))
    assert joined([each.vocabulary for each in parts[:tensor]]) == list(range(65))
    assert joined([each.inner for each in parts[:tensor]]) == list(range(48))
    assert joined([each.layers for each in parts[::tensor]]) == list(range(7))
    assert max(parts, key=lambda each: each.layers.size).place.stage == 0


def test_ranks_share_a_kv_head_if_there_are_fewer() -> None:
    parts = shards(spec(), 4, 1)  # four heads, two KV heads
    assert [tuple(each.kv_heads) for each in parts] == [(0, 1), (0, 1), (1, 2), (1, 2)]
    assert {each.spec.num_kv_heads for each in parts} == {1}


def test_one_rank_computes_the_whole_model() -> None:
    whole = spec()
    assert shard_of(whole).spec is whole


@pytest.mark.parametrize(
    ("fields", "sizes", "message"),
    [
        (
            {},
            (3, 1),
            "--tensor-parallel-size 3: it must divide the model's 4 attention heads; sizes that work are 1, 2, 4",
        ),
        ({"intermediate_size": 50}, (4, 1), "50 columns of the MLP; sizes that work are 1, 2"),
        (
            {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8},
            (2, 1),
            "3 KV heads; sizes that work are 1, 3",
        ),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 3, "head_dim": 8},
            (4, 1),
            "multiple of the model's 3 KV heads",
        ),
        ({}, (1, 3), "--pipeline-parallel-size 3: the model has 2 layers"),
    ],
)
def test_sizes_that_do_not_divide_the_model(
    fields: dict[str, Any], sizes: tuple[int, int], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        check_sizes(spec(**fields), Place(0, *sizes))


EXPERTS: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
}


@pytest.mark.parametrize(
    ("fields", "size", "message"),
    [
        ({}, 2, "--enable-expert-parallel: LlamaForCausalLM has no experts; omit this option"),
        (EXPERTS, 1, "--enable-expert-parallel: one rank has all experts; set --tensor-parallel-size"),
        (EXPERTS, 4, "4: with --enable-expert-parallel it must divide the model's 6 experts"),
    ],
)
def test_experts_that_cannot_be_divided(fields: dict[str, Any], size: int, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        check_sizes(spec(**fields), Place(0, size, 1, True))


def test_whole_experts_of_each_rank() -> None:
    whole = spec(**EXPERTS | {"moe_intermediate_size": 21})  # which two ranks cannot divide by columns
    full = dummy_weights(whole, torch.float32, "cpu").layers[1].experts
    ranks = [shard_of(whole, Place(rank, 2, 1, True)) for rank in range(2)]
    parts = [dummy_weights(each, torch.float32, "cpu").layers[1].experts for each in ranks]
    assert full is not None
    assert [len(each or ()) for each in parts] == [3, 3]
    for one, other in zip(full, [each for part in parts for each in part or ()], strict=True):
        assert torch.equal(one.gate_up, other.gate_up)
        assert torch.equal(one.down, other.down)
    experts = 2 * 3 * 3 * 21 * whole.hidden_size
    assert whole.num_parameters - ranks[0].spec.num_parameters > experts
    with pytest.raises(ModelError, match="21 columns of the MLP"):
        check_sizes(whole, Place(0, 2))


def test_the_weights_of_the_ranks_are_those_of_the_whole() -> None:
    whole = spec(attention_bias=True)
    full = dummy_weights(whole, torch.float32, "cpu").layers[1]
    parts = [dummy_weights(each, torch.float32, "cpu").layers[1] for each in shards(whole, 2, 1)]
    one, other = (part.qkv.split([16, 8, 8]) for part in parts)
    assert torch.equal(torch.cat([one[0], other[0], one[1], other[1], one[2], other[2]]), full.qkv)
    assert torch.equal(torch.cat([part.output for part in parts], 1), full.output)
    assert torch.equal(torch.cat([part.down for part in parts], 1), full.down)
    gates = [part.gate_up.split(24) for part in parts]
    assert torch.equal(torch.cat([gates[0][0], gates[1][0], gates[0][1], gates[1][1]]), full.gate_up)
    assert torch.equal(parts[0].output_bias, full.output_bias)
    assert parts[1].output_bias is None


def test_heads_that_are_reordered_are_divided_whole() -> None:
    whole = spec(architectures=["GlmForCausalLM"], head_dim=8)
    full = dummy_weights(whole, torch.float32, "cpu").layers[1]
    parts = [dummy_weights(each, torch.float32, "cpu").layers[1] for each in shards(whole, 2, 1)]
    one, other = (part.qkv.split([16, 8, 8]) for part in parts)
    assert torch.equal(torch.cat([one[0], other[0], one[1], other[1], one[2], other[2]]), full.qkv)
    gates = [part.gate_up.split(24) for part in parts]  # stored as one, unlike queries and keys
    assert torch.equal(torch.cat([gates[0][0], gates[1][0], gates[0][1], gates[1][1]]), full.gate_up)


def test_a_norm_over_all_heads_cannot_be_divided_but_its_layers_can() -> None:
    whole = spec(architectures=["Olmo2ForCausalLM"])
    with pytest.raises(ModelError, match=r"2: Olmo2ForCausalLM normalizes .* use --pipeline-parallel-size"):
        check_sizes(whole, Place(0, 2))
    first, last = (dummy_weights(each, torch.float32, "cpu") for each in shards(whole, 1, 2))
    assert (first.norm, first.layers[0].input_norm, last.layers[0].input_norm) == (None, None, None)
    assert last.norm is not None


def test_a_quantized_weight_is_divided_at_its_groups() -> None:
    weight = torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
    few = round_to_nearest(weight, dataclasses.replace(W4A16, group_size=16))
    half = few.columns(32, 64)
    assert torch.equal(half.dequantized(), few.dequantized()[:, 32:])
    assert half.group_size == 16
    with pytest.raises(ValueError, match="inputs 0 to 24 would split a group of 16"):
        few.columns(0, 24)
    channel = round_to_nearest(weight, W8A8)
    assert torch.equal(channel.columns(3, 20).dequantized(), channel.dequantized()[:, 3:20])
