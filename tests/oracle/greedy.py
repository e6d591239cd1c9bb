"""Greedy texts of an engine, and what transformers alone chooses at each of their tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from headrace.core.request import SamplingParams
from headrace.llm import LLM

COUNT = 24
"""Tokens of a text."""

ROUNDED_QUERIES = 0.05
"""Gap of logits that 8-bit pages may cause beside their own rounding: C++ kernels round queries to 16 bits, and experts
enlarge that. Of the models here one differs, by 0.023 at a spread of 1.2."""


@torch.inference_mode()
def gap(model: Any, prompt: list[int], text: list[int], allowed: Sequence[int] | None = None) -> float:
    """How far the logit of a text's token is below the largest one of a model of transformers, at most.

    It is 0 exactly if the model's own greedy text is this one. ``allowed``: only these tokens count.
    """
    tokens = torch.tensor([[*prompt, *text[:-1]]])
    logits = model(input_ids=tokens, use_cache=False).logits[0, len(prompt) - 1 :]
    found = logits.gather(1, torch.tensor(text)[:, None])[:, 0]
    largest = (logits if allowed is None else logits[:, list(allowed)]).amax(1)
    return float((largest - found).max())


def differing(
    model: Any, prompts: list[list[int]], found: list[list[int]], within: float = 0.0, **given: Any
) -> list[int]:
    """The numbers of the prompts whose texts are not the greedy ones of a model, by more than a gap of logits."""
    pairs = enumerate(zip(prompts, found, strict=True))
    return [number for number, (prompt, text) in pairs if gap(model, prompt, text, **given) > within]


def texts(llm: LLM, prompts: list[list[int]], **params: Any) -> list[list[int]]:
    """What an engine continues all prompts with, at once."""
    sampling = SamplingParams(max_tokens=COUNT, temperature=0.0, ignore_eos=True, **params)
    return [list(each.outputs[0].token_ids) for each in llm.generate(prompts, sampling, progress=False)]


@contextmanager
def counted(llm: LLM) -> Iterator[Counter[str]]:
    """Count the events of an engine by their names."""
    engine = llm.loaded.engine
    found: Counter[str] = Counter()
    step = engine.step

    def counting(now: float) -> Any:
        events = step(now)
        found.update(type(event).__name__ for event in events)
        return events

    engine.step = counting  # type: ignore[method-assign]
    try:
        yield found
    finally:
        engine.step = step  # type: ignore[method-assign]


@contextmanager
def keys_kept_in(model: Any, dtype: torch.dtype) -> Iterator[None]:
    """Let a model of transformers round the keys and values of each token and head as pages in ``dtype`` do."""
    rounded = _in_8_bits if dtype == torch.int8 else lambda heads: heads.to(dtype).to(heads.dtype)
    name, before = f"headrace_{dtype}", model.config._attn_implementation
    AttentionInterface.register(name, partial(_attend, rounded))
    AttentionMaskInterface.register(name, eager_mask)
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _attend(
    rounded: Callable[[Tensor], Tensor],
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    groups = query.shape[1] // key.shape[1]
    k, v = (rounded(each).repeat_interleave(groups, 1) for each in (key, value))
    scores = query @ k.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if attention_mask is None:
        attention_mask = torch.full(scores.shape[-2:], -torch.inf).triu(1)
    scores = scores + attention_mask
    if s_aux is not None:
        scores = torch.cat((scores, s_aux.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)), -1)
    weights = F.softmax(scores, -1)[..., : k.shape[2]]
    return (weights @ v).transpose(1, 2).contiguous(), None


def _in_8_bits(heads: Tensor) -> Tensor:
    """Heads [1, G, T, D] as integers of up to 127 times one scale for each token and head."""
    largest = heads.abs().amax(-1, keepdim=True)
    return (heads * torch.where(largest > 0, 127 / largest, 0)).round() * (largest / 127)
