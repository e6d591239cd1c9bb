"""The composition root, as far as the room tests and the real servers of `tests/server` do not show it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from headrace import LLM
from headrace.compute.model.families import parse_config
from headrace.compute.model.hub import resolve_folder
from headrace.compute.model.layout import plain_shapes
from headrace.compute.model.weights import dummy_weights, kv_fingerprint, read_spec
from headrace.config import ConfigError, options
from headrace.wiring import model
from headrace.wiring.caches import engine_identity
from headrace.wiring.model import answer, groups
from tests.compute.model.configs import LLAMA
from tests.oracle.stored_formats import FORMATS, Written, in_fp8, rewrite


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"intermediate_size": 10**9}, "the weights need at least"),
        ({"max_position_embeddings": 10**10}, "--max-model-len 10000000000: its rotary tables"),
    ],
)
def test_what_cannot_fit_is_refused_before_it_is_loaded(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    builtin = resolve_folder("builtin")
    (tmp_path / "tokenizer.json").write_bytes((builtin / "tokenizer.json").read_bytes())
    (tmp_path / "config.json").write_text(
        json.dumps(json.loads((builtin / "config.json").read_text()) | fields)
    )
    with pytest.raises(ConfigError, match=message):
        model.load(options({"model": str(tmp_path), "load_format": "dummy"}))


def test_warm_up_does_not_wait_for_a_static_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = model.load(
        options(
            {
                "scheduling_policy": "static",
                "static_batch_timeout": 3600.0,
                "max_model_len": 256,
                "max_num_seqs": 4,
                "kv_cache_memory_bytes": 16 << 20,
            }
        )
    )
    ticks = iter(range(1000))
    clock = SimpleNamespace(monotonic=lambda: float(next(ticks)), perf_counter=lambda: 0.0)
    monkeypatch.setattr(model, "time", clock)
    model.warm_up(loaded)
    assert loaded.engine.wake_at(0.0) is None
    loaded.engine.check_consistency()


@pytest.mark.parametrize(("name", "least", "most"), [("int8", 0.55, 0.7), ("int4", 0.45, 0.55)])
def test_quantization_is_counted_reported_and_part_of_cache_keys(
    name: str, least: float, most: float
) -> None:
    small = {"max_model_len": 256, "kv_cache_memory_bytes": 16 << 20, "dtype": "bfloat16"}
    plain, quantized = (
        model.load(options(small | chosen)) for chosen in ({}, {"quantization": name, "seed": 0})
    )
    # The embedding, 2 of the 8.5 MiB, stays as it is; the head beside it is made of it either way. Kernels may store
    # the others in less than their 16 bits.
    shape = plain.shape
    plain_bytes = 2 * (shape.num_parameters + shape.vocab_size * shape.hidden_size)
    assert plain.ledger.weight_bytes < 1.3 * plain_bytes
    assert least < quantized.ledger.weight_bytes / plain_bytes < most
    assert any("W8A8" in line for line in model.describe(quantized))
    assert not any("linears" in line for line in model.describe(plain))
    assert engine_identity(plain, False) != engine_identity(quantized, False)
    model.warm_up(quantized)
    for each in (plain, quantized):
        model.close(each)


def write(folder: Path, config: dict[str, Any], written: Written) -> None:
    """A tiny checkpoint whose linears are stored so."""
    large = LLAMA | {"vocab_size": 2048, "torch_dtype": "float32"}
    spec = parse_config(large)
    torch.manual_seed(0)
    tensors = {name: torch.randn(shape) * 0.1 for name, shape in plain_shapes(spec).items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(large))
    linears = [name.removesuffix(".weight") for name in tensors if name.endswith("_proj.weight")]
    rewrite(folder, config, written, linears)


def test_storage_only_quantization_is_reported(tmp_path: Path) -> None:
    fp8 = {"quant_method": "fp8", "weight_block_size": [20, 20]}
    write(tmp_path, fp8, in_fp8("weight_scale_inv", 20, 20))
    builtin = resolve_folder("builtin")
    asked = {"model": str(tmp_path), "tokenizer": str(builtin), "kv_cache_memory_bytes": 16 << 20}
    loaded = model.load(options(asked))
    assert "fp8: weights are stored in fewer bits than are used for computing" in loaded.notes
    assert not loaded.quantization
    again = model.load(options(asked | {"quantization": "int8"}))
    assert again.quantization
    for each in (loaded, again):
        model.close(each)


def test_few_bits_are_not_made_fewer(tmp_path: Path) -> None:
    write(tmp_path, *FORMATS["awq"])
    asked = {"model": str(tmp_path), "tokenizer": str(resolve_folder("builtin")), "quantization": "int8"}
    with pytest.raises(ConfigError, match="--quantization: the checkpoint is already quantized"):
        model.load(options(asked))


def test_keys_of_other_rotations_are_not_taken_over() -> None:
    builtin = model.load(options({"max_model_len": 256, "kv_cache_memory_bytes": 16 << 20}))
    spec = read_spec(builtin.folder)
    model.close(builtin)
    weights = dummy_weights(spec, torch.float32, "cpu")

    def reported(max_model_len: int = 256, **rope: Any) -> str:
        ropes = tuple(replace(each, **rope) for each in spec.ropes)
        return kv_fingerprint(weights, replace(spec, ropes=ropes), max_model_len)

    same = {reported(), reported(max_model_len=512)}
    assert len(same) == 1
    others = [reported(theta=5e5), reported(kind="linear", factor=2.0)]
    stretched = [reported(length, kind="dynamic", factor=2.0) for length in (256, 512)]
    assert len({*same, *others, *stretched}) == 5


def test_a_context_may_be_as_long_as_stretched_rotations_reach(tmp_path: Path) -> None:
    builtin = resolve_folder("builtin")
    for path in builtin.iterdir():
        if path.name != "config.json":
            (tmp_path / path.name).symlink_to(path)
    config = json.loads((builtin / "config.json").read_text())
    trained = config["max_position_embeddings"]
    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": trained}
    (tmp_path / "config.json").write_text(json.dumps(config | {"rope_scaling": yarn}))
    given = {"model": str(tmp_path), "kv_cache_memory_bytes": 64 << 20, "max_num_seqs": 1}
    with pytest.raises(ConfigError, match=f"supports positions up to {2 * trained}"):
        model.load(options(given | {"max_model_len": 2 * trained + 1}))
    loaded = model.load(options(given | {"max_model_len": trained + 512}))
    assert loaded.ledger.max_model_len == trained + 512
    model.close(loaded)


def test_the_name_in_the_api_is_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "secret-place" / "qwen"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)

    def name(**given: str) -> str:
        (only,) = model.served_names(options(given).model)
        return only

    assert name(model=str(folder)) == name(model=".") == name(model="../qwen/") == "qwen"
    assert name(model="Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    assert name(model="builtin") == "builtin"
    assert name(model=str(folder), served_model_name="/my/choice") == "/my/choice"


@pytest.mark.parametrize("names", [("a", ""), ("a", " "), ("a", "b", "a")])
def test_names_that_are_empty_or_equal_are_refused(names: tuple[str, ...]) -> None:
    assert model.served_names(options({"served_model_name": ("a", "b")}).model) == ("a", "b")
    with pytest.raises(ConfigError, match=r"--served-model-name a .*different and not empty"):
        model.served_names(options({"served_model_name": names}).model)


def test_a_mixture_has_fewer_parameters_for_a_token() -> None:
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "moe_intermediate_size": 32,
        "num_experts": 16,
        "num_experts_per_tok": 2,
    }
    counts = model.parameter_counts(parse_config(config).shape)
    assert counts["num_parameters"] - counts["active_parameters"] == 2 * 14 * 3 * 64 * 32


def test_one_request_is_enough_where_nothing_is_compiled() -> None:
    assert [len(group) for group in groups(False, 1000)] == [1]


@pytest.mark.parametrize(("longest", "kinds"), [(4096, 7), (32, 6)])
def test_requests_fit_the_context(longest: int, kinds: int) -> None:
    made = groups(True, longest)
    assert len(made) == kinds
    assert max(len(request.tokens) for group in made for request in group) == min(1100, longest - 2)
    names = [request.id for group in made for request in group]
    assert len(set(names)) == len(names)


def test_all_of_them_are_answered_and_leave_no_block() -> None:
    llm = LLM("builtin", device="cpu", max_model_len=128, max_num_seqs=8, kv_cache_memory_bytes=4 << 20)
    engine = llm.loaded.engine
    answer(engine, groups(True, 128))
    engine.check_consistency()
    assert engine.wake_at(0.0) is None
