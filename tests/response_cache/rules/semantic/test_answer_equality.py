from __future__ import annotations

import pytest

from headrace.response_cache.rules.semantic.answer_equality import gist, same_answer


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


def test_long_answers_are_near_where_short_ones_may_not_be():
    common = "the card is sent by post and comes in a plain envelope with a letter that tells how to use it at home "
    one, other = common * 2 + "within 5 days", common * 2 + "within 6 days"
    assert same_answer(one, other, 0.95)
    assert not same_answer("within 5 days", "within 6 days", 0.95)


def test_a_gist_is_the_beginning():
    assert gist("  One \n two\tthree ") == "One two three"
    assert gist("word " * 500) == " ".join(["word"] * 120)
    assert gist("") == ""
