"""Native families through the whole engine: texts equal those of plain transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from headrace.config import ConfigError
from headrace.core.request import SamplingParams
from headrace.llm import LLM
from headrace.wiring.model import describe
from tests.oracle.families import CASES
from tests.oracle.greedy import ROUNDED_QUERIES, counted, differing, keys_in_8_bits, texts

VOCAB = 96
NAMES = (
    *("granite", "olmo3", "glm4", "smollm3", "hunyuan", "exaone4", "ernie4_5", "hyperclovax", "gpt_oss"),
    "gemma4",
)
DRAFTS = '{"method": "ngram", "num_speculative_tokens": 3, "adaptive": false, "prompt_lookup_min": 1}'


def open_llm(folder: Path, **given: Any) -> LLM:
    return LLM(
        str(folder), **{"max_model_len": 64, "kv_cache_memory_bytes": "1MiB", "block_size": 8, **given}
    )


def made(name: str, folder: Path) -> tuple[Any, list[list[int]]]:
    """A model with a tokenizer, and prompts with a common beginning."""
    model = CASES[name].build(folder)
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
    with pytest.raises(ConfigError, match="--kv-cache-dtype int8: DeepseekV3ForCausalLM keeps latents"):
        open_llm(tmp_path, kv_cache_dtype="int8")


@pytest.mark.parametrize("name", NAMES)
def test_prefix_hits_chunks_preemption_drafts_and_keys_in_8_bits(name: str, tmp_path: Path) -> None:
    model, prompts = made(name, tmp_path)
    with open_llm(tmp_path, max_num_batched_tokens=32, max_num_seqs=4) as llm:
        assert not any("transformers" in line for line in describe(llm.loaded))
        assert differing(model, prompts, texts(llm, prompts)) == []
        again = llm.generate(prompts, SamplingParams(max_tokens=2, temperature=0.0), progress=False)
        assert all(each.metrics.cached_tokens >= 24 for each in again)
        block = llm.loaded.ledger.block_bytes
    given = {"kv_cache_memory_bytes": str(10 * block), "scheduling_policy": "fcfs"}
    with open_llm(tmp_path, speculative_config=DRAFTS, **given) as llm, counted(llm) as events:
        assert differing(model, prompts, texts(llm, prompts)) == []
    assert events["Preempted"]
    assert events["Verified"]
    with open_llm(tmp_path, kv_cache_dtype="int8") as llm:
        found = texts(llm, prompts)
    with keys_in_8_bits(model):
        assert differing(model, prompts, found, ROUNDED_QUERIES) == []
