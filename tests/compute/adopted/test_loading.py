"""Checkpoints that transformers' path refuses, and what depends on the weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.compute.adopted.loading import Adopted, load_adopted, read_adoptable
from headrace.compute.checkpoint import ModelError
from headrace.compute.kernels import select
from headrace.compute.model.kv import PagedKV
from headrace.compute.quantization.scheme import SCHEMES
from tests.compute.adopted.models import tiny
from tests.oracle.tiny import build

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("olmo2")
    build("olmo2", "causal").save_pretrained(folder)
    return folder


@pytest.fixture
def copied(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


def load(folder: Path, dtype: torch.dtype = torch.float32, seed: int | None = None, **given: Any) -> Adopted:
    return load_adopted(read_adoptable(folder), select("cpp", CPU), dtype, CPU, 64, seed, **given)


def config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_tensors_must_match(copied: Path) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    weights(copied, lambda tensors: tensors.update({"model.layers.0.extra": torch.ones(3)}))
    with pytest.raises(ModelError, match=r"does not use: model\.layers\.0\.extra"):
        load(copied)
    weights(copied, lambda tensors: (tensors.pop("model.layers.0.extra"), tensors.pop(name))[0])
    with pytest.raises(ModelError, match=rf"lacks {name}"):
        load(copied)
    weights(copied, lambda tensors: tensors.update({name: torch.ones(3, 5)}))
    with pytest.raises(ModelError, match="Olmo2ForCausalLM on --model-impl transformers"):
        load(copied)


def test_pickles_are_not_read(copied: Path) -> None:
    (copied / "model.safetensors").rename(copied / "pytorch_model.bin")
    with pytest.raises(ModelError, match="only as pickles"):
        load(copied)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "new", "auto_map": {"AutoConfig": "code.New"}}, "code of its own"),
        ({"model_type": "new"}, "transformers does not support this model"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quant_method 'bitsandbytes'"),
        (
            {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"},
            "encoder-decoder|generates text",
        ),
        ({"architectures": ["ViTModel"], "model_type": "vit"}, "architecture ViTModel"),
        ({"hidden_size": "wide"}, "transformers does not support|cannot be used"),
    ],
)
def test_configs_are_refused_before_weights_are_read(
    copied: Path, fields: dict[str, Any], message: str
) -> None:
    (copied / "code.py").write_text("raise SystemExit('code of a checkpoint was run')")
    (copied / "model.safetensors").unlink()
    config(copied, **fields)
    with pytest.raises(ModelError, match=message):
        read_adoptable(copied)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dummy_weights_depend_on_the_seed(saved: Path, dtype: torch.dtype) -> None:
    one, same, other = (load(saved, dtype, seed, with_digest=True) for seed in (1, 1, 2))
    assert one.digest == same.digest != other.digest
    assert one.decoder.dtype == dtype


def test_linears_are_quantized(saved: Path) -> None:
    plain, quantized = load(saved), load(saved, scheme=SCHEMES["int8"])
    assert quantized.decoder.nbytes < 0.8 * plain.decoder.nbytes


@pytest.mark.parametrize("scheme", [None, "int8"])
def test_logits_in_16_bits_are_not_rounded(saved: Path, scheme: str | None) -> None:
    decoder = load(saved, torch.bfloat16, scheme=SCHEMES[scheme] if scheme else None).decoder
    logits = decoder.logits(torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).bfloat16())
    assert logits.dtype == torch.float32
    assert not torch.equal(logits, logits.bfloat16().float())


def test_the_head_is_quantized_to_8_bits_in_every_scheme(saved: Path) -> None:
    model = load(saved, scheme=SCHEMES["int4"]).decoder._model.model
    assert model.lm_head.prepared.product.weight.bits == 8
    assert model.model.layers[0].self_attn.o_proj.prepared.product.weight.bits == 4


@pytest.mark.parametrize(("kind", "by_token"), [("jamba", True), ("lfm2", False)])
def test_mixers_that_read_their_state_for_one_token_only(kind: str, by_token: bool, tmp_path: Path) -> None:
    build(kind, "causal").save_pretrained(tmp_path)
    states = load(tmp_path).decoder.states
    assert states is not None
    assert states.token_by_token is by_token


def test_a_model_that_attends_in_chunks_is_served_within_one(tmp_path: Path) -> None:
    build("llama4_text", "causal").save_pretrained(tmp_path)
    found = read_adoptable(tmp_path)
    given = select("cpp", CPU), torch.float32, CPU
    with pytest.raises(ModelError, match="chunks of 16 tokens; it is served with --max-model-len 16 or less"):
        load_adopted(found, *given, 64)
    assert len(load_adopted(found, *given, 16).decoder.shape.layers) == 4


def test_layers_that_share_keys_and_values_keep_none(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 6, "num_kv_shared_layers": 2, "sliding_window": 7, "global_head_dim": 32}
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * 3}
    beside = {"vocab_size_per_layer_input": 120, "hidden_size_per_layer_input": 8, "head_dim": 16}
    tiny("gemma4_text", **sizes, **kinds, **beside).save_pretrained(tmp_path)
    decoder = load(tmp_path).decoder
    assert [layer.shares for layer in decoder.shape.layers] == [None, None, None, None, 2, 3]
    assert decoder.shape.kv_elements == 2 * (2 * 2 * 16 + 2 * 2 * 32)
    kv = PagedKV(decoder.shape, 3, 4, torch.float32)
    assert [tensor.shape[0] for tensor in kv.tensors] == [2, 2]
