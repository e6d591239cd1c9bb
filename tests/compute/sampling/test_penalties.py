"""Penalties by whole rows of counts, as on a GPU, are those through the history of tokens."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.compute.kernels import KernelsUnavailable
from headrace.compute.kernels.cpp import CppKernels
from headrace.compute.sampling import penalties as reference
from headrace.compute.sampling.choice import NO_DRAFT, NOTHING_ALLOWED, TokenChoice, choose
from headrace.compute.sampling.penalties import Allowed, Penalties, penalize
from headrace.compute.sampling.sampler import Sampler
from tests.compute.fakes import entry

VOCAB, WIDTH = 12, 20
tokens = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6)


@settings(max_examples=40, derandomize=True)
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


MASKED_VOCAB = 1000
RESTRICT = {"torch": reference.restrict}
with contextlib.suppress(KernelsUnavailable):
    RESTRICT |= {level: CppKernels(level).restrict for level in CppKernels().levels}


def mask(rows: list[list[int]], vocab: int = MASKED_VOCAB) -> np.ndarray:
    bits = np.zeros((len(rows), -(-vocab // 32) * 32), dtype=np.uint8)
    for row, tokens in enumerate(rows):
        bits[row, tokens] = 1
    return np.packbits(bits, axis=1, bitorder="little").view(np.int32)


def slowly(logits: torch.Tensor, lines: list[int], rows: list[list[int]]) -> torch.Tensor:
    out = logits.clone()
    for line, tokens in zip(lines, rows, strict=True):
        for token in range(logits.shape[1]):
            if token not in tokens:
                out[line, token] = -torch.inf
    return out


@pytest.mark.parametrize("restrict", RESTRICT.values(), ids=RESTRICT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [31, 32, 97, 1000])
def test_restricting_leaves_what_is_allowed_and_nothing_else(restrict, dtype, vocab):
    generator = np.random.default_rng(vocab)
    logits = torch.randn(6, vocab, generator=torch.Generator().manual_seed(1)).to(dtype)
    before = logits.clone()
    lines = [0, 2, 3, 5]
    rows = [
        [],
        list(range(vocab)),
        [vocab - 1],
        sorted(generator.choice(vocab, vocab // 3, replace=False).tolist()),
    ]
    words = mask(rows, vocab)
    if vocab % 32:
        words[:, -1] |= np.int32(-1) << np.int32(vocab % 32)  # bits beyond the vocabulary mean nothing
    out = restrict(logits, Allowed(np.array(lines), words))
    assert torch.equal(out, slowly(logits, lines, rows))
    assert torch.equal(logits, before)


def test_many_rows_are_shared_out_among_threads():
    logits = torch.randn(40, 50_000).bfloat16()
    words = np.random.default_rng(0).integers(-(2**31), 2**31, (40, 1563), dtype=np.int32)
    at = Allowed(np.arange(40), words)
    for restrict in RESTRICT.values():
        assert torch.equal(restrict(logits, at), reference.restrict(logits, at))


@pytest.mark.parametrize("more", [{}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.1}, {"temperature": 0.6}])
def test_what_is_drawn_under_a_mask_is_what_is_drawn_where_nothing_else_exists(more):
    """8,000 draws of one row against the distribution over the allowed tokens alone, filters and all."""
    draws = 8_000
    tokens = [3, 4, 31, 32, 33, 500, 998, 999]
    logits = torch.randn(MASKED_VOCAB, generator=torch.Generator().manual_seed(5)) * 2
    logits[7] = 30.0  # the likeliest of all is forbidden
    sampler = Sampler(torch.zeros(1, 10, dtype=torch.int32), MASKED_VOCAB)
    sampler.admit(entry(0, (1,), **({"temperature": 1.0, "seed_": 9} | more)))
    rows = torch.stack([logits] * draws)
    words = np.repeat(mask([tokens]), draws, axis=0)
    drawn = sampler.sample(
        rows, np.zeros(draws, dtype=np.int64), np.arange(draws), Allowed(np.arange(draws), words)
    )
    assert set(drawn.tolist()) <= set(tokens)
    params = {"temperature": 1.0, "min_p": 0.0, "top_k": 0, "top_p": 1.0} | more
    uniform = (np.arange(draws) + 0.5) / draws
    alone = TokenChoice(
        np.full(draws, params["temperature"]),
        np.full(draws, params["min_p"]),
        np.full(draws, params["top_k"], dtype=np.int64),
        np.full(draws, params["top_p"]),
        uniform,
    )
    expected = np.bincount(
        choose(logits[tokens].expand(draws, -1).clone(), alone).numpy(), minlength=len(tokens)
    )
    counted = np.array([(drawn == token).sum().item() for token in tokens])
    kept = expected > 0
    assert not counted[~kept].any()
    chi_square = (((counted - expected) ** 2)[kept] / expected[kept]).sum()
    assert chi_square < 30  # of at most 7 degrees of freedom: p > 0.0001


def test_other_constraints_and_penalties_stay_in_force_beside_a_mask():
    sampler = Sampler(torch.zeros(2, 10, dtype=torch.int32), MASKED_VOCAB)
    sampler.admit(entry(0, (1,), logit_bias=((4, 50.0), (8, 99.0)), allowed_token_ids=(3, 4, 8)))
    sampler.admit(entry(1, (1,)))
    logits = torch.zeros(2, MASKED_VOCAB)
    logits[1, 600] = 9.0
    drawn = sampler.sample(
        logits, np.array([0, 1]), np.array([1, 1]), Allowed(np.array([0]), mask([[3, 4, 5]]))
    )
    assert drawn.tolist() == [4, 600]


def test_a_row_that_is_left_with_nothing_fails_alone():
    sampler = Sampler(torch.zeros(2, 10, dtype=torch.int32), MASKED_VOCAB)
    sampler.admit(entry(0, (1,), allowed_token_ids=(8,)))
    sampler.admit(entry(1, (1,)))
    drawn = sampler.sample(
        torch.zeros(2, MASKED_VOCAB), np.array([0, 1]), np.array([1, 1]), Allowed(np.array([0]), mask([[3]]))
    )
    assert drawn.tolist() == [NOTHING_ALLOWED, 0]
