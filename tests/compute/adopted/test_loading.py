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

from headrace.compute.adopted.agreement import first_step
from headrace.compute.adopted.loading import MAX_COUNT, Adopted, check_counts, load_adopted, read_adoptable
from headrace.compute.checkpoint import ModelError
from headrace.compute.kernels import select
from headrace.compute.model.kv import PagedKV
from headrace.compute.quantization.scheme import SCHEMES
from tests.compute.adopted.models import tiny
from tests.oracle.stored_formats import FORMATS
from tests.oracle.test_quantized import store_again
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


@pytest.mark.parametrize(
    "config",
    [
        {"num_hidden_layers": 10**9},
        {"n_layer": MAX_COUNT + 1},
        {"text_config": {"num_layers": 10**30}},
        {"vision_config": {"depth": 10**7}, "num_hidden_layers": 2},
        {"depths": [2, 10**8]},
        {"num_local_experts": 10**6},
        {"num_hidden_layers": 4096, "num_experts": 4096},
        {"num_attention_heads": 2**40},
        {"encoder_layers": 2**31},
        {"towers": [{"n_layers": 2**31}]},
    ],
)
def test_a_count_that_no_model_has_is_refused(config: dict[str, object]) -> None:
    with pytest.raises(ModelError) as error:
        check_counts(config)
    assert len(str(error.value)) < 200


def test_sizes_that_are_no_counts_are_not_limited() -> None:
    check_counts(
        {
            "num_hidden_layers": 128,
            "num_experts": 1024,
            "hidden_size": 2**20,
            "max_position_embeddings": 2**30,
            "expert_intermediate_size": 10**6,
            "block_size": 2**20,
            "vocab_size": 10**7,
            "layer_types": ["full_attention"] * 100,
            "use_layers": True,
        }
    )


@pytest.mark.parametrize("field", ["num_hidden_layers", "num_experts"])
def test_a_config_is_refused_before_transformers_reads_it(tmp_path: Path, field: str) -> None:
    config = {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", field: 10**12}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ModelError, match=f"^{field} must be at most {MAX_COUNT}, the config has 1000000000000$"
    ):
        read_adoptable(tmp_path)


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
