"""Which regular expressions of tokenizers may take long for a short text."""

from __future__ import annotations

import threading

import pytest
import tokenizers
from tokenizers import Regex, normalizers, pre_tokenizers

from headrace.text.splitting import expressions, is_slow, may_take_long
from headrace.text.tokenizer import SHORT_CHARACTERS, Tokenizer

PUBLISHED = [
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r" ?[^(\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+",
    r"\d{1,3}(?=(?:\d{3})*\b)",
    r"(?=(\d{3})+(?!\d))",
    r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+",
    r"[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*+",
    r"\p{Han}+",
    r"\s?\p{L}+|[]x]|[^]x]|a{2}|{|}",
]
SLOW = [
    "(a+)+$",
    "(a*)*b",
    "(?:a|a)*b",
    "(?:a|ab)+c",
    "(a?){30}b",
    "(?:a{1,3})*b",
    "(?:a+){2,}b",
    "a*a*b",
    r"\s*\w*\s*\w*$",
    "a?a?a?a?a?a?a?a?aaaaaaaa",
    r"(a)\1",
    r"(?<x>a|b\g<x>)",
    "(?:a+b?)*c",
    "((a*b)c*)d",
    "a{0,1000}a{0,1000}b",
    "a+*b",
    "a{2}+b",
    "(?~a)",
    "(a",
    "[a",
    "a)",
    "(" * 20_000,
]


@pytest.mark.parametrize("expression", PUBLISHED)
def test_published_expressions_are_not_slow(expression: str) -> None:
    assert not is_slow(expression)


@pytest.mark.parametrize("expression", SLOW)
def test_expressions_with_many_ways_are_slow(expression: str) -> None:
    assert is_slow(expression)


def made(*parts: pre_tokenizers.PreTokenizer, normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({letter: at for at, letter in enumerate("ab!")}, []))
    backend.pre_tokenizer = pre_tokenizers.Sequence(list(parts))
    if normalizer is not None:
        backend.normalizer = normalizer
    return Tokenizer(backend)


def test_expressions_are_found_in_all_parts() -> None:
    split = pre_tokenizers.Split(Regex("a+"), "isolated")
    tokenizer = made(split, pre_tokenizers.ByteLevel(), normalizer=normalizers.Replace(Regex("(b+)+c"), "x"))
    assert list(expressions(tokenizer.backend)) == ["(b+)+c", "a+"]
    assert may_take_long(tokenizer.backend)


def test_only_a_tokenizer_without_slow_expressions_encodes_on_the_calling_thread() -> None:
    plain = made(pre_tokenizers.Split(Regex("a+|b"), "isolated"))
    slow = made(pre_tokenizers.Split(Regex("(a+)+$"), "isolated"))
    assert plain.is_short(SHORT_CHARACTERS)
    assert not plain.is_short(SHORT_CHARACTERS + 1)
    assert not slow.is_short(1)
    assert plain.encode("aab") == slow.encode("aab") == [0, 0, 1]


def test_a_slow_expression_does_not_hold_the_interpreter() -> None:
    """While one thread searches, another must run: the texts are short, and one takes some tenths of a second."""
    slow = made(pre_tokenizers.Split(Regex("(a+)+$"), "isolated"))
    begun, turns = threading.Event(), 0

    def work() -> None:
        begun.set()
        for length in range(14, 20):
            slow.encode("a" * length + "!")

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait()
    while thread.is_alive():
        turns += 1
        thread.join(0.0005)
    assert turns > 3
