"""Random lives of whole engines with experts: each text is that of the request alone in an engine without all of it.

A life draws its memory, chunks, drafts, eviction and prompts with common beginnings. The reference is the same kernel
for one request at a time, without prefix caching and drafts; the kernels themselves are compared elsewhere.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.core.request import SamplingParams
from headrace.llm import LLM
from tests.oracle.greedy import counted
from tests.oracle.test_native_engine import DRAFTS, VOCAB, made, open_llm

FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss", "qwen2_moe")
SETTINGS = 6
"""Engines of a family, each of which lives many lives: starting one takes longest."""


class Lives:
    """Engines of one family and kernel, and the texts of lone requests."""

    def __init__(self, folder: Path, family: str, kernels: str, seed: int) -> None:
        self._rng = random.Random(seed)
        self._folder, self._kernels = folder, kernels
        _, self._beginnings = made(family, folder, max_position_embeddings=96)
        self.alone = self._open(enable_prefix_caching=False, max_num_seqs=1)
        self.seen: Counter[str] = Counter()

    def _open(self, **given: Any) -> LLM:
        return open_llm(self._folder, kernels=self._kernels, dtype="float32", max_model_len=96, **given)

    def engine(self) -> LLM:
        """An engine with other memory, chunks and drafts; half of them preempt."""
        rng, block = self._rng, self._rng.choice([4, 8, 16])
        position = self.alone.loaded.ledger.position_bytes
        blocks = -(-96 // block) + rng.choice([0, 0, 2, 40])
        drafts = {"speculative_config": DRAFTS} if rng.random() < 0.6 else {}
        return self._open(
            block_size=block,
            kv_cache_memory_bytes=str(blocks * block * position),
            max_num_seqs=rng.randint(2, 6),
            max_num_batched_tokens=rng.choice([16, 24, 96]),
            enable_window_groups=False,
            scheduling_policy=rng.choice(["fcfs", "fair"]),
            **drafts,
        )

    def live(self, llm: LLM) -> None:
        """One life: some requests at once."""
        rng = self._rng
        prompts = [self._prompt() for _ in range(rng.randint(1, 6))]
        params = [
            SamplingParams(
                max_tokens=rng.randint(1, 30),
                temperature=rng.choice([0.0, 0.0, 0.8]),
                seed=7,
                ignore_eos=True,
            )
            for _ in prompts
        ]
        with counted(llm) as events:
            results = llm.generate(prompts, params, progress=False)
        self.seen.update(events)
        self.seen["hits"] += sum(each.metrics.cached_tokens > 0 for each in results)
        for prompt, given, result in zip(prompts, params, results, strict=True):
            (lone,) = self.alone.generate([prompt], given, progress=False)
            assert list(result.outputs[0].token_ids) == list(lone.outputs[0].token_ids), prompt
        llm.loaded.engine.check_consistency()

    def _prompt(self) -> list[int]:
        rng = self._rng
        begin = rng.choice(self._beginnings)[: rng.randint(1, 40)]
        return (
            begin + [rng.randrange(3, VOCAB) for _ in range(rng.randint(0, 9))] + begin[: rng.randint(0, 9)]
        )


def run(folder: Path, family: str, kernels: str, seed: int, lives: int) -> Counter[str]:
    """So many lives over a few engines; the events that they had."""
    all_lives = Lives(folder, family, kernels, seed)
    with all_lives.alone:
        for part in _parts(lives):
            with all_lives.engine() as llm:
                for _ in range(part):
                    all_lives.live(llm)
    return all_lives.seen


def _parts(lives: int) -> Iterator[int]:
    engines = min(SETTINGS, lives)
    yield from (lives // engines + (number < lives % engines) for number in range(engines))


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["cpp", "torch"])
@pytest.mark.parametrize("family", FAMILIES)
def test_random_lives_with_experts(family: str, kernels: str, tmp_path: Path) -> None:
    seen = run(tmp_path, family, kernels, 1, 24)
    assert min(seen[each] for each in ("Preempted", "Verified", "Chunked", "hits")) > 0, seen
