"""Rules: what derives no text is left out, and terminals that match nothing are found."""

from __future__ import annotations

import pytest

from headrace.compute.grammar import rules as module
from headrace.compute.grammar.rules import Repeat, Rules, all_of, matches, matches_nothing
from headrace.core.constraint import UnusableConstraint


def test_what_derives_no_text_is_left_out():
    rules = Rules("r")
    letter = rules.terminal('"a"')
    endless = rules.new()
    rules.alternatives[endless].append((letter, endless))
    nested = rules.new((endless, letter), (letter,))
    start = rules.new((nested, Repeat((letter, endless), 0, None)), (Repeat((endless,), 1, 2),))
    productive = rules.productive()
    assert productive == {nested, start}
    assert rules.lines(start, productive) == ["r_2: r_1", "r_1: R_0", 'R_0: "a"']


def test_repeats_and_empty_alternatives_are_written_as_lark():
    rules = Rules("r")
    item = rules.new((rules.terminal("/a/"),))
    start = rules.new((Repeat((item,), 2, 5),), (), (Repeat((item,), 0, None),))
    assert rules.lines(start, rules.productive())[0] == 'r_1: (r_0){2,5} | "" | (r_0){0,}'


def test_a_rule_that_is_an_alternative_of_itself_is_found():
    rules = Rules("r")
    first, second = rules.new(), rules.new()
    rules.alternatives[first] += [(second,), (rules.terminal("/a/"),)]
    assert rules.circular() is None
    rules.alternatives[second].append((first,))
    assert rules.circular() in (first, second)
    rules.alternatives[second] = [(rules.terminal("/b/"), first)]
    assert rules.circular() is None


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("/a/", False),
        (all_of(["/ab/", "/ac/"]), True),
        (all_of(["/[a-c]*/", '~("")', "/[c-e]*/"]), False),
        (all_of(["/(ab)*/", "/b.*/"]), True),
    ],
)
def test_a_terminal_that_matches_nothing(expression, expected):
    assert matches_nothing(expression) == expected


def test_the_texts_that_a_terminal_matches():
    assert matches("/a[bc]*/", ["a", "abc", "ad", "", "é"]) == {"a", "abc"}
    assert matches(all_of(["/a/", "/b/"]), ["a", "b"]) == set()


def test_a_wrong_expression_and_too_many_rules_are_errors(monkeypatch):
    with pytest.raises(UnusableConstraint):
        matches_nothing("/(/")
    monkeypatch.setattr(module, "MAX_RULES", 3)
    rules = Rules("r")
    assert [rules.new() for _ in range(3)] == [0, 1, 2]
    with pytest.raises(UnusableConstraint, match="more than 3 combinations"):
        rules.new()
