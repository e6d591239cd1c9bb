"""Two lives of one engine over the same disk: the answers are those of one life, and the second computes less."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.compute.blockfile import BLOCKS_FILE
from headrace.core.request import SamplingParams
from headrace.llm import LLM
from headrace.wiring.loading.memory import SNAPSHOT_FILE

STORY = "Once upon a time there was a small dog who lived by the river with a cat and an old grey horse. " * 3
PROMPTS = [STORY + end for end in ("The dog", "The cat said", "The horse", "One day")]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


def live(folder: Path | None, **given: Any) -> tuple[list[str], int, tuple[str, ...]]:
    """Answers, tokens found in the cache, and what was noted at the start."""
    offload = {"kv_offload_path": str(folder), "kv_offload_disk_bytes": 64 << 20} if folder else {}
    limits: dict[str, Any] = {"max_model_len": 512, "kv_cache_memory_bytes": 16 << 20, "max_num_seqs": 4}
    llm = LLM(**offload, **limits, dtype="float32", **given)  # no CPU has a note about float32
    outputs = llm.generate(PROMPTS, GREEDY, progress=False)
    llm.loaded.engine.check_consistency()
    llm.close()
    cached = sum(output.metrics.cached_tokens for output in outputs)
    return [output.outputs[0].text for output in outputs], cached, llm.loaded.notes


@pytest.fixture(scope="module")
def alone() -> tuple[list[str], int]:
    texts, cached, _ = live(None)
    return texts, cached


def test_a_second_life_gives_the_same_answers_from_what_the_first_left(tmp_path, alone) -> None:
    texts, cached = alone
    first, cached_first, notes = live(tmp_path)
    assert (first, cached_first) == (texts, cached)
    assert not notes
    second, cached_second, notes = live(tmp_path)
    assert second == texts
    assert cached_second > cached, "the first prompt was in the cache too"
    assert "blocks of the last run are on disk" in notes[-1]


def test_a_damaged_block_is_a_miss(tmp_path, alone) -> None:
    live(tmp_path)
    blocks = tmp_path / BLOCKS_FILE
    blocks.write_bytes(bytes(byte ^ 255 for byte in blocks.read_bytes()))
    texts, cached, notes = live(tmp_path)
    assert (texts, cached) == alone
    assert "blocks of the last run are on disk" in notes[-1], "only reading them tells"


@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_a_damaged_list_is_not_used(tmp_path, alone, damage: str) -> None:
    live(tmp_path)
    snapshot = tmp_path / SNAPSHOT_FILE
    content = snapshot.read_bytes()
    snapshot.write_bytes(content[:-9] if damage == "cut" else content.replace(b"layout", b"lay0ut"))
    texts, cached, notes = live(tmp_path)
    assert (texts, cached) == alone
    assert "is not used: it is damaged" in notes[-1]


def test_what_another_engine_left_is_not_used(tmp_path, alone) -> None:
    live(tmp_path, block_size=8)
    texts, cached, notes = live(tmp_path)
    assert (texts, cached) == alone
    assert "is not used: its block_size is 8, not 16" in notes[-1]
    live(tmp_path, load_format="dummy", seed=7)
    texts, cached, notes = live(tmp_path)
    assert (texts, cached) == alone
    assert "is not used: its fingerprint is" in notes[-1]


def test_integers_outlive_a_restart_with_their_scales(tmp_path) -> None:
    first, cached, _ = live(tmp_path, kv_cache_dtype="int8")
    second, cached_second, notes = live(tmp_path, kv_cache_dtype="int8")
    assert second == first
    assert cached_second > cached
    assert "blocks of the last run are on disk" in notes[-1]
    _, cached_auto, notes = live(tmp_path)
    assert cached_auto == cached
    assert "is not used: its dtype is 'int8', not " in notes[-1]


def test_a_life_that_ended_badly_leaves_nothing(tmp_path, alone) -> None:
    live(tmp_path)
    limits: dict[str, Any] = {"kv_offload_disk_bytes": 64 << 20, "max_model_len": 512}
    llm = LLM(kv_offload_path=str(tmp_path), **limits, dtype="float32")
    llm.loaded.runner.close()  # without `close` of the model: as if the process had been killed
    texts, cached, notes = live(tmp_path)
    assert (texts, cached) == alone
    assert not notes


def test_a_folder_that_cannot_be_used_costs_nothing_but_the_tier(tmp_path, alone) -> None:
    (tmp_path / "file").write_text("not a folder")
    texts, cached, notes = live(tmp_path / "file" / "below")
    assert (texts, cached) == alone
    assert notes[-1].startswith("no disk tier in ")
