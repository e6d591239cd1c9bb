"""Weights of GGUF files: the same as those of the checkpoint that holds them in float32, for every architecture."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from headrace.compute.checkpoint import ModelError
from headrace.compute.kernels import select
from headrace.compute.model.gguf import source
from headrace.compute.model.gguf.config import ARCHITECTURES
from headrace.compute.model.gguf.file import TYPES, GgufFile
from headrace.compute.model.gguf.source import SUPPORTED, read
from headrace.compute.model.sharding import Place, shard_of
from headrace.compute.model.weights import (
    DecoderWeights,
    LayerWeights,
    kv_fingerprint,
    load_weights,
    read_spec,
)
from headrace.compute.quantization.weight import QuantizedWeight
from headrace.compute.quantizing import Reader
from tests.compute.model.gguf.files import Entry, write
from tests.compute.model.gguf.models import (
    EXPERTS,
    FAMILIES,
    FLOATS,
    NARROW,
    SHARED,
    kind_of,
    random_blocks,
    write_pair,
)

K_M = {
    "attn_q": "Q4_K",
    "attn_k": "Q4_K",
    "attn_v": "Q6_K",
    "attn_output": "Q4_K",
    "ffn_gate": "Q4_K",
    "ffn_up": "Q4_K",
    "ffn_down": "Q6_K",
    "output": "Q6_K",
}
"""The mixture of llama.cpp's Q4_K_M."""

MIXTURES = {
    "K_M": K_M,
    "Q5_K_M": {name: kind.replace("4", "5") for name, kind in K_M.items()},
    "small": K_M
    | {"attn_q": "Q5_0", "attn_k": "Q5_0", "attn_v": "Q8_0", "ffn_gate": "Q5_1", "ffn_up": "Q4_1"},
    "Q8_0": dict.fromkeys(K_M, "Q8_0"),
    "Q4_0": dict.fromkeys(K_M, "Q4_0") | {"ffn_gate": "Q3_K", "ffn_down": "Q2_K"},
}


def dense(weights: DecoderWeights) -> dict[str, torch.Tensor]:
    found = {"embedding": weights.embedding, "norm": weights.norm, "head": weights.head}
    for index, layer in enumerate(weights.layers):
        found |= {f"{index}.{each.name}": getattr(layer, each.name) for each in fields(LayerWeights)}
        for number, pair in enumerate(found.pop(f"{index}.experts") or ()):
            found |= {f"{index}.{number}.gate_up": pair[0], f"{index}.{number}.down": pair[1]}
    return {
        name: weight.dequantized() if isinstance(weight, QuantizedWeight) else weight
        for name, weight in found.items()
        if weight is not None
    }


def load(path: Path, dtype: torch.dtype = torch.float32) -> DecoderWeights:
    return load_weights(path, read_spec(path), dtype, "cpu")


def test_each_architecture_is_tested() -> None:
    assert {family.get("architecture", name) for name, family in FAMILIES.items()} == ARCHITECTURES.keys()


@pytest.mark.parametrize("architecture", FAMILIES)
def test_weights_are_those_of_the_checkpoint(architecture: str, tmp_path: Path) -> None:
    stored, checkpoint = write_pair(tmp_path, architecture, K_M)
    read, expected = dense(load(stored)), dense(load(checkpoint))
    assert read.keys() == expected.keys()
    for name, weight in read.items():
        if "norm" in name and architecture.startswith("gemma"):  # 1 was taken off and added again
            torch.testing.assert_close(weight, expected[name])
        else:
            assert torch.equal(weight, expected[name]), name


@pytest.mark.parametrize("mixture", MIXTURES)
def test_mixtures_of_types_stay_quantized_and_exact(mixture: str, tmp_path: Path) -> None:
    stored, checkpoint = write_pair(tmp_path, "llama", MIXTURES[mixture])
    weights = load(stored)
    for layer in weights.layers:
        for each in (layer.qkv, layer.output, layer.gate_up, layer.down):
            assert isinstance(each, QuantizedWeight)
    assert isinstance(weights.head, QuantizedWeight)
    read, expected = dense(weights), dense(load(checkpoint))
    assert all(torch.equal(weight, expected[name]) for name, weight in read.items())


@pytest.mark.parametrize("architecture", FAMILIES)
@pytest.mark.parametrize("kernels", ["torch", "cpp"])
def test_logits_are_those_of_the_checkpoint(architecture: str, kernels: str, tmp_path: Path) -> None:
    tokens = [int(token) for token in np.random.default_rng(0).integers(0, 48, 40)]
    logits = []
    for path in write_pair(tmp_path, architecture, K_M):
        chosen = select(kernels, torch.device("cpu"))
        logits.append(Reader(read_spec(path), load(path), chosen, 48).logits(tokens, 40))
    torch.testing.assert_close(*logits, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("mixture", MIXTURES)
def test_experts_stay_quantized_and_exact(mixture: str, tmp_path: Path) -> None:
    stored, checkpoint = write_pair(tmp_path, "qwen2moe", MIXTURES[mixture])
    weights = load(stored)
    experts = [expert for layer in weights.layers for expert in layer.experts or ()]
    assert len(experts) == 2 * (EXPERTS + 1)
    assert all(isinstance(each, QuantizedWeight) for one in experts for each in (one.gate_up, one.down))
    read, expected = dense(weights), dense(load(checkpoint))
    assert all(torch.equal(weight, expected[name]) for name, weight in read.items())


def test_widths_of_experts_are_those_of_the_tensors_in_older_files(tmp_path: Path) -> None:
    file = GgufFile.open(write_pair(tmp_path, "qwen2moe", K_M)[0])
    metadata = {key: value for key, value in file.metadata.items() if not key.endswith("feed_forward_length")}
    metadata["qwen2moe.feed_forward_length"] = 512
    entries = [
        Entry(t.name, t.shape, GGMLQuantizationType[t.type.name], file.data(t).tobytes())
        for t in file.tensors.values()
    ]
    experts = read_spec(write(tmp_path / "older.gguf", metadata, entries)).experts
    assert experts is not None
    assert (experts.width, experts.shared_width) == (NARROW, SHARED)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_plain_types(kind: str, tmp_path: Path) -> None:
    stored, checkpoint = write_pair(tmp_path, "llama", dict.fromkeys(K_M, kind), kind)
    assert read_spec(stored).stored is None
    read, expected = dense(load(stored)), dense(load(checkpoint))
    assert all(torch.equal(weight, expected[name]) for name, weight in read.items())


def test_a_tied_head_is_the_table_as_it_is_stored(tmp_path: Path) -> None:
    stored, _ = write_pair(tmp_path, "gemma3", K_M, "Q6_K")
    weights = load(stored, torch.bfloat16)
    assert isinstance(weights.head, QuantizedWeight)
    assert weights.embedding.dtype == torch.bfloat16
    assert torch.equal(weights.head.dequantized().bfloat16(), weights.embedding)
    assert weights.quantization == (
        "2 W8A16 in groups of 16 with minima, 4 W4A16 in groups of 32 with minima, 3 W8A16 in groups of 16"
    )


def test_a_layer_that_is_not_quantized_in_all_parts_is_expanded_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stored, checkpoint = write_pair(tmp_path, "llama", K_M | {"attn_v": "F16"})
    weights = load(stored)
    assert weights.quantization.startswith("2 float32, ")
    (said,) = caplog.messages
    assert "layers.0.self_attn.q_proj: is computed as one with weights of another kind" in said
    assert torch.equal(dense(weights)["1.qkv"], dense(load(checkpoint))["1.qkv"])


def test_a_tensor_parallel_part_is_that_of_the_whole(tmp_path: Path) -> None:
    stored, checkpoint = write_pair(tmp_path, "gemma3", K_M)
    for rank in range(2):
        place = Place(rank, 2, 1)
        parts = [
            dense(load_weights(path, shard_of(read_spec(path), place), torch.float32, "cpu"))
            for path in (stored, checkpoint)
        ]
        for name, weight in parts[0].items():
            torch.testing.assert_close(weight, parts[1][name])


def test_quantization_on_top_is_refused(tmp_path: Path) -> None:
    stored, _ = write_pair(tmp_path, "llama", K_M)
    with pytest.raises(
        ModelError, match=r"int8: .*model\.gguf is already quantized \(GGUF Q4_K, Q6_K, Q8_0\)"
    ):
        load_weights(stored, read_spec(stored), torch.float32, "cpu", "int8")


def test_other_weights_have_another_fingerprint(tmp_path: Path) -> None:
    prints: set[str] = set()
    for name in ("K_M", "Q8_0"):
        (tmp_path / name).mkdir()
        stored, _ = write_pair(tmp_path / name, "llama", MIXTURES[name])
        prints.update(kv_fingerprint(load(stored), read_spec(stored), 128) for _ in range(2))
    assert len(prints) == 2


def _changed(tmp_path: Path, *, without: str = "", extra: Entry | None = None) -> Path:
    """A file without a tensor, or with one more or another one."""
    file = GgufFile.open(write_pair(tmp_path, "llama", K_M)[0])
    entries = [
        Entry(t.name, t.shape, GGMLQuantizationType[t.type.name], file.data(t).tobytes())
        for t in file.tensors.values()
        if t.name != without and (extra is None or t.name != extra.name)
    ]
    return write(tmp_path / "changed.gguf", file.metadata, entries + ([extra] if extra else []))


def _plain(name: str, *shape: int) -> Entry:
    return Entry(name, shape, GGMLQuantizationType.F32, b"\0" * int(np.prod(shape)) * 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"without": "blk.1.ffn_up.weight"}, r"lacks blk\.1\.ffn_up\.weight"),
        ({"without": "output_norm.weight"}, r"lacks output_norm\.weight"),
        (
            {"extra": _plain("blk.0.ffn_gate_exps.weight", 4, 512, 256)},
            r"does not use: blk\.0\.ffn_gate_exps",
        ),
        ({"extra": _plain("blk.0.ssm_a", 4)}, r"that LlamaForCausalLM does not use: blk\.0\.ssm_a"),
        ({"extra": _plain("blk.2.attn_norm.weight", 256)}, r"does not use: blk\.2\.attn_norm\.weight"),
        ({"extra": _plain("blk.0.ffn_down.weight", 256, 64)}, r"ffn_down\.weight has shape \[256, 64\]"),
        (
            {
                "extra": Entry(
                    "blk.0.ffn_down.weight", (256, 512), GGMLQuantizationType.IQ4_XS, b"\0" * 256 * 2 * 136
                )
            },
            r"ffn_down\.weight is in IQ4_XS, which is not supported; use a file in Q4_K_M",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = _changed(tmp_path, **change)
    with pytest.raises(ModelError, match=message) as refusal:
        load(path)
    assert "\n" not in str(refusal.value)


def test_sizes_of_all_types_are_those_of_the_package() -> None:
    for number, kind in TYPES.items():
        if kind.name != "NVFP4":  # not in all versions of the package
            known = GGMLQuantizationType(number)
            assert (known.name, *GGML_QUANT_SIZES[known]) == kind


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("at_once", [1 << 24, 1024])
def test_quantized_types_are_equal_to_the_package(
    name: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "_ELEMENTS_AT_ONCE", at_once)
    kind = kind_of(name)
    data = random_blocks(kind, 7, 512)
    weight = read(kind, data)
    assert isinstance(weight, QuantizedWeight)
    expected = torch.from_numpy(quants.dequantize(data, GGMLQuantizationType[name]))
    assert torch.equal(weight.dequantized(), expected)
    assert weight.shape == (7, 512)
    assert weight.activation_bits == 16


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_plain_types_are_equal_to_the_package(name: str) -> None:
    kind = kind_of(name)
    values = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
    data = quants.quantize(values, GGMLQuantizationType[name]).view(np.uint8).reshape(3, -1)
    tensor = read(kind, data)
    assert isinstance(tensor, torch.Tensor)
    assert tensor.shape == (3, 64)
    expected = (
        quants.dequantize(data, GGMLQuantizationType[name])
        if name == "BF16"
        else data.view(tensor.numpy().dtype)
    )
    assert torch.equal(tensor.float(), torch.from_numpy(expected.astype(np.float32)))


def test_each_type_is_tested() -> None:
    assert set(FLOATS) | {"F32", "F16", "BF16"} == set(SUPPORTED)
