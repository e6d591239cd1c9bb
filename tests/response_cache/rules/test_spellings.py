"""Forms and slips of one word, and words that only look like that."""

from __future__ import annotations

import pytest

from headrace.response_cache.rules.spellings import one_word, stem


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
