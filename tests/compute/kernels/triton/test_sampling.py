"""Sampling in Triton against its definition in torch: filters, draws, faults, masks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.compute.kernels.triton.backend import TritonKernels
from headrace.compute.sampling.choice import NOT_FINITE, NOTHING_ALLOWED, TokenChoice, probabilities
from headrace.compute.sampling.penalties import IN_PROMPT, Allowed, Penalty
from tests.compute.kernels.pages import CPU, DTYPES, ORACLE

KERNELS = TritonKernels(CPU)
quick = settings(max_examples=15, derandomize=True)


def choice_of(rows: int, seed: int, *, min_p: float = 0.0, top_k: int = 0, top_p: float = 1.0) -> TokenChoice:
    drawn = np.random.default_rng(seed)
    return TokenChoice(
        drawn.uniform(0.3, 2.0, rows),
        np.full(rows, min_p),
        np.full(rows, top_k, dtype=np.int64),
        np.full(rows, top_p),
        drawn.random(rows),
    )


@quick
@given(
    rows=st.integers(1, 4),
    vocab=st.sampled_from([1, 7, 600, 3000]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_likeliest_is_the_first_of_the_largest(rows: int, vocab: int, dtype: torch.dtype, seed: int) -> None:
    torch.manual_seed(seed)
    logits = torch.randn(rows, vocab).mul_(3).round_().to(dtype)  # with ties
    assert torch.equal(KERNELS.likeliest(logits), ORACLE.likeliest(logits))


@quick
@given(
    rows=st.integers(1, 3),
    vocab=st.sampled_from([5, 600, 1100]),
    min_p=st.sampled_from([0.0, 0.1]),
    top_k=st.sampled_from([0, 1, 4, 50]),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 1e-9]),
    ties=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 999),
)
def test_a_draw_lies_where_the_distribution_says(
    rows: int, vocab: int, min_p: float, top_k: int, top_p: float, ties: bool, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    logits = torch.randn(rows, vocab).mul_(3)
    logits = (logits.round_() if ties else logits).to(dtype)
    logits[0, 2:4] = -torch.inf
    choice = choice_of(rows, seed, min_p=min_p, top_k=top_k, top_p=top_p)
    tokens = KERNELS.choose(logits, choice)
    weights = probabilities(logits.float(), choice).double()
    after = weights.cumsum(-1)
    chosen = tokens[:, None]
    uniform = torch.from_numpy(choice.uniform)
    assert (weights.gather(1, chosen) > 0).all()
    assert ((after - weights).gather(1, chosen)[:, 0] - 1e-5 <= uniform).all()
    assert (uniform <= after.gather(1, chosen)[:, 0] + 1e-5).all()


def test_every_token_of_a_nucleus_is_drawn_as_often_as_it_weighs() -> None:
    logits = torch.tensor([3.0, 1.0, 2.0, -1.0, 0.0]).repeat(40, 1)
    choice = choice_of(40, 0, top_p=0.95)._replace(
        temperature=np.ones(40), uniform=(np.arange(40) + 0.5) / 40
    )
    counts = torch.bincount(KERNELS.choose(logits, choice), minlength=5)
    weights = logits[0].exp()
    weights[3:] = 0
    torch.testing.assert_close(counts / 40, weights / weights.sum(), atol=0.03, rtol=0)


def test_a_draw_does_not_depend_on_its_neighbours() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 900)
    choice = choice_of(6, 3, top_k=40, top_p=0.8)
    together = KERNELS.choose(logits, choice)
    for row in (0, 5):
        one = TokenChoice(*(line[row : row + 1].copy() for line in choice))
        assert torch.equal(KERNELS.choose(logits[row : row + 1], one), together[row : row + 1])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_rows_that_cannot_be_sampled_are_faults(value: float) -> None:
    logits = torch.zeros(3, 700)
    logits[0, 650] = value
    logits[1] = -torch.inf
    for tokens in (KERNELS.likeliest(logits), KERNELS.choose(logits, choice_of(3, 0, top_k=5, top_p=0.9))):
        assert tokens[:2].tolist() == [NOT_FINITE, NOTHING_ALLOWED]
        assert tokens[2] >= 0


@quick
@given(vocab=st.sampled_from([7, 3000]), ahead=st.integers(0, 3), seed=st.integers(0, 99))
def test_penalties(vocab: int, ahead: int, seed: int) -> None:
    drawn = np.random.default_rng(seed)
    logits, counts = torch.randn(4, vocab), torch.zeros(3, vocab, dtype=torch.int32)
    counts[:, :: 1 + seed % 3] = 2
    counts[:, ::2] += IN_PROMPT
    drafts, begins = drawn.integers(-3, 7, 2 * ahead + 1), np.array([0, ahead + 1])
    numbers = (drawn.uniform(1, 2, 2), drawn.uniform(-1, 1, 2), drawn.uniform(0, 1, 2))
    penalty = Penalty(np.array([3, 1]), np.array([0, 2]), *numbers, drafts, begins, begins + ahead)
    actual, expected = logits.clone(), logits.clone()
    KERNELS.penalize(actual, counts, penalty)
    ORACLE.penalize(expected, counts, penalty)
    torch.testing.assert_close(actual, expected)


@quick
@given(counts=st.lists(st.integers(0, 4), min_size=1, max_size=4), seed=st.integers(0, 99))
def test_drafts_count_while_they_are_what_was_drawn(counts: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    offsets = torch.cat([torch.arange(count + 1) for count in counts])
    first = torch.arange(len(offsets)) - offsets
    drawn, drafts = torch.randint(-1, 2, (2, len(offsets)))
    assert torch.equal(
        KERNELS.accept(drawn, drafts, first, offsets), ORACLE.accept(drawn, drafts, first, offsets)
    )


@pytest.mark.parametrize("lines", [[0, 2], [0, 1, 2], [1]])
@pytest.mark.parametrize("vocab", [31, 2500])
def test_restrict(vocab: int, lines: list[int]) -> None:
    logits = torch.randn(3, vocab).to(torch.bfloat16)
    words = np.random.default_rng(0).integers(-(2**31), 2**31, (len(lines), -(-vocab // 32))).astype(np.int32)
    allowed = Allowed(np.array(lines), words)
    assert torch.equal(KERNELS.restrict(logits, allowed), ORACLE.restrict(logits, allowed))
