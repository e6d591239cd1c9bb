"""Greedy texts, as transformers alone and as an engine continues a prompt."""

from __future__ import annotations

from typing import Any

import torch

from headrace.core.request import SamplingParams
from headrace.llm import LLM

COUNT = 12
"""Tokens of a text."""


@torch.inference_mode()
def continued(model: Any, prompt: list[int]) -> list[int]:
    """What a model of transformers continues a prompt with, without a cache."""
    known = list(prompt)
    for _ in range(COUNT):
        known.append(int(model(input_ids=torch.tensor([known]), use_cache=False).logits[0, -1].argmax()))
    return known[len(prompt) :]


def texts(llm: LLM, prompts: list[list[int]], **params: Any) -> list[list[int]]:
    """What an engine continues all prompts with, at once."""
    sampling = SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True, **params)
    return [list(each.outputs[0].token_ids) for each in llm.generate(prompts, sampling, progress=False)]
