"""Tokens of texts and pairs: special tokens survive a cut, and the longer text of a pair is cut first."""

from __future__ import annotations

import pytest

from headrace.compute.encoder.models import TextTokenizer
from headrace.core.embedding import TokenRow
from tests.doubles.tiny_encoder import WORDS, tokenizer

CLS, SEP = 2, 3


def ids(text: str) -> tuple[int, ...]:
    return tuple(WORDS.index(letter) for letter in text.split())


@pytest.fixture
def texts() -> TextTokenizer:
    return TextTokenizer(tokenizer())


def test_a_cut_text_keeps_its_special_tokens(texts: TextTokenizer) -> None:
    whole, cut = (CLS, *ids("a b c"), SEP), (CLS, *ids("a b"), SEP)
    assert texts.texts(["a b c"]) == [TokenRow(whole)]
    assert texts.texts(["a b c", "a"], limit=4) == [TokenRow(cut), TokenRow((CLS, *ids("a"), SEP))]
    assert texts.texts(["a b c"], limit=5) == [TokenRow(whole)]


def test_many_texts_keep_their_order(texts: TextTokenizer) -> None:
    letters = [chr(ord("a") + index % 26) for index in range(100)]
    assert texts.texts(letters) == [TokenRow((CLS, *ids(letter), SEP)) for letter in letters]


@pytest.mark.parametrize(
    ("one", "other", "limit", "first", "second"),
    [
        ("a b", "c d", None, "a b", "c d"),
        ("a b c d e", "f", 7, "a b c", "f"),
        ("a", "c d e f g", 7, "a", "c d e"),
        ("a b c d", "e f g h", 8, "a b", "e f g"),
        ("a b c d", "e f g h", 7, "a b", "e f"),
    ],
)
def test_the_longer_text_of_a_pair_is_cut(
    texts: TextTokenizer, one: str, other: str, limit: int | None, first: str, second: str
) -> None:
    expected = (CLS, *ids(first), SEP, *ids(second), SEP)
    assert texts.pairs([(one, other)], limit) == [TokenRow(expected, len(ids(first)) + 2)]


def test_a_limit_of_the_document_alone(texts: TextTokenizer) -> None:
    [row] = texts.pairs([("a b c", "d e f")], second_limit=1)
    assert row.tokens == (CLS, *ids("a b c"), SEP, *ids("d"), SEP)


def test_a_text_that_is_used_twice_is_not_changed(texts: TextTokenizer) -> None:
    rows = texts.pairs([("a b c d", "e f g h"), ("a b c d", "e")], limit=8)
    assert rows[1].tokens == (CLS, *ids("a b c d"), SEP, *ids("e"), SEP)


@pytest.mark.parametrize("limit", [1, 2])
def test_no_room_beside_the_special_tokens(texts: TextTokenizer, limit: int) -> None:
    with pytest.raises(ValueError, match="leaves no room"):
        texts.texts(["a"], limit)


def test_a_lone_surrogate(texts: TextTokenizer) -> None:
    with pytest.raises(ValueError, match="Unicode"):
        texts.texts(["a", "\ud800"])


def test_lower_case() -> None:
    assert TextTokenizer(tokenizer(), lower_case=True).texts(["A b"]) == TextTokenizer(tokenizer()).texts(
        ["a b"]
    )
