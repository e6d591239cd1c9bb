"""Checkpoints of every format, loaded as models of transformers with the weights written out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.compute.adopted.agreement import first_step
from headrace.compute.adopted.loading import load_adopted, read_adoptable
from headrace.compute.checkpoint import ModelError
from headrace.compute.kernels import select
from headrace.compute.quantization.scheme import SCHEMES
from tests.compute.adopted.models import tiny
from tests.oracle.stored_formats import FORMATS
from tests.oracle.test_quantized import store_again

CPU = torch.device("cpu")
KERNELS = select("auto", CPU)


def _write(folder: Path, kind: str, name: str) -> Any:
    """A checkpoint whose linears in layers are stored so; the model with the weights that they are."""
    config, written = FORMATS[name]
    model = tiny(kind, tie_word_embeddings=False)
    model.save_pretrained(folder)
    store_again(folder, model, config, written)
    return model


@pytest.mark.parametrize("name", FORMATS)
def test_a_checkpoint_of_this_format_gives_the_logits_of_its_weights(tmp_path: Path, name: str) -> None:
    _compare(tmp_path, _write(tmp_path, "olmo2", name))


@pytest.mark.parametrize("kind", ["llama", "starcoder2", "granite", "qwen2"])
def test_models_of_several_types(tmp_path: Path, kind: str) -> None:
    _compare(tmp_path, _write(tmp_path, kind, "packed"))


def _compare(folder: Path, model: Any) -> None:
    found = read_adoptable(folder)
    decoder = load_adopted(found, KERNELS, torch.float32, CPU, 128).decoder
    rows = [torch.arange(3, 43)]
    batch, kv = first_step(rows[:1], decoder, 40)
    got = decoder.logits(decoder.hidden(batch, kv))
    with torch.inference_mode():
        expected = model(input_ids=rows[0][None], use_cache=False).logits[0]
    assert float((got - expected).abs().max() / expected.std()) < 1e-3


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    _write(tmp_path, "olmo2", "gptq")
    found = read_adoptable(tmp_path)
    with pytest.raises(ModelError, match="--quantization: the checkpoint is already quantized"):
        load_adopted(found, KERNELS, torch.float32, CPU, 128, scheme=SCHEMES["int8"])
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.scales"
    save_file({key: each for key, each in tensors.items() if key != name}, tmp_path / "model.safetensors")
    with pytest.raises(
        ModelError, match=r"is stored as gptq, and lacks model\.layers\.1\.mlp\.up_proj\.scales"
    ):
        load_adopted(found, KERNELS, torch.float32, CPU, 128)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="quant_method 'bitsandbytes' is not supported"):
        read_adoptable(tmp_path)
