"""Ranges of numbers as regular expressions: each text of a number is matched exactly if its value is in the range."""

from __future__ import annotations

import itertools
import re
from decimal import Decimal
from fractions import Fraction
from functools import cache

import pytest
from llguidance import LLMatcher, LLTokenizer

from headrace.compute.grammar.decimals import Range, terminal, text_of

BOUNDS = [Decimal(each) for each in ("-12.5", "-1", "0", "0.05", "0.5", "10")]
NEAR = [Decimal(each) for each in ("0", "0.01", "-0.01", "0.000001", "-0.000001", "1", "-1", "90.1")]
VALUES = sorted({bound + near for bound in BOUNDS for near in NEAR})
TEXTS = sorted(
    {f"{value:f}" for value in VALUES}
    | {f"{value:f}0" if "." in f"{value:f}" else f"{value:f}.0" for value in VALUES}
    | {"-0", "-0.0", "0.0", "0.50", "00", "01", ".5", "5.", "0e5", "1e1"}
)
PLAIN = {text: Decimal(text) for text in TEXTS if re.fullmatch(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?", text)}
"""The numbers among them that are written plainly."""
BYTES = LLTokenizer("byte")


@cache
def matching(expression: str) -> set[str]:
    """The texts that a terminal matches."""
    made = LLMatcher.grammar_from_lark(f"start: T\nT: {expression}")
    matcher = LLMatcher(BYTES, made, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    found = set()
    for text in TEXTS:
        copy = matcher.deep_copy()
        if copy.try_consume_tokens(list(text.encode())) == len(text) and copy.is_accepting():
            found.add(text)
    return found


@pytest.mark.parametrize("integer", [False, True])
@pytest.mark.parametrize("step", [None, "0.01", pytest.param("0.5", marks=pytest.mark.slow), "5"])
def test_a_text_is_matched_exactly_if_its_value_is_in_the_range(integer, step):
    for low, high in itertools.product([None, *BOUNDS], repeat=2):
        for opened in itertools.product([False, True], repeat=2):
            numbers = Range(low, high, *opened, integer)
            if step is not None:
                numbers = numbers.with_step(Fraction(step))
            narrowed = numbers.narrowed()
            expression = terminal(narrowed) if narrowed else None
            found = matching(expression) if expression else set()
            wanted = {text for text, value in PLAIN.items() if numbers.has(value)}
            free = low is high is step is None and not integer
            assert found - wanted <= ({"0e5", "1e1"} if free else set()), numbers
            missing = {text for text in wanted - found if text not in ("-0", "-0.0")}
            if not (step or integer):
                assert not missing or low == high, (numbers, missing)
            assert {PLAIN[text] for text in missing} <= {Decimal(text) for text in found}, (numbers, missing)


def test_multiples_whose_last_digits_do_not_tell_have_no_terminal():
    assert terminal(Range(integer=True).with_step(Fraction(7)).narrowed() or Range()) is None
    few = Range(Decimal(1), Decimal(30), integer=True).with_step(Fraction(7)).narrowed()
    assert terminal(few or Range()) == '"7" | "14" | "21" | "28"'


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("1234567890123456789", "1234567890123456789"),
        ("-0", "0"),
        ("1.50", "1.5"),
        ("1e2", "100"),
        ("1e-7", "0.0000001"),
        ("1e300", "1e+300"),
        ("100000000000000000000", "100000000000000000000"),
    ],
)
def test_the_text_of_a_number_has_all_its_digits(value, text):
    assert text_of(Decimal(value)) == text
    assert Decimal(text) == Decimal(value)


def test_a_range_without_numbers_is_none():
    for numbers in (
        Range(Decimal(1), Decimal(0)),
        Range(Decimal(1), Decimal(1), open_low=True),
        Range(Decimal("0.2"), Decimal("0.8"), integer=True),
        Range(Decimal(1), Decimal(6), integer=True).with_step(Fraction(7)),
        Range(Decimal(0), Decimal("0.1"), open_low=True, open_high=True).with_step(Fraction("0.1")),
    ):
        assert numbers.narrowed() is None
