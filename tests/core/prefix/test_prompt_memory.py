import random

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.prefix.prompt_memory import (
    MAX_PROMPTS,
    SEGMENT,
    PromptMemory,
    Scope,
    common_tokens,
    fingerprint,
    moved_tokens,
)

MINE = Scope("a", "", "")


def tokens(count, seed=0):
    return [random.Random(f"{seed} {n}").randrange(50_000) for n in range(count)]


@given(st.integers(0, 200), st.integers(0, 90), st.integers(0, 90))
@settings(max_examples=200)
def test_the_common_prefix_is_exact_to_the_token(common, rest, other_rest):
    head = tokens(common)
    one = fingerprint([*head, *([1] if rest else []), *tokens(rest, 1)])
    other = fingerprint([*head, *([2] if other_rest else []), *tokens(other_rest, 2)])
    assert common_tokens(one, other) == common_tokens(other, one) == common


def test_moved_text_is_found_wherever_it_stands():
    text = tokens(2_000)
    one, other = fingerprint([7, 8, 9, *text]), fingerprint([5, *text])
    unrelated = fingerprint(tokens(2_000, 1))
    (few, most) = moved_tokens(
        one, [unrelated, other, unrelated], 0
    )  # after nearly all, no further one is compared
    assert few < 20
    assert 1_900 < most <= 2_003


def test_the_longest_match_of_the_own_scope_counts():
    memory = PromptMemory(1 << 20)
    head = tokens(100)
    memory.add("short", MINE, fingerprint([*head[:50], 1, 2, 3]))
    memory.add("long", MINE, fingerprint([*head[:90], 1, 2, 3]))
    memory.add("salted", Scope("a", "s", ""), fingerprint(head))
    memory.add("foreign", Scope("b", "", ""), fingerprint(head))
    found = memory.compare(MINE, fingerprint(head))
    assert (found.own.known.request_id, found.own.tokens) == ("long", 90)
    assert (found.other_scope.known.request_id, found.other_scope.tokens) == ("salted", 100)
    assert (found.other_tenant.known.request_id, found.other_tenant.tokens) == ("foreign", 100)
    assert memory.compare(Scope("c", "", ""), fingerprint(tokens(100, 9))) == (None, None, None)


def test_of_nearly_equal_matches_the_one_with_most_of_the_rest_counts():
    memory = PromptMemory(1 << 20)
    rest = tokens(500)
    memory.add("same", MINE, fingerprint([1, 2, 3, 40, *rest]))
    memory.add("other", MINE, fingerprint([1, 2, 3, 50, 60, *tokens(500, 3)]))
    found = memory.compare(MINE, fingerprint([1, 2, 3, 50, *rest])).own
    assert (found.known.request_id, found.tokens) == ("same", 4)
    assert found.moved > 450


def test_a_prompt_replaces_those_that_it_continues():
    memory = PromptMemory(1 << 20)
    head = tokens(200)
    for length in (40, 100, 33, 200):
        memory.add(f"p{length}", MINE, fingerprint(head[:length]))
    memory.add("branch", MINE, fingerprint([*head[:60], 1]))
    assert len(memory) == 2
    found = memory.compare(MINE, fingerprint(head[:70])).own
    assert (found.known.request_id, found.tokens) == ("p200", 70)


def test_a_prompt_that_was_not_computed_is_forgotten():
    memory = PromptMemory(1 << 20)
    memory.add("one", MINE, fingerprint(tokens(40)))
    memory.add("two", MINE, fingerprint(tokens(40, 1)))
    memory.ended("one", 0)
    memory.ended("two", 5)
    memory.ended("unknown", 5)
    assert memory.compare(MINE, fingerprint(tokens(40))).own.known.request_id == "two"
    assert memory.compare(MINE, fingerprint(tokens(40, 1))).own.known.output_tokens == 5


def test_the_memory_is_bounded_and_the_largest_tenant_pays():
    memory = PromptMemory(40_000)
    memory.add("small", Scope("b", "", ""), fingerprint(tokens(100, "b")))
    for n in range(100):
        memory.add(f"p{n}", MINE, fingerprint(tokens(1_000, n)))
        assert memory.bytes <= 40_000
    assert memory.compare(Scope("b", "", ""), fingerprint(tokens(100, "b"))).own.tokens == 100
    assert memory.compare(MINE, fingerprint(tokens(1_000, 99))).own.tokens == 1_000
    assert memory.compare(MINE, fingerprint(tokens(1_000, 0))).own.tokens < SEGMENT


def test_a_scope_remembers_a_bounded_number_of_prompts():
    memory = PromptMemory(1 << 24)
    for n in range(2 * MAX_PROMPTS):
        memory.add(f"p{n}", MINE, fingerprint(tokens(40, n)))
    assert len(memory) == MAX_PROMPTS
    for n in range(2 * MAX_PROMPTS):
        memory.forget(f"p{n}")
    assert (len(memory), memory.bytes) == (0, 0)


def test_a_fingerprint_is_no_text():
    print = fingerprint(tokens(320))
    assert len(print.marks) == 320
    assert len(print.keys) == 8 * 10
