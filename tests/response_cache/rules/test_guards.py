"""Questions that look alike and are not, and questions that look different and are the same."""

from __future__ import annotations

import pytest

from headrace.response_cache.rules.guards import Veto, compare, traits, veto

DIFFERENT = [
    (Veto.NUMBERS, "What can I buy for 20 dollars?", "What can I buy for 50 dollars?"),
    (Veto.NUMBERS, "How does a HP M604n compare?", "How does a HP M604dn compare?"),
    (Veto.NUMBERS, "Train no. 19708?", "Train no. 19707?"),
    (Veto.NUMBERS, "What is C++ used for?", "What is C# used for?"),
    (Veto.NUMBERS, "What is C used for?", "What is C++ used for?"),
    (Veto.NUMBERS, "What does ~ mean?", "What does % mean?"),
    (Veto.NUMBERS, "news of 2016", "news of 2015"),
    (Veto.NUMBERS, "a salary of 2.8 lakhs", "a salary of 2.05 lakhs"),
    (Veto.NUMBERS, "wait two weeks", "wait three weeks"),
    (Veto.NUMBERS, "What is 5*3?", "What is 5-3?"),
    (Veto.NUMBERS, "What is 5 * 3?", "What is 5 / 3?"),
    (Veto.NUMBERS, "What is 5+3?", "What is 5-3?"),
    (Veto.NUMBERS, "What is 5 plus 3?", "What is 5 minus 3?"),
    (Veto.NUMBERS, "What is 8-4-2?", "What is 8-4*2?"),
    (Veto.NUMBERS, "Simplify x * y", "Simplify x - y"),
    (Veto.NUMBERS, "What is (2 + 3) * 4?", "What is (2 + 3) - 4?"),
    (Veto.NUMBERS, "What is 5*3?", "What is 5*-3?"),
    (Veto.NUMBERS, "Is it -5 degrees?", "Is it 5 degrees?"),
    (Veto.NUMBERS, "an overdraft of -$5", "an overdraft of $5"),
    (Veto.OPPOSITE, "Who won the second race?", "Who won the third race?"),
    (Veto.NUMBERS, "Who won the first race?", "Who won the tenth race?"),
    (Veto.OPPOSITE, "What is half of the cake?", "What is a quarter of the cake?"),
    (Veto.NUMBERS, "I am thirteen", "I am nineteen"),
    (Veto.OPPOSITE, "a table at 3 am", "a table at 3 pm"),
    (Veto.OPPOSITE, "a table at 3 a.m.", "a table at 3 p.m."),
    (Veto.OPPOSITE, "Multiply the numbers", "Divide the numbers"),
    (Veto.NEGATION, "I can log in", "I can't log in"),
    (Veto.NEGATION, "Why does it not work?", "Why does it work?"),
    (Veto.NEGATION, "foods with sugar", "foods without sugar"),
    (Veto.OPPOSITE, "Turn dark mode on", "Turn dark mode off"),
    (Veto.OPPOSITE, "How do I enable 2FA?", "How do I disable 2FA?"),
    (Veto.OPPOSITE, "Is gambling legal here?", "Is gambling illegal here?"),
    (Veto.OPPOSITE, "What are the advantages of remote work?", "What are the disadvantages of remote work?"),
    (Veto.OPPOSITE, "the shortest period", "the longest period"),
    (Veto.NAMES, "A clinic near Morgan County", "A clinic near Union County"),
    (Veto.NAMES, "What is the capital of Austria?", "What is the capital of Australia?"),
    (Veto.NAMES, "How messi is better than Ronaldo?", "How is Ronaldo better than Messi?"),
    (Veto.ORDER, "Flights from Paris to Rome", "Flights from Rome to Paris"),
    (Veto.ORDER, "book a cheap flight from Paris to Rome", "I want flights from Rome to Paris"),
    (Veto.ORDER, "move money to savings", "move money from savings"),
    (Veto.ORDER, "Does a cat chase a dog?", "Does a dog chase a cat?"),
    (Veto.NUMBERS, "How much vitamin C do I need?", "How much vitamin D do I need?"),
    (Veto.NUMBERS, "Open https://example.com/a", "Open https://example.com/b"),
    (Veto.NUMBERS, "What does map_keys return?", "What does map_values return?"),
    (Veto.NAMES, "What does getUser return?", "What does getUsers return?"),
    (Veto.OPPOSITE, "fruits with seeds", "seedless fruits"),
    (Veto.CLASS, "Can my mother live here?", "Can my mother-in-law live here?"),
    (Veto.CLASS, "Explain photosynthesis", "Explain photosynthesis in Spanish"),
    (Veto.CLASS, "How do I sort a list?", "How do I sort a list in Java?"),
    (Veto.SUBSTITUTE, "What does an employer ask?", "What does an employee ask?"),
    (Veto.SUBSTITUTE, "How do I remove a red wine stain?", "How do I remove a grease stain?"),
    (Veto.ASKED, "Is tea healthier than coffee?", "Is tea less healthy than coffee?"),
    (Veto.ASKED, "Is the train as fast as the bus?", "Is the train faster than the bus?"),
    (Veto.ASKED, "give me every answer", "give me one answer"),
    (Veto.ASKED, "do most people like it", "do few people like it"),
    (Veto.ASKED, "How does a pump work?", "Why does a pump work?"),
    (Veto.ASKED, "What is a mortgage?", "How do I get a mortgage?"),
    (Veto.ORDER, "Am I eligible?", "Is he eligible?"),
    (Veto.ORDER, "should I call them", "should they call me"),
    (Veto.ASKED, "Is my flight delayed?", "Was my flight delayed?"),
    (Veto.ASKED, "Has the shop closed?", "Will the shop close?"),
    (Veto.ASKED, "What did I order?", "What should I order?"),
    (Veto.ASKED, "Can I park here?", "Must I park here?"),
    (Veto.ORDER, "How do I pay with a gift card?", "How do I pay for a gift card?"),
    (Veto.NAMES, "Can I work on a visa?", "Can I work for Visa?"),
    (Veto.ORDER, "What can I do on a layover?", "What can I do about a layover?"),
    (Veto.ORDER, "Does Rome conquer Greece?", "Does Greece conquer Rome?"),
    (Veto.ORDER, "first salt and then sugar", "first sugar and then salt"),
    (Veto.ORDER, "port software from .NET to Java", "port software from Java to .NET"),
]
ALIKE = [
    ("How do I reset my PIN?", "how can I reset the PIN"),
    ("It takes 2 weeks", "It takes two weeks"),
    ("A price of 1,000 euros", "A price of 1000 euros"),
    ("What is 5 - 3?", "what is 5-3"),
    ("What is 5 minus 3?", "what is 5 - 3"),
    ("a table at 3 p.m.", "a table at 3 pm"),
    ("How do I reset my e-mail password - and my PIN?", "How do I reset my e-mail password, and my PIN?"),
    ("news of Covid-19", "news of Covid 19"),
    ("I can't log in", "I cannot log in"),
    ("Which is the best country to study in?", "Which country is best to study in?"),
    ("Please cancel my order", "cancel my order please"),
    ("Do you know how to play guitar", "how do I play the guitar?"),
    ("WHERE IS MY CARD", "where is my card"),
    ("which is better, tea or coffee", "which is better, coffee or tea"),
    ("the difference between a crow and a raven", "the difference between a raven and a crow"),
    ("what should I see in Paris", "in Paris, what should I see"),
    ("if my card is lost, what do I do", "what do I do if my card is lost"),
    ("How large is the lake?", "How big is the lake?"),
    ("I was wondering why the sky is blue", "why is the sky blue"),
    ("What is the population of France?", "what is the population of france?"),
]


@pytest.mark.parametrize(("reason", "one", "other"), DIFFERENT)
def test_what_an_encoder_overlooks(reason, one, other):
    assert veto(compare(traits(one), traits(other))) == reason
    assert veto(compare(traits(other), traits(one))) == reason


@pytest.mark.parametrize(("one", "other"), ALIKE)
def test_what_may_be_served(one, other):
    assert veto(compare(traits(one), traits(other))) is None
    assert veto(compare(traits(other), traits(one))) is None


@pytest.mark.parametrize(
    "text", [pair[0] for pair in ALIKE] + [pair[2] for pair in DIFFERENT] + ["", "?!", "猫は", "from A to A"]
)
def test_a_question_does_not_differ_from_itself(text):
    difference = compare(traits(text), traits(text))
    assert not any(difference)
    assert veto(difference) is None


def test_shares_of_content_words():
    difference = compare(traits("cheap red shoes"), traits("cheap blue shoes and socks"))
    assert difference.unshared == pytest.approx(3 / 7)
    assert difference.substituted == pytest.approx(2 / 7)
    assert difference.moved == 0.0


@pytest.mark.parametrize(
    "text", ["What is the weather today?", "the latest iPhone", "who is currently president"]
)
def test_questions_about_now(text):
    assert traits(text).timely
    assert not traits(
        text.replace("today", "there").replace("latest", "first").replace("currently", "the")
    ).timely


@pytest.mark.parametrize(
    ("text", "pointing"),
    [
        ("What is the output of this program?", True),
        ("Solve the following equation", True),
        ("Explain the text above", False),
        ("summarize the above text", True),
        ("What happened this year?", False),
        ("How do I cook rice?", False),
    ],
)
def test_questions_about_something_that_is_not_in_them(text, pointing):
    assert traits(text).pointing == pointing


@pytest.mark.parametrize("word", ["a", "1", "a1.-"])
def test_a_hostile_text_takes_linear_time(word):
    """In quadratic time this would take more than a minute."""
    found = traits(word * 60_000)
    assert veto(compare(found, found)) is None
