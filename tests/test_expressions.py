"""How long regular expressions may search."""

from __future__ import annotations

import pytest

from headrace.expressions import is_slow

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
    "(?:a|a)" * 30 + "b",
    "a{1,8}" * 20 + "b",
    "(?:a|b|c)" * 6,
    "(?:a?|b)(?:a?|b)(?:a?|b)(?:a?|b)(?:a?|b)(?:a?|b)",
    r"(?x)#[\n(a+)+$]",
    r"\c[(a+)+$]",
    r"\M-[(a+)+$]",
    r"\X+b",
    "a{2}?b",
]


@pytest.mark.parametrize("expression", PUBLISHED)
def test_published_expressions_are_not_slow(expression: str) -> None:
    assert not is_slow(expression)


@pytest.mark.parametrize("expression", SLOW)
def test_expressions_with_many_ways_are_slow(expression: str) -> None:
    assert is_slow(expression)
