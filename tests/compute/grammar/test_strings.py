"""Patterns, lengths and formats of decoded strings, judged on the texts of their JSON."""

from __future__ import annotations

import json
import re

import pytest
from llguidance import LLMatcher, LLTokenizer

from headrace.compute.grammar import strings
from headrace.core.constraint import UnusableConstraint

BYTES = LLTokenizer("byte")
TEXTS = (
    *(
        "",
        "a",
        "b",
        "ab",
        "abc",
        "A-12",
        "a b",
        "12",
        "é",
        "ü_",
        "😀",
        "a\nb",
        "\n",
        "\r",
        "\t",
        '"',
        "\\",
        "\\n",
    ),
    *(
        "\x00",
        "\x1f",
        "\x1c",
        "\x7f",
        "\u00a0",
        "\ufeff",
        "\u0663",
        "\u2028",
        "x" * 9,
        "/",
        "a/b",
        "]",
        "-",
        "^a$",
    ),
)


def accepted(expression: str) -> set[str]:
    """The decoded strings whose text, as the module writes it, a terminal matches."""
    matcher = LLMatcher(BYTES, LLMatcher.grammar_from_lark(f"start: T\nT: {expression}"), log_level=0)
    found = set()
    for text in TEXTS:
        copy = matcher.deep_copy()
        tokens = list(strings.literal(text).encode())
        if not matcher.is_error() and copy.try_consume_tokens(tokens) == len(tokens) and copy.is_accepting():
            found.add(text)
    return found


def test_a_literal_is_json_of_the_string():
    for text in TEXTS:
        assert json.loads(strings.literal(text)) == text
    assert accepted(strings.literals(TEXTS)) == set(TEXTS)
    assert accepted(strings.ANY_STRING) == set(TEXTS)


def test_lengths_count_characters():
    assert accepted(strings.lengths(1, 2)) == {text for text in TEXTS if 1 <= len(text) <= 2}
    assert accepted(strings.lengths(3, None)) == {text for text in TEXTS if len(text) >= 3}


PATTERNS = (
    *(
        "a",
        "^a",
        "b$",
        "^a$",
        "^$",
        "",
        ".",
        "^.$",
        "^..$",
        "^[ab]+$",
        "^[^ab]+$",
        "a|b",
        "^a|b$",
        "(^a|b$)",
        "^(a|b)",
    ),
    *(
        r"^\w+$",
        r"\W",
        r"^\W$",
        r"\d",
        r"^\D+$",
        r"\s",
        r"^\S+$",
        r"^[\s\d]+$",
        r"^[^\s]$",
        r"^[\S]$",
        r"\n",
        r"^[\n]$",
    ),
    *(
        r"^[\x00-\x1f]$",
        r"^[\"\\]$",
        r"^[^\"\\]$",
        r"\\n",
        r"\/",
        "/",
        r"^[\]\-]$",
        r"^[a-]$",
        r"^\^a\$$",
        r"^\u00e9$",
    ),
    *(
        "^(?:ab){1,2}c?$",
        "^a{1}b{0,1}$",
        "^x{9}$",
        "^(?<n>a)b*$",
        r"^[\w-]+$",
        "^(a|)(b|)$",
        r"^\t$",
        "^[a-a]$",
    ),
)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_is_what_all_dialects_mean_or_widely_what_any_means(pattern):
    python = re.sub(r"\(\?<(?!=|!)", "(?P<", pattern)
    strict = re.sub(r"(?<!\\)\$(?=$|\))", r"\\Z", python)

    def found(source: str, flags: int = 0) -> set[str]:
        return {text for text in TEXTS if re.search(source, text, flags)}

    narrow, wide = (
        accepted(strings.pattern_terminal(pattern)),
        accepted(strings.pattern_terminal(pattern, wide=True)),
    )
    other = re.RegexFlag(0) if "s" in pattern.lower() else re.ASCII  # ECMA-262's, but for \\s
    assert narrow <= found(strict) & found(strict, other)
    assert wide >= found(python) | found(python, other)
    disputed = {
        "\u00a0",
        "\u0663",
        "\u2028",
        "\ufeff",
        "\x1c",
        "\x1f",
        "\r",
        "\n",
        "é",
        "ü_",
        "a\nb",
        "\x00",
        "\x85",
    }
    assert found(strict) - narrow <= disputed
    assert wide - found(python) <= disputed


@pytest.mark.parametrize(
    ("pattern", "why"),
    [
        ("(?=a)", "look-around"),
        ("(?<!a)b", "look-around"),
        ("(a", "unclosed group"),
        ("a)", "unopened group"),
        (r"(a)\1", r"escape \\1"),
        (r"\bfoo", r"escape \\b"),
        ("a^b", "anchor inside"),
        ("(^a)*", "anchor that is repeated"),
        ("(?i)a", "flags"),
        ("*a", "nothing to repeat"),
        ("a**", "multiple repeat"),
        ("[b-a]", "wrong range"),
        ("[a", "ends too early"),
        ("a{3,2}", "out of order"),
        ("a{1000000}", "repeats"),
        (r"\ud800", "no character"),
        (r"\xz1", "hexadecimal"),
        ("[[:alpha:]]", "POSIX"),
        ("(" * 40 + "a" + ")" * 40, "nested"),
        ("a\\", "ends too early"),
    ],
)
def test_what_no_dialect_means_or_no_grammar_has_is_refused(pattern, why):
    with pytest.raises(UnusableConstraint, match=why):
        strings.pattern_terminal(pattern)


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        (
            "date",
            ["2024-02-29", "2000-02-29", "1999-12-31"],
            ["2023-02-29", "1900-02-29", "0000-01-01", "2024-13-01"],
        ),
        ("time", ["12:30:59Z", "00:00:00.5+05:30"], ["24:00:00Z", "12:30:60Z", "12:30Z", "12:30:00"]),
        ("date-time", ["2024-02-29T00:00:00Z"], ["2023-02-29T00:00:00Z", "2024-01-01 00:00:00Z"]),
        ("duration", ["P1Y2M3DT4H5M6S", "PT1H", "P4W", "P1D"], ["P", "PT", "P1DT", "1D", "P1YT"]),
        ("ipv4", ["127.0.0.1", "255.255.255.255"], ["256.1.1.1", "1.2.3", "01.2.3.4"]),
        (
            "ipv6",
            ["::", "::1", "1::", "1:2:3:4:5:6:7:8", "1::8", "1:2:3:4:5:6:7::"],
            ["1::2::3", "1:2", "12345::", ":::"],
        ),
        ("uuid", ["f81d4fae-7dec-11d0-a765-00a0c91e6bf6"], ["f81d4fae7dec11d0a76500a0c91e6bf6", "g" * 8]),
        ("hostname", ["a", "a-b.example"], ["-a", "a-", "a..b", "a" * 64, ".".join(["a" * 60] * 5)]),
        ("email", ["a@b.co", "a.b+c@d"], ["a", "@b", "a@", ".a@b", "a@-b"]),
        ("uri", ["http://a:80/b?c#d", "urn:a:b", "http://[::1]/"], ["a", "http://a b", "http://[1]/", ":a"]),
    ],
)
def test_formats_are_held_to_their_standard(name, good, bad):
    expression = " & ".join(f"({each})" for each in strings.format_terminals(name))
    matcher = LLMatcher(BYTES, LLMatcher.grammar_from_lark(f"start: T\nT: {expression}"), log_level=0)

    def matches(text: str) -> bool:
        copy, tokens = matcher.deep_copy(), list(f'"{text}"'.encode())
        return bool(copy.try_consume_tokens(tokens) == len(tokens) and copy.is_accepting())

    assert [text for text in good if not matches(text)] == []
    assert [text for text in bad if matches(text)] == []
