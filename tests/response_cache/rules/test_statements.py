"""What belongs to what: two texts with the same words, of which one has changed its place."""

from __future__ import annotations

import pytest

from headrace.response_cache.rules.guards import Veto, compare, traits, veto


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("What speed is 20 knots in mph?", "What speed is 20 mph in knots?"),
        ("By how much did it fall if it fell by 20?", "By how much did it fall if it fell to 20?"),
        ("My cat barely eats dry food", "My cat eats barely anything but dry food"),
        ("He owes me 400 dollars, what can I do?", "I owe him 400 dollars, what can I do?"),
        ("How do I tell her I forgive her?", "How do I ask her to forgive me?"),
        ("Is only the child invited?", "Is the only child invited?"),
        ("How do I make money from my blog?", "How do I make a blog about money?"),
        ("My flight was cancelled by the airline", "I cancelled my flight with the airline"),
        ("Where can I buy lamp oil?", "Where can I buy an oil lamp?"),
        ("What is a hurricane produced by?", "What does a hurricane produce?"),
    ],
)
def test_a_word_that_belongs_to_something_else(one: str, other: str) -> None:
    assert veto(compare(traits(one), traits(other))) is not None
    assert veto(compare(traits(other), traits(one))) is not None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("How does the heart pump blood?", "How is blood pumped by the heart?"),
        ("What can I cook with rice and eggs?", "What can I cook with eggs and rice?"),
        ("Is it better to rent or buy?", "Is it better to buy or rent?"),
        ("How do I stop my dog from barking?", "How can I get my dog to stop barking?"),
        ("I cannot log in, what can I do?", "I can't log in, what should I do?"),
        ("Should I eat before a workout?", "Should I eat before working out?"),
        ("how do i set up wi-fi", "how do i set up wifi"),
    ],
)
def test_the_same_in_another_order(one: str, other: str) -> None:
    assert veto(compare(traits(one), traits(other))) is None


@pytest.mark.parametrize(
    ("why", "one", "other"),
    [
        (Veto.NAMES, "How hot does mercury get?", "How hot does Mercury get?"),
        (Veto.NAMES, "Which companies owe us taxes?", "Which companies owe US taxes?"),
        (Veto.NAMES, "What if a server SHOULD do something?", "What if a server MAY do something?"),
        (Veto.NUMBERS, "What does grep -v do?", "What does grep -V do?"),
        (Veto.NUMBERS, "what does !x mean in C", "what does *x mean in C"),
        (Veto.NUMBERS, "Why is permission denied for ./run?", "Why is permission denied for /run?"),
    ],
)
def test_letters_and_symbols_as_they_are_written(why: Veto, one: str, other: str) -> None:
    assert veto(compare(traits(one), traits(other))) is why
    assert veto(compare(traits(one), traits(one))) is None
