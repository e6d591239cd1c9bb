"""One field of a config changed at a time: a family computes what transformers computes, or refuses the config.

Each run checks every third change of a family; `PART = 1` checks all of them, which takes minutes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from headrace.compute.checkpoint import ModelError
from tests.oracle.families import CASES, TRAINED, VOCAB, WINDOW
from tests.oracle.harness import Rig, Sequence

PART = 3
LENGTH = 24
KINDS = sorted({case.model_type for case in CASES.values()})
_SIZES = {"vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings"}
_INERT = {"initializer_range", "use_cache", "pretraining_tp", "attention_dropout", "residual_dropout"}
"""Fields of training and of caching, which inference does not read."""
_VARIANTS: dict[str, list[Any]] = {
    "num_key_value_heads": [1, 4],
    "head_dim": [32],
    "num_attention_heads": [2],
    "intermediate_size": [80],
    "sliding_window": [5, 1],
    "max_window_layers": [0, 3],
    "no_rope_layers": [[0, 1, 0]],
    "no_rope_layer_interval": [1],
    "layer_types": [["sliding_attention", "full_attention", "sliding_attention"]],
    "attn_logit_softcapping": [5.0],
    "final_logit_softcapping": [3.0],
    "hidden_act": ["gelu", "relu", "gelu_pytorch_tanh", "relu2"],
    "hidden_activation": ["gelu", "relu", "silu"],
    "sliding_window_pattern": [2],
}
_STRETCHED = {"factor": 4.0, "original_max_position_embeddings": TRAINED}
_ROPES: list[dict[str, Any]] = [
    {"rope_theta": 100.0},
    {"partial_rotary_factor": 0.5},
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5},
    {"rope_type": "proportional", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0, "alpha": 10.0},
    {"rope_type": "yarn", **_STRETCHED, "mscale": 0.7, "mscale_all_dim": 1.3},
    {"rope_type": "llama3", **_STRETCHED, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
]


def _base(kind: str) -> dict[str, Any]:
    case = next(case for case in CASES.values() if case.model_type == kind)
    return case.fields if "layer_types" in case.fields else case.fields | {"num_hidden_layers": 3}


def _others(field: str, value: Any) -> list[Any]:
    """Other values of a field."""
    if field == "rope_parameters":
        if "rope_type" in value:
            return [value | change for change in _ROPES]
        return [
            {key: each | _ROPES[0] for key, each in value.items()},
            {"rope_type": "linear", "factor": 2.0},
        ]
    if field in _VARIANTS:
        return _VARIANTS[field]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 3]
    if isinstance(value, float):
        return [value * 3 + 0.1]
    return [1, True] if value is None else []


def _mutations(kind: str) -> Iterator[tuple[str, dict[str, Any]]]:
    own = AutoConfig.for_model(kind, **_base(kind))
    inherited = PreTrainedConfig().to_dict().keys() | _SIZES | _INERT
    for field, value in own.to_dict().items():
        if field in inherited - {"tie_word_embeddings"} or field.endswith("_token_id"):
            continue
        for other in _others(field, value):
            yield f"{field}={other}", {field: other}
    yield "window", {"sliding_window": WINDOW, "use_sliding_window": True}


def _of_transformers(kind: str, changed: dict[str, Any], folder: Path) -> Tensor | None:
    """Logits of a model that is saved to ``folder``; None if transformers cannot build or run it."""
    tokens = torch.arange(1, LENGTH + 1)
    try:
        config = AutoConfig.for_model(kind, **(_base(kind) | changed))
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.15)
        with torch.inference_mode():
            logits: Tensor = model.eval()(tokens[None]).logits[0]
        model.save_pretrained(folder)
    except Exception:
        return None
    return logits


@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_field_is_computed_or_refused(kind: str, tmp_path: Path) -> None:
    assert VOCAB > LENGTH
    computed, wrong = 0, []
    first = KINDS.index(kind) % PART
    for number, (name, changed) in enumerate(list(_mutations(kind))[first::PART]):
        folder = tmp_path / str(number)
        theirs = _of_transformers(kind, changed, folder)
        if theirs is None:
            continue
        try:
            ours = Rig(folder, LENGTH).logits(Sequence(list(range(1, LENGTH + 1))), [13, 2, 1, 3])
        except ModelError:
            continue
        computed += 1
        if not torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3):
            wrong.append((name, float((ours - theirs).abs().max())))
    assert not wrong
    assert computed >= 2
