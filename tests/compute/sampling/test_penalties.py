"""Penalties by whole rows of counts, as on a GPU, are those through the history of tokens."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.compute.sampling.lines import NO_DRAFT
from headrace.compute.sampling.penalties import Penalties, penalize

VOCAB, WIDTH = 12, 20
tokens = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    prompts=st.lists(tokens, min_size=1, max_size=3),
    output=tokens,
    drafts=st.none() | st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3),
    numbers=st.tuples(st.sampled_from([1.0, 1.3]), st.sampled_from([0.0, 0.7]), st.sampled_from([0.0, 0.4])),
)
def test_both_ways_are_the_same(
    prompts: list[list[int]], output: list[int], drafts: list[int] | None, numbers: tuple[float, float, float]
) -> None:
    """All slots with one output, of which the last token has been appended; the first slot has no drafts."""
    count = len(prompts)
    history = torch.zeros(count, WIDTH, dtype=torch.int32)
    ways = [Penalties(history, VOCAB), Penalties(history, VOCAB, penalize)]
    slots = np.arange(count)
    for slot, prompt in enumerate(prompts):
        known = [*prompt, *output, *(drafts or [])]
        history[slot, : len(known)] = torch.tensor(known)
        for way in ways:
            way.admit(slot, np.array(prompt), np.array(output[:-1], dtype=np.int64))
    for way in ways:
        way.append(slots, torch.tensor([output[-1]] * count))
    lengths = np.array([len(prompt) + len(output) for prompt in prompts])
    ahead = None
    if drafts:
        ahead = np.array([[NO_DRAFT] * len(drafts)] + [drafts] * (count - 1))
        lengths[1:] += len(drafts)
    logits = torch.randn(count + 1, VOCAB, generator=torch.Generator().manual_seed(len(output)))
    rows, given_ = slots + 1, [np.full(count, number) for number in numbers]
    results = [logits.clone(), logits.clone()]
    for way, result in zip(ways, results, strict=True):
        way.apply(result, rows, slots, lengths, *given_, ahead)
    torch.testing.assert_close(*results)
    assert torch.equal(results[0][0], logits[0])
