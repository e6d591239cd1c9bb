"""Native families through the whole engine: texts equal those of plain transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from headrace.config import ConfigError
from headrace.core.capacity import NO_WINDOWS, WindowGroups, most_blocks
from headrace.core.request import SamplingParams
from headrace.llm import LLM
from headrace.wiring.loading import computing
from headrace.wiring.model import describe
from tests.oracle.families import CASES, WINDOW
from tests.oracle.greedy import COUNT, ROUNDED_QUERIES, counted, differing, keys_kept_in, texts

VOCAB = 96
LENGTH = 160
NAMES = (
    *("granite", "olmo3", "glm4", "smollm3", "hunyuan", "exaone4", "ernie4_5", "hyperclovax", "gpt_oss"),
    "gemma4",
)
DRAFTS = '{"method": "ngram", "num_speculative_tokens": 3, "adaptive": false, "prompt_lookup_min": 1}'


def open_llm(folder: Path, **given: Any) -> LLM:
    return LLM(
        str(folder), **{"max_model_len": 64, "kv_cache_memory_bytes": "1MiB", "block_size": 8, **given}
    )


def made(name: str, folder: Path, **fields: Any) -> tuple[Any, list[list[int]]]:
    """A model with a tokenizer, and prompts with a common beginning."""
    case = CASES[name]
    model = replace(case, options=case.options | fields).build(folder)
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(folder / "tokenizer.json"))
    generator = torch.Generator().manual_seed(5)
    shared = 5 * torch.randint(3, VOCAB, (5,), generator=generator).tolist()
    prompts = [
        shared + 2 * torch.randint(3, VOCAB, (size,), generator=generator).tolist() for size in (2, 7, 1)
    ]
    return model, prompts


def test_latents_with_prefix_hits_and_preemption(tmp_path: Path) -> None:
    model, prompts = made("deepseek_v3", tmp_path)
    with open_llm(tmp_path, max_num_batched_tokens=32, max_num_seqs=4) as llm:
        assert llm.loaded.shape.kv_elements == 3 * 28
        assert differing(model, prompts, texts(llm, prompts)) == []
        again = llm.generate(prompts, SamplingParams(max_tokens=2, temperature=0.0), progress=False)
        assert all(each.metrics.cached_tokens >= 24 for each in again)
        block = llm.loaded.ledger.block_bytes
    given = {"kv_cache_memory_bytes": str(10 * block), "scheduling_policy": "fcfs"}
    with open_llm(tmp_path, speculative_config=DRAFTS, **given) as llm, counted(llm) as events:
        assert differing(model, prompts, texts(llm, prompts)) == []
    assert events["Preempted"]
    for name in ("int8", "bfloat16"):
        with pytest.raises(
            ConfigError, match=f"--kv-cache-dtype {name}: DeepseekV3ForCausalLM keeps latents.* float32"
        ):
            open_llm(tmp_path, kv_cache_dtype=name)


@pytest.mark.parametrize("kernels", ["cpp", "torch"])
@pytest.mark.parametrize("name", ["smollm3", "gpt_oss", "gemma4"])
def test_keys_and_values_in_bfloat16_beside_float32(name: str, kernels: str, tmp_path: Path) -> None:
    """In half of the memory: chunks, prefix hits, drafts and preemption."""
    model, prompts = made(name, tmp_path)
    blocks: dict[str, int] = {}
    for kept in ("auto", "bfloat16"):
        with open_llm(tmp_path, kernels=kernels, kv_cache_dtype=kept) as llm:
            blocks[kept] = llm.loaded.ledger.block_bytes
    assert blocks["auto"] == 2 * blocks["bfloat16"]
    given: dict[str, Any] = {"kernels": kernels, "kv_cache_dtype": "bfloat16", "scheduling_policy": "fcfs"}
    given |= {
        "kv_cache_memory_bytes": str(12 * blocks["bfloat16"]),
        "max_num_batched_tokens": 32,
        "max_num_seqs": 4,
    }
    with open_llm(tmp_path, speculative_config=DRAFTS, **given) as llm, counted(llm) as events:
        assert any("keys and values in bfloat16" in line for line in describe(llm.loaded))
        found = texts(llm, prompts)
    assert events["Preempted"]
    assert events["Verified"]
    with keys_kept_in(model, torch.bfloat16):
        assert differing(model, prompts, found, ROUNDED_QUERIES) == []


@pytest.mark.parametrize(
    ("name", "stored", "given", "kept"),
    [
        ("smollm3", torch.bfloat16, {}, "bfloat16"),
        ("smollm3", torch.bfloat16, {"kernels": "torch"}, "bfloat16"),
        ("smollm3", torch.bfloat16, {"dtype": "float32"}, "float32"),
        ("smollm3", torch.bfloat16, {"kv_cache_dtype": "int8"}, "int8"),
        ("smollm3", torch.float16, {}, "float32"),
        ("smollm3", torch.float32, {}, "float32"),
        ("deepseek_v3", torch.bfloat16, {}, "float32"),
    ],
)
def test_a_model_in_bfloat16_keeps_its_keys_and_values_in_it_where_it_is_computed_in_float32(
    name: str,
    stored: torch.dtype,
    given: dict[str, Any],
    kept: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, prompts = made(name, tmp_path)
    model.to(stored).save_pretrained(tmp_path)
    facts = replace(computing.device_facts(torch.device("cpu")), native_bfloat16=False)
    monkeypatch.setattr(computing, "device_facts", lambda device: facts)
    with open_llm(tmp_path, **given) as llm:
        assert (llm.loaded.dtype, llm.loaded.kv_dtype) == ("float32", kept)
        said = any(f"keys and values in {kept}" in line for line in describe(llm.loaded))
        assert said is (kept != "float32")
        found = texts(llm, prompts)
    with keys_kept_in(model.float(), getattr(torch, kept)):
        assert differing(model, prompts, found, ROUNDED_QUERIES) == []


def test_keys_and_values_in_bfloat16_are_those_of_a_computation_in_it(tmp_path: Path) -> None:
    made("smollm3", tmp_path)
    with open_llm(tmp_path, dtype="bfloat16", kv_cache_dtype="bfloat16") as llm:
        assert llm.loaded.kv_dtype == "bfloat16"


@pytest.mark.parametrize("name", NAMES)
def test_prefix_hits_chunks_preemption_drafts_and_keys_kept_in(name: str, tmp_path: Path) -> None:
    model, prompts = made(name, tmp_path)
    with open_llm(tmp_path, max_num_batched_tokens=32, max_num_seqs=4) as llm:
        assert not any("transformers" in line for line in describe(llm.loaded))
        assert differing(model, prompts, texts(llm, prompts)) == []
        again = llm.generate(prompts, SamplingParams(max_tokens=2, temperature=0.0), progress=False)
        assert all(each.metrics.cached_tokens >= 24 for each in again)
        block = llm.loaded.ledger.position_bytes * 8
    given = {"kv_cache_memory_bytes": str(10 * block), "scheduling_policy": "fcfs"}
    with open_llm(tmp_path, speculative_config=DRAFTS, **given) as llm, counted(llm) as events:
        assert differing(model, prompts, texts(llm, prompts)) == []
    assert events["Preempted"]
    assert events["Verified"]
    with open_llm(tmp_path, kv_cache_dtype="int8") as llm:
        found = texts(llm, prompts)
    with keys_kept_in(model, torch.int8):
        assert differing(model, prompts, found, ROUNDED_QUERIES) == []


SHARING = {"num_hidden_layers": 10, "num_kv_shared_layers": 2}
KINDS = {
    "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 2
    + ["sliding_attention", "full_attention"]
}


@pytest.mark.parametrize(
    ("name", "groups", "fields"),
    [
        ("gemma3", 6, {}),
        ("gpt_oss", 2, {}),
        ("olmo3", 4, {}),
        ("gemma4", 2, SHARING | KINDS),
        ("gemma4-values-from-keys", 5, {}),
    ],
)
def test_window_layers_give_blocks_back(
    name: str, groups: int, fields: dict[str, Any], tmp_path: Path
) -> None:
    """Prompts many windows long, in chunks, with hits, drafts, preemption and keys in 8 bits."""
    model, prompts = made(name, tmp_path, max_position_embeddings=LENGTH, **fields)
    generator = torch.Generator().manual_seed(6)
    prompts += [prompt + torch.randint(3, VOCAB, (40,), generator=generator).tolist() for prompt in prompts]
    given: dict[str, Any] = {"max_model_len": LENGTH, "max_num_batched_tokens": 16, "block_size": 4}
    with open_llm(tmp_path, max_num_seqs=6, **given) as llm:
        ledger, engine = llm.loaded.ledger, llm.loaded.engine
        assert ledger.windows == WindowGroups(groups, WINDOW, 16)
        assert differing(model, prompts, texts(llm, prompts)) == []
        again = llm.generate(prompts, SamplingParams(max_tokens=2, temperature=0.0), progress=False)
        assert [each.metrics.cached_tokens for each in again] == [
            (len(each) - 1) // 4 * 4 for each in prompts
        ]
        engine.check_consistency()
    longest = max(map(len, prompts)) + COUNT
    needed = most_blocks(longest, 4, ledger.windows)
    memory = str(needed * ledger.block_bytes)
    given |= {"kv_cache_memory_bytes": memory, "scheduling_policy": "fcfs", "max_model_len": longest}
    with (
        open_llm(tmp_path, speculative_config=DRAFTS, max_num_seqs=6, **given) as llm,
        counted(llm) as events,
    ):
        assert llm.loaded.ledger.num_blocks == needed
        growing = [prompt[-5:] for prompt in prompts] + prompts
        assert differing(model, growing, texts(llm, growing)) == []
        llm.loaded.engine.check_consistency()
    assert events["Preempted"]
    assert events["Verified"]
    del given["kv_cache_memory_bytes"]
    with open_llm(tmp_path, kv_cache_dtype="int8", max_num_seqs=6, **given) as llm:
        assert llm.loaded.ledger.windows.groups == groups
        found = texts(llm, prompts)
    with keys_kept_in(model, torch.int8):
        assert differing(model, prompts, found, ROUNDED_QUERIES) == []


def test_window_layers_keep_all_tokens_where_groups_are_not_possible(tmp_path: Path) -> None:
    model, prompts = made("mistral", tmp_path, max_position_embeddings=LENGTH)
    given: dict[str, Any] = {"max_model_len": LENGTH, "max_num_batched_tokens": 16, "block_size": 4}
    given["max_num_seqs"] = 6
    with open_llm(tmp_path, **given) as llm:
        assert any(line.endswith("window layers: all layers have a window") for line in describe(llm.loaded))
        assert differing(model, prompts, texts(llm, prompts)) == []
    made("gemma3", tmp_path, max_position_embeddings=LENGTH)
    offload = {"kv_offload_bytes": "1MiB"}
    for options, why in (({"enable_window_groups": False}, "the option is off"), (offload, "in host memory")):
        with open_llm(tmp_path, **given, **options) as llm:
            assert llm.loaded.ledger.windows == NO_WINDOWS
            assert any(
                "all tokens are kept in window layers" in line and why in line
                for line in describe(llm.loaded)
            )
