"""Quantized checkpoints that we write: read back, by us and by transformers, they are the model that was meant."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from headrace.compute import quantizing
from headrace.compute.checkpoint import ModelError
from headrace.compute.model.families import parse_config
from headrace.compute.model.hub import read_config
from headrace.compute.model.weights import load_weights
from headrace.compute.quantization.scheme import SCHEMES, Scheme
from headrace.compute.quantizing import (
    Calibration,
    Method,
    Reader,
    input_moments,
    split_windows,
    write_quantized,
)
from tests.oracle.families import CASES, VOCAB
from tests.oracle.harness import DEVICE, Rig, Sequence
from tests.oracle.test_quantized import FORMATS, write

TOKENS = torch.randint(1, VOCAB, (360,), generator=torch.Generator().manual_seed(5)).tolist()
EIGHT = Scheme(8, 16, symmetric=False, activation_bits=16)
"""Fine enough that a mistake in scaling or packing cannot hide behind the rounding."""


def quantized(source: Path, target: Path, scheme: Scheme, method: Method) -> None:
    config = read_config(source)
    spec = parse_config(config)
    calibrated = Calibration(
        spec, lambda: load_weights(source, spec, torch.float32, DEVICE), split_windows(TOKENS, 60)
    )
    write_quantized(source, target, config, spec, scheme, method, calibrated)


def logits(folder: Path) -> torch.Tensor:
    return Rig(folder, max_model_len=64).logits(Sequence(TOKENS[:40]), [40])


@pytest.mark.parametrize("method", ["rtn", "gptq", "awq"])
@pytest.mark.parametrize("family", ["llama", "llama-all-heads-biases", "qwen3", "phi3", "gemma2", "mistral"])
def test_a_fine_grid_changes_next_to_nothing(tmp_path: Path, family: str, method: Method) -> None:
    CASES[family].build(tmp_path / "plain")
    quantized(tmp_path / "plain", tmp_path / "few", EIGHT, method)
    plain, few = logits(tmp_path / "plain"), logits(tmp_path / "few")
    assert (few - plain).square().mean().sqrt() < 0.03 * plain.std()


def test_transformers_reads_what_is_written(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    CASES["llama"].build(tmp_path / "plain")
    quantized(tmp_path / "plain", tmp_path / "few", SCHEMES["int8"], "gptq")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "few", dtype=torch.float32)
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS[:40]])).logits[0]
    difference = (logits(tmp_path / "few") - expected).square().mean().sqrt()
    # 127 is the largest activation here and 127.5 there: some fall to the neighbouring integer.
    assert difference < 0.05 * expected.std()


@pytest.mark.parametrize("scheme_name", ["int4", "w4a8"])
def test_the_format_s_own_library_finds_the_same_weights(tmp_path: Path, scheme_name: str) -> None:
    """Module by module: as of 0.20 it expects other shapes of zeros when transformers loads a whole model."""
    compressors = pytest.importorskip("compressed_tensors.compressors")
    schemes = pytest.importorskip("compressed_tensors.quantization")
    CASES["llama"].build(tmp_path / "plain")
    quantized(tmp_path / "plain", tmp_path / "few", SCHEMES[scheme_name], "gptq")
    config = read_config(tmp_path / "few")
    spec = parse_config(config)
    (file,) = (tmp_path / "few").glob("*.safetensors")
    tensors = load_file(file)
    layer = load_weights(tmp_path / "few", spec, torch.float32, "cpu").layers[1]
    for group in config["quantization_config"]["config_groups"].values():
        size = group["weights"]["group_size"]
        name, ours = {32: ("self_attn.o_proj", layer.output), 48: ("mlp.down_proj", layer.down)}[size]
        prefix = f"model.layers.1.{name}."
        stored = {key.removeprefix(prefix): t for key, t in tensors.items() if key.startswith(prefix)}
        scheme = schemes.QuantizationScheme(**group)
        assert compressors.PackedQuantizationCompressor.can_compress(torch.nn.Linear, scheme)
        assert (scheme.input_activations is not None) == (scheme_name == "w4a8")
        assert layer.down.activation_bits == (8 if scheme_name == "w4a8" else 16)
        theirs = compressors.PackedQuantizationCompressor.decompress(stored, scheme)["weight"]
        torch.testing.assert_close(theirs, ours.dequantized())


def test_the_head_stays_and_the_rest_takes_little(tmp_path: Path) -> None:
    CASES["llama"].build(tmp_path / "plain")
    quantized(tmp_path / "plain", tmp_path / "few", SCHEMES["int4"], "rtn")
    (file,) = (tmp_path / "few").glob("*.safetensors")
    tensors, plain = load_file(file), load_file(tmp_path / "plain" / "model.safetensors")
    assert torch.equal(tensors["lm_head.weight"], plain["lm_head.weight"])
    assert torch.equal(tensors["model.norm.weight"], plain["model.norm.weight"])
    assert tensors["model.layers.0.mlp.up_proj.weight_packed"].nbytes == 48 * 32 // 2
    config = json.loads((tmp_path / "few" / "config.json").read_text())["quantization_config"]
    assert (config["format"], config["ignore"]) == ("pack-quantized", ["lm_head"])
    sizes = {group["weights"]["group_size"]: group["targets"] for group in config["config_groups"].values()}
    assert sizes.keys() == {32, 48}
    assert sizes[48] == [r"re:.*\.down_proj$"]


def test_large_models_are_written_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    CASES["llama"].build(tmp_path / "plain")
    quantized(tmp_path / "plain", tmp_path / "one", SCHEMES["int8"], "rtn")
    monkeypatch.setattr(quantizing, "_SHARD_BYTES", 4096)
    quantized(tmp_path / "plain", tmp_path / "few", SCHEMES["int8"], "rtn")
    assert len(list((tmp_path / "few").glob("*.safetensors"))) > 2
    assert torch.equal(logits(tmp_path / "few"), logits(tmp_path / "one"))


def test_few_bits_are_not_quantized_again(tmp_path: Path) -> None:
    write(tmp_path / "few", *FORMATS["awq"])
    with pytest.raises(ModelError, match="only text models with plain weights"):
        quantized(tmp_path / "few", tmp_path / "fewer", SCHEMES["int4"], "rtn")


def test_moments_are_those_of_the_inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against transformers, whose linears are asked what goes into them."""
    model = CASES["llama"].build(tmp_path)
    spec = parse_config(read_config(tmp_path))
    windows = [TOKENS[:20], TOKENS[20:35]]
    seen: list[torch.Tensor] = []
    model.model.layers[1].mlp.down_proj.register_forward_pre_hook(lambda _, x: seen.append(x[0][0]))
    with torch.no_grad():
        for window in windows:
            model(torch.tensor([window]))
    expected = sum(x.T @ x for x in seen)

    def load() -> object:
        return load_weights(tmp_path, spec, torch.float32, DEVICE)

    found = input_moments(spec, load(), windows, [1])  # type: ignore[arg-type]
    assert {layer for layer, _ in found} == {1}
    torch.testing.assert_close(found[1, "down"], expected, rtol=1e-3, atol=1e-3)
    for most in (1, 1 << 30):  # one layer at a time, or all at once
        monkeypatch.setattr(quantizing, "_MOMENTS_BYTES", most)
        source = Calibration(spec, load, windows)  # type: ignore[arg-type]
        for layer in range(spec.num_layers):
            moments = source.of(layer)
        torch.testing.assert_close(moments["qkv"], input_moments(spec, load(), windows, [2])[2, "qkv"])  # type: ignore[arg-type]


def test_a_reader_gives_the_logits_of_the_last_tokens(tmp_path: Path) -> None:
    CASES["llama"].build(tmp_path)
    spec = parse_config(read_config(tmp_path))
    rig = Rig(tmp_path, max_model_len=64)
    reader = Reader(spec, load_weights(tmp_path, spec, torch.float32, DEVICE), rig.decoder.kernels, 40)
    expected = logits(tmp_path)
    torch.testing.assert_close(reader.logits(TOKENS[:40], 40), expected)
    torch.testing.assert_close(reader.logits(TOKENS[:40], 1), expected[-1:])
    torch.testing.assert_close(reader.logits(TOKENS[:1], 1), expected[:1])
