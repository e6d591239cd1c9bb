from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.compute.sampling.choice import NOT_FINITE, NOTHING_ALLOWED, PIECE, _pieces, draw, likeliest

LAST = 1 - 2.0**-52


def naive(weights: list[float], uniform: float) -> int:
    target, held = uniform * sum(weights), 0.0
    for token, weight in enumerate(weights):
        held += weight
        if held > target:
            return token
    return max(token for token, weight in enumerate(weights) if weight > 0)


@pytest.mark.parametrize("vocab", [1, 2, PIECE - 1, PIECE, PIECE + 1, 5 * PIECE, 1000])
def test_is_the_inverse_distribution_function(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    # Sixteenths add up exactly in every precision, so every answer is determined.
    weights = torch.randint(0, 4, (64, vocab), generator=generator).float() / 16
    weights[:, 0] += 1 / 16
    uniform = torch.rand(64, generator=generator, dtype=torch.float64)
    uniform[0], uniform[1] = 0.0, LAST
    assert draw(weights, uniform).tolist() == [
        naive(row, u) for row, u in zip(weights.tolist(), uniform.tolist(), strict=True)
    ]


@settings(max_examples=200, derandomize=True)
@given(
    st.lists(st.sampled_from([0.0, 1e-30, 1e-7, 0.1, 0.3, 1.0]), min_size=1, max_size=3 * PIECE).filter(any),
    st.sampled_from([0.0, 1e-16, 0.1, 0.5, 1 / 3, 0.999999999, LAST]),
)
def test_never_a_token_of_no_probability(weights: list[float], uniform: float) -> None:
    token = int(draw(torch.tensor([weights]), torch.tensor([uniform], dtype=torch.float64)))
    assert weights[token] > 0


def test_rare_tokens_of_a_large_vocabulary_keep_their_probability() -> None:
    vocab = 150_000
    weights = torch.full((1, vocab), 1e-9)
    weights[0, 0] = 1.0
    rare = (vocab - 1) * 1e-9 / (1 + (vocab - 1) * 1e-9)
    middle = 1 - rare / 2
    token = int(draw(weights, torch.tensor([middle], dtype=torch.float64)))
    assert token == pytest.approx(vocab / 2, rel=1e-3)


def test_rows_are_independent() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(50, 777, generator=generator)
    uniform = torch.rand(50, generator=generator, dtype=torch.float64)
    alone = [int(draw(weights[i : i + 1], uniform[i : i + 1])) for i in range(50)]
    assert draw(weights, uniform).tolist() == alone


def test_rows_of_nan_give_some_token() -> None:
    token = int(draw(torch.full((1, 200), torch.nan), torch.tensor([0.5], dtype=torch.float64)))
    assert 0 <= token < 200


@pytest.mark.parametrize("vocab", [1, PIECE - 1, PIECE, 1000])
def test_likeliest_is_the_first_of_the_largest(vocab: int) -> None:
    logits = torch.randint(-3, 4, (64, vocab), generator=torch.Generator().manual_seed(1)).float()
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert likeliest(logits).tolist() == expected
    logits[0] = -torch.inf
    logits[3, vocab // 2] = torch.nan
    logits[5, vocab // 3] = torch.inf
    assert likeliest(logits).tolist() == [
        NOTHING_ALLOWED,
        *expected[1:3],
        NOT_FINITE,
        expected[4],
        NOT_FINITE,
        *expected[6:],
    ]


def test_whole_pieces_are_looked_at_where_they_lie() -> None:
    rows = torch.zeros(3, 2 * PIECE)
    assert _pieces(rows, 0.0).data_ptr() == rows.data_ptr()
    padded = _pieces(rows[:, 1:], -1.0)
    assert padded.shape == (3, 2, PIECE)
    assert padded[:, -1, -1].tolist() == [-1.0] * 3
