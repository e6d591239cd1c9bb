"""Heads that are no EAGLE-3 head, or none for the target, are refused by name; published variants are read."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.compute.drafting.loading import Beside, LoadedHead, load_draft, load_head, read_head_spec
from headrace.compute.kernels.reference import TorchKernels
from headrace.compute.model.families import parse_config
from headrace.compute.model.hub import read_config, resolve_folder
from headrace.compute.model.kv import PagedKV
from headrace.config import ConfigError
from headrace.config.objects import SpeculativeConfig
from tests.compute.drafting.heads import CONFIG, write_head
from tests.oracle.harness import pack

TARGET = parse_config(read_config(resolve_folder("builtin"))).shape


def load(folder: Path, table: torch.dtype = torch.float32) -> LoadedHead:
    embedding = torch.randn(TARGET.vocab_size, TARGET.hidden_size).to(table)
    cpu, dtype = torch.device("cpu"), torch.float32
    target = Beside(TARGET, 128, cpu, dtype, dtype, TorchKernels(), embedding, embedding)
    return load_head(SpeculativeConfig(("eagle3",), model=str(folder)), target)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            "the config names GPT2LMHeadModel; expected LlamaForCausalLMEagle3",
        ),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2, and this model needs 1"),
        ({"vocab_size": 5000}, "vocab_size is 5,000, and this model needs 4,096"),
        ({"hidden_size": 512}, "hidden_size is 512, and this model needs 256"),
        (
            {"hidden_size": 64, "target_hidden_size": 512},
            "target_hidden_size is 512, and this model needs 256",
        ),
        (
            {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]},
            r"numbers of the 3 layers of this model, got \[1, 2, 4\]",
        ),
        ({"eagle_aux_hidden_state_layer_ids": [True]}, r"got \[True\]"),
        ({"eagle_aux_hidden_state_layer_ids": []}, r"got \[\]"),
        (
            {
                "eagle_aux_hidden_state_layer_ids": None,
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [3]},
            },
            r"got \[3\]",
        ),
        ({"draft_vocab_size": "many"}, "draft_vocab_size must be a positive integer"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    write_head(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | fields))
    with pytest.raises(ConfigError, match=f"^--speculative-config: eagle3: .*{message}"):
        load(tmp_path)


def missing(name: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda found: found.pop(name)


@pytest.mark.parametrize(
    ("change", "fields", "message"),
    [
        (missing("fc.weight"), {}, r"lacks fc\.weight"),
        (missing("d2t"), {"draft_vocab_size": 300}, "lacks d2t"),
        (
            missing("embed_tokens.weight"),
            {"hidden_size": 64, "target_hidden_size": 256},
            r"lacks embed_tokens",
        ),
        (
            lambda found: found.update(other=torch.ones(1)),
            {},
            "tensors that an EAGLE-3 head does not use: other",
        ),
        (
            lambda found: found.update({"fc.weight": torch.ones(256, 512)}),
            {},
            r"fc\.weight has shape \[256, 512\], the config says \[256, 768\]",
        ),
        (
            lambda found: found["d2t"].add_(4000),
            {"draft_vocab_size": 300},
            "d2t names tokens beyond the vocabulary",
        ),
    ],
)
def test_a_checkpoint_of_another_layout_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], Any], fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(write_head(tmp_path, change, **fields))


def test_a_table_in_bfloat16_is_shared_by_a_head_in_float32(tmp_path: Path) -> None:
    """Like that of a target whose checkpoint has it so."""
    head = load(write_head(tmp_path), torch.bfloat16).head
    assert head.dtype == torch.float32
    narrow = head._weights.embedding
    assert narrow.dtype == torch.bfloat16
    batch = pack([5, 7, 9], [0], [3], [[0]], [2], 16, torch.device("cpu"))
    states = torch.randn(3, head.state_width)
    results = []
    for table in (narrow, narrow.float()):
        head._weights = replace(head._weights, embedding=table)
        head.read(states)
        results.append(head.hidden(batch, PagedKV(head.spec.layer.shape, 2, 16, torch.float32)))
    assert torch.equal(*results)


def test_names_of_other_writers_are_read(tmp_path: Path) -> None:
    def renamed(found: dict[str, Tensor]) -> None:
        for name in list(found):
            found[f"model.{name.replace('midlayer', 'layers.0')}"] = found.pop(name)
        found["model.rotary_emb.inv_freq"] = torch.ones(4)

    usual, other = load(write_head(tmp_path / "a")), load(write_head(tmp_path / "b", renamed))
    assert torch.equal(usual.head._weights.qkv, other.head._weights.qkv)
    assert usual.nbytes == other.nbytes


def test_states_are_those_that_the_writer_of_the_config_means() -> None:
    ids = "eagle_aux_hidden_state_layer_ids"
    outer = read_head_spec(CONFIG | {ids: [1, 2, 3]}, TARGET)
    inner = read_head_spec(CONFIG | {ids: None, "eagle_config": {ids: [0, 1, 2]}}, TARGET)
    published = read_head_spec({name: each for name, each in CONFIG.items() if name != ids}, TARGET)
    assert outer.layers == inner.layers == (1, 2, 3)
    assert published.layers == (2, 1, 0)


def test_a_draft_model_keeps_latents_as_it_computes_them_and_never_in_8_bits(tmp_path: Path) -> None:
    config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "vocab_size": TARGET.vocab_size,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    cpu, dtype = torch.device("cpu"), torch.float32
    speculative = SpeculativeConfig(("draft_model",), model=str(tmp_path))
    target = Beside(TARGET, 128, cpu, dtype, torch.bfloat16, TorchKernels(), None, None)
    assert load_draft(speculative, target, dummy_seed=0).kv_dtype == torch.float32
    with pytest.raises(ConfigError, match="keeps latents, which have no form of 8 bits"):
        load_draft(speculative, target._replace(kv_dtype=torch.int8), dummy_seed=0)
