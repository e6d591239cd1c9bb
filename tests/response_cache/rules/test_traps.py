"""Guards over pairs that an encoder places close together although their answers differ, and over paraphrases."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

from headrace.response_cache.rules.guards import Veto, compare, traits, veto
from tests.response_cache.rules.lookalikes import ALIKE, PARAPHRASES
from tests.response_cache.rules.traps import BY_KIND, LISTED, SAME, UNSEEN, pairs


def test_a_trap_is_vetoed_in_both_directions_and_without_capitals() -> None:
    passed = [
        (first, second)
        for one, other in [*pairs(LISTED), *pairs(UNSEEN), *chain.from_iterable(BY_KIND.values())]
        for first, second in ((one, other), (other, one), (one.lower(), other.lower()))
        if veto(compare(traits(first), traits(second))) is None
    ]
    assert not passed


def test_paraphrases_pass() -> None:
    vetoed = [pair for pair in SAME if veto(compare(*map(traits, pair))) is not None]
    assert len(vetoed) <= 1, vetoed


@pytest.mark.parametrize("kind", ALIKE)
def test_questions_that_only_look_alike_are_vetoed(kind: str) -> None:
    for one, other in ALIKE[kind]:
        for first, second in ((one, other), (other, one)):
            assert veto(compare(traits(first), traits(second))) is not None, (first, second)


def test_most_questions_that_say_the_same_pass() -> None:
    vetoed = [pair for pair in PARAPHRASES if veto(compare(*map(traits, pair))) is not None]
    assert len(vetoed) <= 0.08 * len(PARAPHRASES), vetoed


def _unseen(label: str) -> Iterator[tuple[str, str, str]]:
    """Kinds and pairs of authors who did not know the guards."""
    for line in (Path(__file__).parent / "unseen_pairs.tsv").read_text("utf-8").splitlines()[1:]:
        _, found, kind, one, other = line.split("\t")
        if found == label:
            yield kind, one, other


def test_pairs_of_other_authors_that_only_look_alike_are_vetoed() -> None:
    passed = [
        (kind, *pair)
        for kind, one, other in _unseen("different")
        for pair in ((one, other), (other, one))
        if veto(compare(*map(traits, pair))) is None
    ]
    assert not passed


def test_half_of_the_paraphrases_of_other_authors_pass() -> None:
    """They were written to look different: with other words, as notes, with slips, as stories."""
    found = [veto(compare(traits(one), traits(other))) is None for _, one, other in _unseen("same")]
    assert sum(found) >= 0.5 * len(found) > 0


@pytest.mark.parametrize(("author", "alike", "same"), [("f", 5, 65), ("g", 6, 75)])
def test_pairs_that_no_rule_was_written_for(author: str, alike: int, same: int) -> None:
    """Of lists by authors who did not fit the guards, as many pass as at first sight: nothing is fitted to them."""
    passed = {"different": 0, "same": 0}
    lines = (Path(__file__).parent / "held_out_pairs.tsv").read_text("utf-8").splitlines()[1:]
    own = [line.split("\t") for line in lines if line.startswith(f"{author}\t")]
    for _, found, _, one, other in own:
        passed[found] += veto(compare(traits(one), traits(other))) is None
    assert len(own) == 300
    assert passed["different"] <= alike
    assert passed["same"] >= same


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Set the oven to 200 \u00b0C", "Set the oven to 200 degrees Celsius"),
        (
            "How do I convert a table from Word to Excel?",
            "How do I convert a Word table from Word into Excel?",
        ),
        ("Can you tell me what I must do to renew it?", "What must I do to renew it?"),
        ("What does photosynthesis mean?", "What is the meaning of photosynthesis?"),
        ("Show invoices in megabytes", "Show me the invoices in megabytes"),
        ("Do I need to see a doctor?", "Should I see a doctor?"),
        ("What is in config.yaml?", "What does config.yaml contain?"),
        ("What is the weather this Friday?", "What will the weather be this Friday?"),
    ],
)
def test_a_guarded_word_on_both_sides_is_no_difference(one: str, other: str) -> None:
    assert veto(compare(traits(one), traits(other))) is None


@pytest.mark.parametrize(
    ("why", "one", "other"),
    [
        (Veto.ASKED, "When did the war begin?", "Where did the war begin?"),
        (Veto.ASKED, "How long is the river?", "How deep is the river?"),
        (Veto.CLASS, "how much protein does this soup have", "tell me the fat content of the soup"),
        (Veto.CLASS, "Which wine goes with beef?", "Is there a wine that fits fish?"),
        (Veto.SUBSTITUTE, "Who invented the zipper?", "Who invented the parachute?"),
    ],
)
def test_the_reason_says_what_differs(why: Veto, one: str, other: str) -> None:
    assert veto(compare(traits(one), traits(other))) is why


def test_long_texts_are_not_compared_word_by_word() -> None:
    """Both are about as long as a text that is memoized; a comparison of each word with each would take seconds."""
    one, other = (" ".join(f"{mark}{number:x}" for number in range(700)) for mark in ("ab", "cd"))
    letters = str.maketrans("0123456789", "qrstuvwxyz")
    assert veto(compare(traits(one.translate(letters)), traits(other.translate(letters)))) is None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Can cats see in the dark?", "Why can cats see in the dark?"),
        ("Can you descale a kettle with lemon juice?", "How do you descale a kettle with lemon juice?"),
        ("Which rooms have a view?", "Which rooms have the best view?"),
        ("Which phones still get updates?", "Which phones get updates?"),
        ("Do I invite my boss's wife?", "Do I invite the boss of my wife?"),
        ("the doctor of my mother is rude", "my doctor's mother is rude"),
        ("What is 2 + 3 * 4?", "What is (2 + 3) * 4?"),
        ("What is f(g(x))?", "What is g(f(x))?"),
        ("What is not (A and B)?", "What is (not A) and B?"),
        ("What is served with coffee?", "What is served as coffee?"),
        ("What does a photographer need?", "What does a photograph need?"),
        ("Do people smoke because they are stressed?", "Are people stressed because they smoke?"),
        ("Who was taught by Plato?", "Who taught Plato?"),
        (
            "Does the coupon work for tea or cake, with a card?",
            "Does the coupon work for tea, or cake with a card?",
        ),
        ("Name the author of the paper", "Name the authors of the paper"),
        ("Is A a subset of B?", "Is B a subset of A?"),
    ],
)
def test_a_single_change_in_a_shared_frame(one: str, other: str) -> None:
    for first, second in ((one, other), (other, one)):
        assert veto(compare(traits(first), traits(second))) is not None
