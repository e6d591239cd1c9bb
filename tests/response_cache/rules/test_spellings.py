"""Forms and slips of one word, and words that only look like that."""

from __future__ import annotations

import re

import pytest

from headrace.response_cache.rules.guards import compare, traits, veto
from headrace.response_cache.rules.spellings import alternatives, one_word, stem, unify


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("translate", "translation"),
        ("describe", "description"),
        ("invent", "inventor"),
        ("bacterium", "bacteria"),
        ("difference", "diffrence"),
        ("remove", "remvoe"),
        ("address", "adress"),
        ("taken", "take"),
    ],
)
def test_one_word(one: str, other: str) -> None:
    assert one_word(stem(one), stem(other))
    assert one_word(stem(other), stem(one))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("desert", "dessert"),
        ("stalactite", "stalagmite"),
        ("macroeconomics", "microeconomics"),
        ("grape", "grapefruit"),
        ("interviewer", "interviewee"),
        ("mentor", "mentee"),
        ("payer", "payee"),
        ("principal", "principle"),
        ("stationary", "stationery"),
        ("angle", "angel"),
    ],
)
def test_two_words(one: str, other: str) -> None:
    assert not one_word(stem(one), stem(other))
    assert not one_word(stem(other), stem(one))


def test_a_word_without_a_vowel_left_keeps_its_ending() -> None:
    assert stem("string") == "string"
    assert stem("stressed") == stem("stress")


EQUAL = [
    ("the 1st man", "the first man"),
    ("the 19th century", "the nineteenth century"),
    ("the 21st president", "the twenty-first president"),
    ("at 7 am", "at 7:00 a.m."),
    ("at 7am", "at seven am"),
    ("at 6 o'clock", "at 6"),
    ("$20", "twenty dollars"),
    ("20\u20ac", "20 euros"),
    ("$1.5 million", "1500000 dollars"),
    ("10%", "ten per cent"),
    ("5km", "five kilometers"),
    ("two hundred and five", "205"),
    ("five hundred thousand", "500,000"),
    ("half a dozen eggs", "6 eggs"),
    ("World War II", "world war 2"),
]
DIFFERENT = [
    ("a dozen roses", "half a dozen roses"),
    ("$20", "20 euros"),
    ("20 dollars", "20%"),
    ("the 19th century", "the 19 centuries"),
    ("two hundred", "two thousand"),
    ("at 7 am", "at 7:30 am"),
    ("5 km", "5 miles"),
    ("3 eggs and 2 apples", "2 eggs and 3 apples"),
    ("what is 3 minus 5", "what is 5 minus 3"),
    ("twenty one", "twenty-two"),
]


@pytest.mark.parametrize(("one", "other"), EQUAL)
def test_equal_numbers_have_one_form(one: str, other: str) -> None:
    assert veto(compare(traits(f"tell me about {one}"), traits(f"tell me about {other}"))) is None


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_different_numbers_stay_different(one: str, other: str) -> None:
    assert veto(compare(traits(f"tell me about {one}"), traits(f"tell me about {other}"))) is not None


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("a second card for third parties", "a second card for third parties"),
        ("one way", "one way"),
        ("one hundred ways", "100 ways"),
        ("from nine to five", "from 9 to 5"),
        ("seven eleven", "7 11"),
        ("-$5", "-5 $ dollars"),
        ("\u732b\u306f", "\u732b\u306f"),
        ("", ""),
    ],
)
def test_the_written_form(text: str, written: str) -> None:
    assert unify(text) == written


@pytest.mark.parametrize(
    "text", ["9" * 100_000 + "th", "two " * 50_000, "1 million " * 20_000, "$" * 100_000]
)
def test_a_hostile_text_takes_linear_time(text: str) -> None:
    assert unify(text)


def test_of_two_alternatives_the_longer_one_is_found() -> None:
    pattern = re.compile(f"(?:{alternatives(['set', 'set up', 'sat', 'a.b'])})")
    assert [pattern.match(text)[0] for text in ("set up", "setup", "sat", "a.b")] == [
        "set up",
        "set",
        "sat",
        "a.b",
    ]  # type: ignore[index]
    assert pattern.match("axb") is None
