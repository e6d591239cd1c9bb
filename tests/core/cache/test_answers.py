from __future__ import annotations

import pytest

from headrace.core.cache.answers import same_answer


@pytest.mark.parametrize(
    ("one", "other", "cosine", "same"),
    [
        ("Yes.", "yes", None, True),
        ("It takes  two days", "it takes two days!", 0.1, True),
        ("It takes two days.", "Two days are needed.", 0.95, True),
        ("It takes two days.", "Two days are needed.", 0.85, False),
        ("It takes two days.", "It takes three days.", 0.99, False),
        ("You can.", "You can not.", 0.99, False),
        ("A long answer", "Another long answer", None, False),
        ("+", "-", None, False),
        ("", "", None, True),
    ],
)
def test_when_two_answers_say_the_same(one, other, cosine, same):
    assert same_answer(one, other, cosine) is same
    assert same_answer(other, one, cosine) is same
