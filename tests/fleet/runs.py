"""One model in one process and in parts: the same requests, and the tokens that each gets."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch

from headrace.config import options
from headrace.core.events import Emitted, Finished
from headrace.core.request import FinishReason, Request, SamplingParams
from headrace.wiring import model
from tests.doubles.scores import Score
from tests.oracle.families import VOCAB

SHARED = 9
COUNT = 5

Answers = dict[str, tuple[tuple[int, ...], tuple[Score, ...]]]
"""Tokens of each request, and the log-probabilities of those that asked for them."""


def load(folder: Path | str, tensor: int = 1, stages: int = 1, **more: Any) -> model.Loaded:
    given = {
        "model": str(folder),
        "tokenizer": "builtin",
        "dtype": "float32",
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "block_size": 4,
        "kv_cache_memory_bytes": 1 << 20,
        "tensor_parallel_size": tensor,
        "pipeline_parallel_size": stages,
    }
    if "speculative_config" in more:
        more["speculative_config"] = json.dumps(more["speculative_config"])
    return model.load(options(given | more))


def requests() -> list[Request]:
    """More than run at once, longer than a step, with a common prefix; greedy and drawn, one with prompt scores."""
    draw = torch.Generator().manual_seed(1)
    shared = torch.randint(1, VOCAB, (SHARED,), generator=draw).tolist()
    made = []
    for i in range(COUNT):
        own = torch.randint(1, VOCAB, (3 + 4 * i,), generator=draw).tolist()
        params = SamplingParams(
            temperature=float(i % 2),
            max_tokens=8,
            ignore_eos=True,
            logprobs=2 if i == 2 else None,
            prompt_logprobs=1 if i == 3 else None,
        )
        made.append(Request(f"r{i}", (*shared, *own), params, seed=i))
    return made


def answers(loaded: model.Loaded) -> Answers:
    """What the engine answers to `requests`; each must end as asked."""
    tokens: dict[str, list[int]] = {}
    scores: dict[str, list[Score]] = {}
    for request in requests():
        loaded.engine.submit(request, time.monotonic())
    left = COUNT
    while left:
        for event in loaded.engine.step(time.monotonic()):
            if isinstance(event, Emitted):
                tokens.setdefault(event.request_id, []).extend(event.tokens)
                found = [Score(each.logprob) for each in event.logprobs]
                scores.setdefault(event.request_id, []).extend(found)
            elif isinstance(event, Finished):
                assert event.reason is FinishReason.LENGTH, event.message
                left -= 1
    loaded.engine.check_consistency()
    return {name: (tuple(known), tuple(scores[name])) for name, known in tokens.items()}


def answers_of(folder: Path | str, tensor: int = 1, stages: int = 1, **more: Any) -> Answers:
    """Load, answer twice (the second time from the prefix cache), and close."""
    loaded = load(folder, tensor, stages, **more)
    try:
        first = answers(loaded)
        assert answers(loaded) == first
        return first
    finally:
        model.close(loaded)
