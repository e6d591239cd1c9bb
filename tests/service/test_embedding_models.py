"""Inputs as rows: prompts, token ids, cuts, and errors that name the field."""

from __future__ import annotations

import base64
import json
import struct

import numpy as np
import pytest

from headrace.core.request import InvalidParameter
from headrace.service.embedding_models import (
    InputTooLong,
    as_base64,
    as_json,
    check_truncation,
    cosine,
    finish,
    pair_rows,
    prompt_of,
    side_rows,
    text_rows,
)
from tests.doubles.pooling_models import LetterModel, LetterPairs

MODEL = LetterModel()


def test_texts_get_the_prompt_and_token_ids_do_not() -> None:
    rows = text_rows(MODEL, ["ab", [3, 4]], param="input", prompt="z")
    assert [row.tokens for row in rows] == [(26, 25, 0, 1, 27), (3, 4)]


def test_token_ids_are_cut_too() -> None:
    assert text_rows(MODEL, [[3, 4, 5]], param="input", limit=2)[0].tokens == (3, 4)


@pytest.mark.parametrize(("asked", "limit"), [(None, None), (-1, 12), (5, 5), (12, 12)])
def test_truncation(asked: int | None, limit: int | None) -> None:
    assert check_truncation(MODEL, asked) == limit


@pytest.mark.parametrize("asked", [0, 13])
def test_truncation_beyond_the_model(asked: int) -> None:
    with pytest.raises(InvalidParameter, match="-1 or 1 to 12"):
        check_truncation(MODEL, asked)


def test_prompts() -> None:
    assert prompt_of(MODEL, None) == ""
    assert prompt_of(MODEL, "query") == "qq"
    with pytest.raises(InvalidParameter, match="has the prompts document, query, not 'none'"):
        prompt_of(MODEL, "none")


def test_queries_and_documents_have_their_prompts_and_are_computed_once() -> None:
    rows, at = side_rows(MODEL, [("a", "b"), ("a", "c"), ("a", "b")], "documents", None, None)
    assert [row.tokens for row in rows] == [(26, 16, 16, 0, 27), (26, 1, 27), (26, 2, 27)]
    assert at == [(0, 1), (0, 2), (0, 1)]


def test_the_limit_of_documents() -> None:
    rows, _ = side_rows(MODEL, [("abcd", "efgh")], "documents", None, 4)
    assert [len(row.tokens) for row in rows] == [8, 4]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (["a" * 20], r"input\[0\] has 22 tokens; letters reads at most 12"),
        (["a", [1] * 13], r"input\[1\] has 13 tokens"),
    ],
)
def test_inputs_that_are_too_long(inputs: list[str | list[int]], message: str) -> None:
    with pytest.raises(InputTooLong, match=message):
        text_rows(MODEL, inputs, param="input")


def test_token_ids_that_do_not_exist_and_broken_text() -> None:
    with pytest.raises(InvalidParameter, match=r"input\[1\] has the token id 99; ids are 0 to 27"):
        text_rows(MODEL, [[1], [99]], param="input")
    with pytest.raises(InvalidParameter, match="input: text must be valid Unicode"):
        text_rows(MODEL, ["\ud800"], param="input")


def test_a_text_with_a_token_that_the_model_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODEL, "vocab_size", 3)
    with pytest.raises(
        InvalidParameter, match=r"input\[0\]: the tokenizer gives .* 27, which letters does not have"
    ):
        text_rows(MODEL, ["abz"], param="input")


def test_pairs() -> None:
    [row] = pair_rows(LetterPairs(), [("ab", "cd")], param="documents")
    assert row == ((26, 0, 1, 27, 2, 3, 27), 4)
    with pytest.raises(InputTooLong, match=r"documents\[0\]"):
        pair_rows(LetterPairs(), [("ab", "c" * 20)], param="documents")


VECTORS = np.array([[3.0, 4.0, 12.0], [0.0, 0.0, 0.0]], np.float32)


def test_fewer_dimensions_are_normalized_again() -> None:
    np.testing.assert_allclose(finish(VECTORS, 2, normalize=True), [[0.6, 0.8], [0, 0]])
    np.testing.assert_allclose(finish(VECTORS, 2, normalize=False), [[3, 4], [0, 0]])
    np.testing.assert_allclose(finish(VECTORS, None, normalize=True)[0], [3 / 13, 4 / 13, 12 / 13], rtol=1e-6)


def test_cosine() -> None:
    one = np.array([[1.0, 0.0], [2.0, 2.0]], np.float32)
    other = np.array([[5.0, 0.0], [0.0, 1.0]], np.float32)
    assert cosine(one, other) == pytest.approx([1.0, 2**-0.5])
    assert cosine(one[:1], other) == pytest.approx([1.0, 0.0])


def test_encodings() -> None:
    assert struct.unpack("<3f", base64.b64decode(as_base64(VECTORS[0]))) == (3.0, 4.0, 12.0)
    assert json.loads(as_json(VECTORS[0])) == [3.0, 4.0, 12.0]
