"""Which implementation computes a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.compute.checkpoint import ModelError
from headrace.config import ModelOptions
from headrace.wiring.loading import computing
from headrace.wiring.loading.computing import AdoptedModel, NativeModel

CONFIG = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 1,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "max_position_embeddings": 64,
}


def write(folder: Path, **fields: object) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG | fields))
    return folder


def test_hybrid_models_are_native(tmp_path: Path) -> None:
    folder = write(tmp_path)
    for device in ("cpu", "cuda"):
        assert isinstance(computing.find_model(ModelOptions(device=device), folder), NativeModel)


@pytest.mark.slow  # imports the models of transformers
def test_options_that_the_native_family_does_not_compute_are_left_to_transformers(tmp_path: Path) -> None:
    folder = write(tmp_path, hidden_act="gelu")
    found = computing.find_model(ModelOptions(device="cpu"), folder)
    assert isinstance(found, AdoptedModel)
    assert "hidden_act 'gelu'" in found.why
    with pytest.raises(ModelError, match="hidden_act 'gelu'"):
        computing.find_model(ModelOptions(model_impl="native", device="cpu"), folder)
