"""The memory of a real model that sleeps: it is freed, and what is computed afterwards is the same."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from headrace import LLM, SamplingParams
from headrace.compute.model.hub import resolve_folder
from headrace.service.sleep import Part
from headrace.wiring.memory_sleep import weight_files

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
BOTH = tuple(Part)


def texts(llm: LLM) -> list[str]:
    prompts = ["Tell me about Anna.", "The fox"]
    return [each.outputs[0].text for each in llm.generate(prompts, GREEDY, progress=False)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(resolve_folder("builtin", None), tmp_path / "model"))


def test_a_model_computes_the_same_after_each_level(folder: Path) -> None:
    with LLM(str(folder), kv_cache_memory_bytes=64 << 20, kv_offload_bytes=8 << 20) as llm:
        memory, decoder, expected = llm.loaded.memory, llm.loaded.decoder, texts(llm)
        pages = [tensor for tensor in llm.loaded.runner._kv.tensors if tensor.any()]
        assert pages
        report = memory.sleep((Part.KV_CACHE,))
        assert (report.sleeping, report.problem) == (("kv_cache",), "")
        assert not any(page.any() for page in pages)
        assert memory.wake_up(BOTH).sleeping == ()
        assert texts(llm) == expected
        assert memory.sleep(BOTH).sleeping == BOTH
        assert not hasattr(decoder, "_stack")
        assert decoder.expert_loads() == []
        assert llm.loaded.controls.counts.runner.experts.tokens == 0
        assert memory.wake_up(BOTH).sleeping == ()
        assert texts(llm) == expected


def test_weights_that_have_changed_are_not_served(folder: Path) -> None:
    with LLM(str(folder), kv_cache_memory_bytes=32 << 20) as llm:
        memory, expected = llm.loaded.memory, texts(llm)
        memory.sleep(BOTH)
        (weights,) = [path for path in weight_files(folder) if path.suffix == ".safetensors"]
        kept = weights.with_suffix(".kept")
        weights.rename(kept)
        shutil.copy(kept, weights)
        refused = memory.wake_up(BOTH)
        assert refused.sleeping == BOTH
        assert "have changed since the server started" in refused.problem
        weights.unlink()
        assert memory.wake_up(BOTH).problem
        kept.rename(weights)
        assert memory.wake_up(BOTH).sleeping == ()
        assert texts(llm) == expected
