"""Drawing in C++ against the torch function that defines it, at every instruction-set level that this machine has.

The two round differently, so a token is right if the uniform number lies in its part of the oracle's distribution
function, to within what rounding moves it; each token of weight above that is asked for as well.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.compute.kernels import KernelsUnavailable
from headrace.compute.kernels.cpp import CppKernels
from headrace.compute.sampling.choice import NOT_FINITE, NOTHING_ALLOWED, TokenChoice, choose, probabilities

try:
    LEVELS = CppKernels().levels
except KernelsUnavailable as reason:
    pytest.skip(str(reason), allow_module_level=True)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROUNDING = 1e-5
pytestmark = pytest.mark.parametrize("level", LEVELS)
quick = settings(max_examples=60, derandomize=True)


def choice_of(
    rows: int,
    temperature: float = 1.0,
    min_p: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    uniform: np.ndarray | None = None,
) -> TokenChoice:
    """The same parameters for all rows, by default with uniform numbers spread evenly over [0, 1)."""
    if uniform is None:
        uniform = (np.arange(rows) + 0.5) / rows
    reals = [np.full(rows, value) for value in (temperature, min_p, top_p)]
    return TokenChoice(reals[0], reals[1], np.full(rows, top_k), reals[2], uniform)


def row_of(choice: TokenChoice, row: int) -> TokenChoice:
    return TokenChoice(*(line[row : row + 1].copy() for line in choice))


def assert_drawn(tokens: Tensor, logits: Tensor, choice: TokenChoice, rounding: float = ROUNDING) -> None:
    """Each token's part of the oracle's distribution function holds the uniform number, and none is of weight zero."""
    mass = probabilities(logits.float(), choice).double()
    after = mass.cumsum(-1)
    after /= after[:, -1:]
    at = tokens.unsqueeze(1)
    end = after.gather(1, at).squeeze(1).numpy()
    weight = mass.gather(1, at).squeeze(1).numpy()
    assert (weight > 0).all()
    assert (choice.uniform >= end - weight - rounding).all()
    assert (choice.uniform <= end + rounding).all()


PARAMS = [
    {},
    {"temperature": 0.3},
    {"temperature": 50.0},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 50},
    {"top_k": 900},
    {"top_p": 0.9},
    {"top_p": 0.3},
    {"top_p": 0.9999},
    {"top_p": 1e-9},
    {"top_k": 40, "top_p": 0.7},
    {"top_k": 12, "top_p": 0.9, "min_p": 0.04, "temperature": 1.3},
    {"top_p": 0.8, "min_p": 0.01, "temperature": 0.7},
]


@pytest.mark.parametrize("params", PARAMS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("spread", [0.05, 1.0, 8.0])
def test_draws_from_the_defined_distribution(
    level: str, params: dict[str, float], dtype: torch.dtype, spread: float
) -> None:
    generator = torch.Generator().manual_seed(3)
    row = (torch.randn(1, 1111, generator=generator) * spread).to(dtype)
    logits = row.repeat(600, 1)
    choice = choice_of(600, **params)  # type: ignore[arg-type]
    tokens = CppKernels(level).choose(logits, choice)
    # Where the last of many nearly equal tokens of a nucleus lies, is settled by the sum of all before it.
    assert_drawn(tokens, logits, choice, 2e-3 if spread == 0.05 else ROUNDING * 10)
    # What is removed is the same: every token that weighs enough to be met is met.
    mass = probabilities(row.float(), choice_of(1, **params))[0]  # type: ignore[arg-type]
    assert set((mass > 1.5 / 600).nonzero().squeeze(1).tolist()) <= set(tokens.tolist())


ROWS = st.lists(st.sampled_from([-4.0, -1.5, -1.0, 0.0, 0.5, 0.75, 3.0, -math.inf]), min_size=1, max_size=400)


@quick
@given(
    row=ROWS,
    dtype=st.sampled_from(DTYPES),
    temperature=st.sampled_from([0.25, 1.0, 2.0]),
    min_p=st.sampled_from([0.0, 0.031, 0.4]),
    top_k=st.sampled_from([-1, 0, 1, 2, 5, 30, 399, 10_000]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.111]),
)
def test_equals_are_kept_or_removed_together(
    level: str,
    row: list[float],
    dtype: torch.dtype,
    temperature: float,
    min_p: float,
    top_k: int,
    top_p: float,
) -> None:
    logits = torch.tensor([row]).to(dtype).repeat(64, 1)
    choice = choice_of(64, temperature, min_p, top_k, top_p)
    tokens = CppKernels(level).choose(logits, choice)
    if max(row) == -math.inf:
        assert tokens.tolist() == [NOTHING_ALLOWED] * 64
    else:
        assert_drawn(tokens, logits, choice)


@pytest.mark.parametrize("vocab", [1, 2, 127, 128, 129, 255, 49_153])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_any_size_and_all_their_ends(level: str, vocab: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(40, vocab, generator=generator).to(dtype)
    uniform = torch.rand(40, generator=generator, dtype=torch.float64).numpy()
    uniform[:4] = 0.0, 1 - 2.0**-52, 2.0**-52, 0.5
    for params in ({}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.1}):
        choice = choice_of(40, uniform=uniform, **params)  # type: ignore[arg-type]
        assert_drawn(CppKernels(level).choose(logits, choice), logits, choice)


def test_a_row_draws_alone_what_it_draws_among_others(level: str) -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(23, 3001, generator=generator).mul_(3).bfloat16()
    numbers = np.random.default_rng(5)
    choice = TokenChoice(
        numbers.uniform(0.2, 2.0, 23),
        numbers.choice([0.0, 0.02], 23),
        numbers.choice([0, 1, 50, 1000], 23),
        numbers.choice([1.0, 0.9, 0.4], 23),
        numbers.uniform(size=23),
    )
    kernels = CppKernels(level)  # of three threads
    together = kernels.choose(logits, choice)
    assert_drawn(together, logits, choice)
    alone = [int(kernels.choose(logits[row : row + 1], row_of(choice, row))) for row in range(23)]
    assert together.tolist() == alone
    assert kernels.choose(logits.float(), choice).tolist() == alone


@pytest.mark.parametrize("params", [{}, {"top_k": 3, "top_p": 0.5, "min_p": 0.1}], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_faults_are_the_oracles(level: str, params: dict[str, float], dtype: torch.dtype) -> None:
    logits = torch.randn(8, 300, generator=torch.Generator().manual_seed(1)).to(dtype)
    logits[1] = -math.inf
    logits[2, 299] = math.nan
    logits[3, 0] = math.inf
    logits[4] = math.nan
    logits[5, :299] = -math.inf
    logits[6, 7] = 60_000.0
    logits[7] = -60_000.0
    choice = choice_of(8, **params)  # type: ignore[arg-type]
    tokens = CppKernels(level).choose(logits, choice)
    assert tokens[1:5].tolist() == [NOTHING_ALLOWED, NOT_FINITE, NOT_FINITE, NOT_FINITE]
    assert choose(logits, choice)[1:5].tolist() == tokens[1:5].tolist()
    assert tokens[5:7].tolist() == [299, 7]
    assert_drawn(tokens[[0, 7]], logits[[0, 7]], TokenChoice(*(line[[0, 7]] for line in choice)))


def test_a_row_without_weights_has_no_result(level: str) -> None:
    """And none that lies before the row is read."""
    choice = choice_of(2, min_p=1.5)
    assert CppKernels(level).choose(torch.zeros(2, 300), choice).tolist() == [NOT_FINITE, NOT_FINITE]


@pytest.mark.parametrize("params", [{"top_k": 1}, {"top_p": 0.5}, {"top_k": 200, "top_p": 0.5}], ids=str)
@pytest.mark.parametrize("logit", [0.0, -3.5])
def test_a_row_of_equal_logits_is_kept_completely(level: str, params: dict[str, float], logit: float) -> None:
    logits = torch.full((500, 700), logit)
    choice = choice_of(500, **params)  # type: ignore[arg-type]
    tokens = CppKernels(level).choose(logits, choice)
    assert tokens.tolist() == np.floor(choice.uniform * 700).astype(int).tolist()


def test_the_k_likeliest_share_the_nucleus_without_their_equals(level: str) -> None:
    """Of 1, 1, 0, 0, 0 the three likeliest hold e, e, 1: the two hold 0.84 of that, but not of all five."""
    logits = torch.tensor([[1.0, 0.0, 1.0, 0.0, 0.0]]).repeat(100, 1)
    for share, kept in ((0.84, {0, 2}), (0.85, {0, 1, 2, 3, 4})):
        choice = choice_of(100, top_k=3, top_p=share)
        tokens = CppKernels(level).choose(logits, choice)
        assert set(tokens.tolist()) == kept
        assert_drawn(tokens, logits, choice)


def test_drawn_tokens_follow_the_distribution(level: str) -> None:
    draws, vocab = 40_000, 60
    row = torch.randn(1, vocab, generator=torch.Generator().manual_seed(2)) * 2
    uniform = np.random.default_rng(7).uniform(size=draws)
    choice = choice_of(draws, 1.2, top_p=0.97, uniform=uniform)
    counts = CppKernels(level).choose(row.repeat(draws, 1), choice).bincount(minlength=vocab).double()
    expected = probabilities(row, row_of(choice, 0))[0].double() * draws
    assert (counts[expected == 0] == 0).all()
    cells = expected > 8
    statistic = ((counts - expected)[cells] ** 2 / expected[cells]).sum() / (cells.sum() - 1)
    assert float(statistic) < 1.9


def test_logits_are_only_read_and_parameters_must_fit(level: str) -> None:
    kernels = CppKernels(level)
    logits = torch.randn(3, 200)
    before = logits.clone()
    choice = choice_of(3, top_k=4, top_p=0.5, min_p=0.1)
    kernels.choose(logits, choice)
    choose(logits, choice)
    assert torch.equal(logits, before)
    for wrong in (choice._replace(uniform=np.zeros(2)), choice._replace(top_k=np.zeros(3))):
        with pytest.raises(ValueError, match="for logits"):
            kernels.choose(logits, wrong)
