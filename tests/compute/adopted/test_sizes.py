"""Counts of a config that would fill the machine with modules."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.compute.adopted.loading import read_adoptable
from headrace.compute.adopted.sizes import MAX_COUNT, check_counts
from headrace.compute.checkpoint import ModelError


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
