"""Checkpoints: sharded, tied, converted; and every way in which one can be wrong."""

from __future__ import annotations

import json
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from headrace.compute.checkpoint import Checkpoint, ModelError
from headrace.compute.model.families import parse_config
from headrace.compute.model.layout import RandomSource, plain_shapes
from headrace.compute.model.sharding import Place, shard_of
from headrace.compute.model.spec import DecoderSpec, Norms
from headrace.compute.model.weights import DecoderWeights, dummy_weights, load_weights, read_spec
from headrace.compute.quantization.scheme import SCHEMES, round_to_nearest
from headrace.compute.quantization.weight import FP8, QuantizedWeight
from tests.compute.model.configs import LLAMA

SPEC = parse_config(LLAMA)


def checkpoint(spec: DecoderSpec = SPEC, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(shape).to(dtype) for name, shape in plain_shapes(spec).items()}


def load(folder: Path, spec: DecoderSpec = SPEC, dtype: torch.dtype = torch.float32) -> DecoderWeights:
    return load_weights(folder, spec, dtype, "cpu")


def test_parts_are_merged_in_order(tmp_path: Path) -> None:
    tensors = checkpoint()
    save_file(tensors, tmp_path / "model.safetensors")
    layer = load(tmp_path).layers[1]
    attention, mlp = "model.layers.1.self_attn.", "model.layers.1.mlp."
    assert torch.equal(layer.qkv, torch.cat([tensors[f"{attention}{x}_proj.weight"] for x in "qkv"]))
    assert torch.equal(layer.gate_up, torch.cat([tensors[f"{mlp}{x}_proj.weight"] for x in ("gate", "up")]))


def test_shards_are_read_by_their_index_and_strays_left_alone(tmp_path: Path) -> None:
    tensors = checkpoint()
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in shards.items():
        save_file({name: tensors[name] for name in held}, tmp_path / file)
    save_file({"stray": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    index = {"weight_map": {name: file for file, held in shards.items() for name in held}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(load(tmp_path).head, tensors["lm_head.weight"])
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(ModelError, match=r"lacks b\.safetensors, named by model\.safetensors\.index\.json"):
        load(tmp_path)


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_are_converted_and_norms_stay_wide(tmp_path: Path, stored: torch.dtype) -> None:
    tensors = checkpoint(dtype=stored)
    save_file(tensors, tmp_path / "model.safetensors")
    weights = load(tmp_path, dtype=torch.bfloat16)
    assert torch.equal(weights.embedding, tensors["model.embed_tokens.weight"].bfloat16())
    assert torch.equal(weights.norm, tensors["model.norm.weight"].float())


def test_tables_of_which_rows_are_looked_up_stay_in_bfloat16_for_float32(tmp_path: Path) -> None:
    for stored, kept in ((torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)):
        tensors = checkpoint(dtype=stored)
        save_file(tensors, tmp_path / "model.safetensors")
        weights = load(tmp_path)
        assert weights.dtype == weights.head.dtype == torch.float32
        assert weights.embedding.dtype == kept
        assert torch.equal(weights.embedding, tensors[EMBED].to(kept))
        assert load(tmp_path, dtype=torch.float16).embedding.dtype == torch.float16


TIED = replace(SPEC, tied_embeddings=True)
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def write(folder: Path, tensors: dict[str, Tensor], **config: object) -> None:
    (folder / "config.json").write_text(json.dumps(LLAMA | {"tie_word_embeddings": True} | config))
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("head_dtype", [torch.float32, torch.float64])
def test_tied_embeddings_are_one_tensor_and_an_equal_copy_is_not_kept(
    tmp_path: Path, head_dtype: torch.dtype
) -> None:
    tensors = checkpoint()
    write(tmp_path, tensors | {HEAD: tensors[EMBED].clone().to(head_dtype)})
    assert read_spec(tmp_path).tied_embeddings
    weights = load(tmp_path, TIED)
    assert weights.head is weights.embedding
    assert weights.nbytes == load(tmp_path).nbytes - weights.embedding.nbytes


@pytest.mark.parametrize("nested", [False, True])
def test_a_stored_head_that_differs_is_used_although_the_config_ties_it(tmp_path: Path, nested: bool) -> None:
    tensors = checkpoint()
    tensors[HEAD] = tensors[EMBED].clone()
    tensors[HEAD][-1, -1] += 1  # the last value of the last part
    if nested:
        tensors = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
        tensors[HEAD] = tensors.pop(f"language_model.{HEAD}")
    write(tmp_path, tensors)
    spec = read_spec(tmp_path)
    assert not spec.tied_embeddings
    assert spec.num_parameters == parse_config(LLAMA).num_parameters
    for asked in (spec, TIED):
        weights = load(tmp_path, asked)
        assert torch.equal(weights.head, tensors[HEAD])
        assert weights.nbytes == sum(tensor.nbytes for tensor in weights.tensors())


@pytest.mark.parametrize("size", [1, 2])
def test_the_parts_of_a_differing_head_are_those_of_the_whole(tmp_path: Path, size: int) -> None:
    tensors = checkpoint()
    write(tmp_path, tensors)
    places = [Place(rank, size, 2) for rank in range(2 * size)]
    parts = [load(tmp_path, shard_of(TIED, place)) for place in places]
    heads = torch.cat([part.head for part, place in zip(parts, places, strict=True) if place.last])
    assert torch.equal(heads, tensors[HEAD])


def test_the_only_table_of_a_tied_pair_is_both(tmp_path: Path) -> None:
    tensors = checkpoint()
    head = tensors.pop(EMBED) * 0 + tensors[HEAD]
    write(tmp_path, tensors)
    assert read_spec(tmp_path).tied_embeddings
    weights = load(tmp_path, read_spec(tmp_path))
    assert weights.head is weights.embedding
    assert torch.equal(weights.embedding, head)
    last = load(tmp_path, shard_of(TIED, Place(1, 1, 2)))
    assert torch.equal(last.head, head)
    with pytest.raises(ModelError, match=r"lacks model\.embed_tokens\.weight"):
        load(tmp_path, SPEC)  # not tied: the embedding is missing


def test_an_untied_head_that_is_missing_is_named(tmp_path: Path) -> None:
    tensors = checkpoint()
    del tensors[HEAD]
    write(tmp_path, tensors, tie_word_embeddings=False)
    with pytest.raises(ModelError, match=r"lacks lm_head\.weight"):
        load(tmp_path, read_spec(tmp_path))


def test_a_differing_head_of_another_shape_is_named(tmp_path: Path) -> None:
    write(tmp_path, checkpoint() | {HEAD: torch.zeros(63, 32)})
    with pytest.raises(ModelError, match=r"lm_head\.weight has shape \[63, 32\], the config says \[64, 32\]"):
        load(tmp_path, TIED)


def test_names_without_the_prefix_are_those_of_the_model(tmp_path: Path) -> None:
    tensors = checkpoint()
    write(tmp_path, {name.removeprefix("model."): tensor for name, tensor in tensors.items()})
    weights = load(tmp_path, TIED)
    assert torch.equal(weights.embedding, tensors[EMBED])
    assert torch.equal(weights.head, tensors[HEAD])


def test_two_names_of_one_tensor_are_refused(tmp_path: Path) -> None:
    tensors = checkpoint()
    write(tmp_path, tensors | {"embed_tokens.weight": tensors[HEAD].clone()})
    with pytest.raises(ModelError, match=r"model\.embed_tokens\.weight.*the same tensor"):
        load(tmp_path, TIED)


def test_without_a_head_none_is_read(tmp_path: Path) -> None:
    tensors = checkpoint()
    write(tmp_path, tensors | {HEAD: torch.zeros(3)})
    weights = load_weights(tmp_path, SPEC, torch.float32, "cpu", head=False)
    assert weights.head is weights.embedding


def index_of(folder: Path, places: dict[str, str]) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


@pytest.mark.parametrize("right", ["a.safetensors", "b.safetensors"])
def test_a_tensor_in_two_shards_is_read_from_the_one_that_the_index_names(tmp_path: Path, right: str) -> None:
    tensors = checkpoint()
    for file in ("a.safetensors", "b.safetensors"):
        save_file(
            {n: t if file == right else torch.zeros_like(t) for n, t in tensors.items()}, tmp_path / file
        )
    other = ({"a.safetensors", "b.safetensors"} - {right}).pop()
    places = dict.fromkeys(tensors, right) | {"model.norm.weight": other}
    index_of(tmp_path, places)
    weights = load(tmp_path)
    assert torch.equal(weights.embedding, tensors[EMBED])
    assert not weights.norm.any()


def test_a_tensor_in_two_files_without_an_index_is_refused(tmp_path: Path) -> None:
    for file in ("a.safetensors", "b.safetensors"):
        save_file(checkpoint(), tmp_path / file)
    with pytest.raises(ModelError, match=r"is in .*a\.safetensors and in b\.safetensors, and no index says"):
        load(tmp_path)


def test_an_index_that_names_a_missing_tensor(tmp_path: Path) -> None:
    tensors = checkpoint()
    save_file(tensors, tmp_path / "a.safetensors")
    index_of(tmp_path, dict.fromkeys([*tensors, "model.layers.7.gone"], "a.safetensors"))
    with pytest.raises(ModelError, match=r"a\.safetensors lacks model\.layers\.7\.gone, named by"):
        load(tmp_path)


@pytest.mark.parametrize(
    "name", ["../a.safetensors", "/etc/passwd", "x/../../a.safetensors", "", "a\0b", "a" * 256, "/"]
)
def test_an_index_that_leaves_its_folder_is_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(checkpoint(), tmp_path / "a.safetensors")
    index_of(folder, {"model.norm.weight": name})
    with pytest.raises(ModelError, match="which is not in its folder"):
        load(folder)


@pytest.mark.parametrize(
    "index", [[], {}, {"weight_map": []}, {"weight_map": {"a": 5}}, {"weight_map": None}]
)
def test_an_index_of_another_form_is_refused(tmp_path: Path, index: object) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json is not"):
        load(tmp_path)


def test_norm_offset_is_added_once(tmp_path: Path) -> None:
    tensors = checkpoint()
    save_file(tensors, tmp_path / "model.safetensors")
    weights = load(tmp_path, replace(SPEC, norm_offset=1.0))
    assert torch.equal(weights.norm, tensors["model.norm.weight"] + 1)
    assert torch.equal(weights.layers[0].input_norm, tensors["model.layers.0.input_layernorm.weight"] + 1)


def test_missing_unexpected_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    tensors = checkpoint()
    file = tmp_path / "model.safetensors"
    save_file({name: t for name, t in tensors.items() if "layers.1.mlp.up" not in name}, file)
    with pytest.raises(ModelError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        load(tmp_path)
    save_file(tensors | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}, file)
    with pytest.raises(
        ModelError, match=r"LlamaForCausalLM does not use: model\.layers\.0\.self_attn\.q_proj"
    ):
        load(tmp_path)
    save_file(tensors | {"model.norm.weight": torch.zeros(31)}, file)
    with pytest.raises(ModelError, match=r"model\.norm\.weight has shape \[31\], the config says \[32\]"):
        load(tmp_path)
    save_file(tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}, file)
    load(tmp_path)


def test_a_shape_that_would_broadcast_is_refused(tmp_path: Path) -> None:
    spec = replace(SPEC, qk_norm="head")
    tensors = checkpoint(spec)
    save_file(tensors, tmp_path / "model.safetensors")
    assert torch.equal(
        load(tmp_path, spec).layers[0].qk_norm[3], tensors["model.layers.0.self_attn.q_norm.weight"]
    )  # type: ignore[index]
    save_file(
        tensors | {"model.layers.0.self_attn.q_norm.weight": torch.ones(1)}, tmp_path / "model.safetensors"
    )
    with pytest.raises(ModelError, match=r"q_norm\.weight has shape \[1\]"):
        load(tmp_path, spec)


@pytest.mark.parametrize("quantize", [None, "int8", "int4", "w4a8"])
def test_neighbours_that_rotate_together_are_taken_apart(tmp_path: Path, quantize: str | None) -> None:
    """Products of queries and keys stay; half of each head turns, in pairs of features 0 and 1, 2 and 3."""
    fields = {"architectures": ["GlmForCausalLM"], "head_dim": 8, "hidden_size": 64, "attention_bias": True}
    spec = parse_config(LLAMA | fields)
    tensors = checkpoint(spec)
    save_file(tensors, tmp_path / "model.safetensors")
    layer = load_weights(tmp_path, spec, torch.float32, "cpu", quantize).layers[0]
    order = torch.tensor([0, 2, 1, 3, 4, 5, 6, 7])
    step = 0.0 if quantize is None else 0.05 if quantize == "int8" else 0.5
    for name, begin, heads, order_ in (
        ("q", 0, 4, order),
        ("k", 32, 2, order),
        ("v", 48, 2, torch.arange(8)),
    ):
        for kind, loaded in (("weight", dequantized(layer.qkv)), ("bias", layer.qkv_bias)):
            assert loaded is not None
            stored = tensors[f"model.layers.0.self_attn.{name}_proj.{kind}"]
            wanted = stored.view(heads, 8, -1)[:, order_].reshape(stored.shape)
            tolerance = step if kind == "weight" else 0.0
            torch.testing.assert_close(loaded[begin : begin + heads * 8], wanted, rtol=0, atol=tolerance)


def test_a_quantized_weight_is_reordered() -> None:
    weight = torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
    order = torch.tensor([3, 1, 5, 0, 2, 4])
    for scheme in (SCHEMES["int4"], SCHEMES["w4a8"], SCHEMES["int8"]):
        quantized = round_to_nearest(weight, scheme)
        assert torch.equal(quantized.reordered(order).dequantized(), quantized.dequantized()[order])
    fp8 = QuantizedWeight(weight.to(FP8), torch.rand(6, 1), None, None, 8, 8)
    assert torch.equal(fp8.reordered(order).dequantized(), fp8.dequantized()[order])


def test_output_multipliers_are_in_the_norms_that_follow(tmp_path: Path) -> None:
    fields = {"architectures": ["HyperCLOVAXForCausalLM"], "residual_multiplier": 0.25}
    spec = parse_config(LLAMA | fields)
    tensors = checkpoint(spec)
    save_file(tensors, tmp_path / "model.safetensors")
    layer = load(tmp_path, spec).layers[1]
    for norm, name in ((layer.post_attention_norm, "post_norm1"), (layer.post_mlp_norm, "post_norm2")):
        assert norm is not None
        assert torch.equal(norm, tensors[f"model.layers.1.{name}.weight"] * 0.25)
    assert torch.equal(layer.input_norm, tensors["model.layers.1.input_layernorm.weight"])  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt"])
def test_pickles_are_refused_with_the_reason(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\x80\x04.")
    with pytest.raises(ModelError, match=f"only as pickles \\({name}\\), which can run code when opened"):
        load(tmp_path)


def test_no_weights_and_broken_weights(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no \*\.safetensors"):
        load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not at all")
    with pytest.raises(ModelError, match="cannot be read as safetensors"):
        load(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ModelError, match="is not an index of safetensors"):
        load(tmp_path)


def test_dummy_weights_are_the_same_for_the_same_seed() -> None:
    one, same, other = (dummy_weights(SPEC, torch.float32, "cpu", seed) for seed in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(one.tensors(), same.tensors(), strict=True))
    assert not torch.equal(one.embedding, other.embedding)
    assert (one.norm == 1).all()


def test_parameters_are_counted_as_allocated() -> None:
    for spec in (SPEC, replace(SPEC, tied_embeddings=True, norms=Norms("a", "b", "c", "d"))):
        weights = dummy_weights(spec, torch.float32, "cpu")
        assert sum(tensor.numel() for tensor in weights.tensors()) == spec.num_parameters


def dequantized(weight: Tensor | QuantizedWeight) -> Tensor:
    return weight.dequantized() if isinstance(weight, QuantizedWeight) else weight


@pytest.mark.parametrize(("name", "bits", "steps"), [("int8", 8, 254), ("int4", 4, 15), ("w4a8", 4, 15)])
def test_plain_weights_are_quantized_as_they_are_read(
    tmp_path: Path, name: str, bits: int, steps: int
) -> None:
    save_file(checkpoint(), tmp_path / "model.safetensors")
    plain, quantized = load(tmp_path), load_weights(tmp_path, SPEC, torch.float32, "cpu", name)
    assert torch.equal(quantized.embedding, plain.embedding)
    for before, after in zip(plain.layers, quantized.layers, strict=True):
        for field in ("qkv", "output", "gate_up", "down"):
            weight, exact = getattr(after, field), getattr(before, field)
            assert weight.bits == bits
            step = (exact.amax(1) - exact.amin(1)).max() / steps * (2 if name == "int8" else 1)
            assert (weight.dequantized() - exact).abs().max() <= step
    assert quantized.head.bits == 8
    assert (
        quantized.quantization
        == {"int8": "9 W8A8", "int4": "8 W4A16, 1 W8A8", "w4a8": "8 W4A8, 1 W8A8"}[name]
    )


def test_a_tied_head_is_quantized_beside_the_embedding(tmp_path: Path) -> None:
    tied, tensors = replace(SPEC, tied_embeddings=True), checkpoint()
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    weights = load_weights(tmp_path, tied, torch.bfloat16, "cpu", "int8")
    assert weights.embedding.dtype == torch.bfloat16
    assert isinstance(weights.head, QuantizedWeight)
    assert (weights.head.dequantized() - weights.embedding.float()).abs().max() < 0.03
    assert weights.nbytes == sum(tensor.nbytes for tensor in weights.tensors())
    assert weights.nbytes < 0.75 * load(tmp_path, tied, torch.bfloat16).nbytes


def test_other_bits_have_another_fingerprint(tmp_path: Path) -> None:
    save_file(checkpoint(), tmp_path / "model.safetensors")
    kinds = [
        load_weights(tmp_path, SPEC, torch.float32, "cpu", name) for name in (None, "int8", "int4", "w4a8")
    ]
    assert len({weights.fingerprint() for weights in kinds}) == 4
    again = load_weights(tmp_path, SPEC, torch.float32, "cpu", "int4")
    assert again.fingerprint() == kinds[2].fingerprint()
    layer = again.layers[0]
    again.layers[0] = replace(layer, down=replace(layer.down, activation_bits=8))
    again.__post_init__()
    assert again.fingerprint() != kinds[2].fingerprint()


def test_dummy_weights_are_quantized_too() -> None:
    plain, quantized = (dummy_weights(SPEC, torch.float32, "cpu", 3, name) for name in (None, "int8"))
    for before, after in zip(plain.layers, quantized.layers, strict=True):
        assert (dequantized(after.down) - dequantized(before.down)).abs().max() < 0.001
    assert quantized.nbytes < 0.5 * plain.nbytes


def test_no_more_than_one_linear_waits_to_be_quantized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_file(checkpoint(), tmp_path / "model.safetensors")
    read, alive, most = Checkpoint.read, [], []

    def watched(self: Checkpoint, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        tensor = read(self, name, shape)
        alive.append(weakref.ref(tensor))
        most.append(sum(reference() is not None for reference in alive))
        return tensor

    monkeypatch.setattr(Checkpoint, "read", watched)
    load_weights(tmp_path, SPEC, torch.bfloat16, "cpu", "int4")
    assert len(alive) == len(checkpoint())
    assert max(most) <= 4  # queries, keys and values, which become one; and what was read just before


@pytest.mark.parametrize("tied", [True, False])
def test_no_table_is_in_memory_twice_beside_layers(monkeypatch: pytest.MonkeyPatch, tied: bool) -> None:
    draw, tables, seen = RandomSource.tensor, [], []

    def watched(self: RandomSource, name: str, shape: tuple[int, ...]) -> Tensor:
        tensor = draw(self, name, shape)
        if name.startswith(("model.embed_tokens", "lm_head")):
            tables.append(weakref.ref(tensor))
        else:
            seen.append([reference() is not None for reference in tables])
        return tensor

    monkeypatch.setattr(RandomSource, "tensor", watched)
    dummy_weights(replace(SPEC, tied_embeddings=tied), torch.bfloat16, "cpu")
    assert len(tables) == (1 if tied else 2)
    assert seen
    assert not any(map(any, seen))
