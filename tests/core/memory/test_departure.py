from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.memory.departure import (
    EXPLANATIONS,
    MAX_PROMPTS,
    NOWHERE,
    SEGMENT,
    Departure,
    Looked,
    Place,
    PrefixCause,
    PromptMemory,
    Scope,
    common_tokens,
    departure,
    fingerprint,
    moved_tokens,
)

MINE = Scope("a", "", "")
BLOCK = 16


def tokens(count, seed=0):
    return [random.Random(f"{seed} {n}").randrange(50_000) for n in range(count)]


HEAD = tokens(600)


def left(prompt, cached, known=(), place=NOWHERE, scope=MINE, moves=False, tools=(), output=0):
    """The departure of ``prompt`` after ``known`` prompts, each with its scope."""
    memory = PromptMemory(1 << 20)
    for number, (earlier, where) in enumerate(known):
        memory.add(f"r{number}", where, fingerprint(earlier), (1, 2, 3))
        memory.ended(f"r{number}", output or 1)
    looked = Looked(scope, len(prompt), cached, BLOCK, tools, moves)
    asked = []

    def found(at):
        asked.append(at)
        return place

    return departure(looked, memory.compare(scope, fingerprint(prompt)), found)


def test_every_cause_is_said_in_words():
    assert EXPLANATIONS.keys() == set(PrefixCause)


def test_a_first_prompt_is_new():
    assert left(HEAD, 0) == Departure(0, PrefixCause.NEW)


def test_a_repeated_prompt_is_cached_up_to_its_last_token():
    found = left(HEAD, 599, [(HEAD, MINE)])
    assert (found.cause, found.recomputed, found.compared_with) == (PrefixCause.WHOLE_PROMPT, 0, "r0")


def test_a_prompt_that_continues_another_loses_nothing():
    found = left(HEAD, 500, [(HEAD[:500], MINE)])
    assert (found.cause, found.at, found.recomputed) == (PrefixCause.CONTINUES, 500, 0)


def test_evicted_tokens_are_counted():
    found = left(HEAD, 64, [(HEAD[:500], MINE)])
    assert (found.cause, found.at, found.recomputed) == (PrefixCause.EVICTED, 64, 436)
    found = left(HEAD, 0, [(HEAD, MINE)])
    assert (found.cause, found.recomputed) == (PrefixCause.EVICTED, 599)


def test_the_rest_of_a_block_is_a_tail():
    found = left(HEAD, 496, [(HEAD[:500], MINE)])
    assert (found.cause, found.at, found.recomputed) == (PrefixCause.BLOCK_TAIL, 496, 4)
    found = left(HEAD[:500], 496, [(HEAD, MINE)])  # the prompt ends within an earlier one
    assert (found.cause, found.recomputed) == (PrefixCause.BLOCK_TAIL, 3)


def test_a_prompt_below_one_block():
    found = left(HEAD[:10], 0, [(HEAD[:10], MINE)])
    assert (found.cause, found.recomputed) == (PrefixCause.SHORTER_THAN_BLOCK, 9)


@pytest.mark.parametrize(
    ("place", "cause"),
    [
        (Place("system", "system", marker="billing_header"), PrefixCause.MARKER_CHANGED),
        (Place("system", "system"), PrefixCause.TEXT_CHANGED),
        (Place("messages[2]", "assistant", lacks_reasoning=True), PrefixCause.REASONING_DROPPED),
        (Place("messages[2]", "assistant"), PrefixCause.TEXT_CHANGED),
        (Place("tools"), PrefixCause.TOOLS_REORDERED),
    ],
)
def test_text_decides_why_a_prompt_changed(place, cause):
    earlier = [*HEAD[:20], 1, 2, *HEAD[20:]]
    found = left([*HEAD[:20], 3, *HEAD[20:]], 16, [(earlier, MINE)], place, tools=(3, 2, 1))
    assert (found.cause, found.at, found.place) == (cause, 20, place)
    assert 540 < found.recomputed <= 584


def test_other_tools_are_not_reordered_ones():
    earlier = [*HEAD[:20], 1, 2, *HEAD[20:]]
    found = left([*HEAD[:20], 3, *HEAD[20:]], 16, [(earlier, MINE)], Place("tools"), tools=(3, 2, 4))
    assert found.cause is PrefixCause.TOOLS_CHANGED


def test_a_marker_that_normalization_moved_is_named():
    earlier = [*HEAD[:300], 1, 2, 3]
    place = Place("messages[2]", "assistant", begins=True, lacks_reasoning=True)
    found = left(HEAD, 300, [(earlier, MINE)], place, moves=True)
    assert (found.cause, found.recomputed) == (PrefixCause.MARKER_MOVED, 0)


@pytest.mark.parametrize(
    ("lacks", "cause"), [(True, PrefixCause.REASONING_DROPPED), (False, PrefixCause.ANSWER_CHANGED)]
)
def test_an_answer_in_another_form_is_named(lacks, cause):
    place = Place("messages[2]", "assistant", lacks_reasoning=lacks, rest=70)
    found = left(HEAD, 400, [(HEAD[:400], MINE)], place, output=150)
    assert (found.cause, found.recomputed) == (cause, 70)
    found = left(HEAD, 549, [(HEAD[:400], MINE)], place, output=150)
    assert (found.cause, found.recomputed) == (PrefixCause.CONTINUES, 0)


def test_the_beginning_of_an_old_answer_in_the_cache_hides_no_change():
    earlier = [*HEAD[:300], 1, 2, 3, *HEAD[300:]]
    found = left(HEAD, 305, [(earlier, MINE)], Place("messages[2]", "assistant", lacks_reasoning=True))
    assert (found.cause, found.at) == (PrefixCause.REASONING_DROPPED, 305)
    assert 200 < found.recomputed < 295


def test_other_scopes_of_the_tenant_are_named():
    found = left(HEAD, 0, [(HEAD, Scope("a", "s", ""))])
    assert (found.cause, found.recomputed, found.compared_with) == (PrefixCause.SALT_DIFFERS, 599, "r0")
    found = left(HEAD, 0, [(HEAD, Scope("a", "", "lora"))])
    assert found.cause is PrefixCause.ADAPTER_DIFFERS


def test_another_tenant_is_named_without_its_request():
    found = left(HEAD, 0, [(HEAD, Scope("b", "", ""))])
    assert (found.cause, found.other_tenant, found.compared_with) == (PrefixCause.OTHER_TENANT, 599, "")


def test_an_unrelated_prompt_is_no_comparison():
    found = left([*HEAD[:4], *tokens(300, 5)], 4, [(HEAD, MINE)])
    assert (found.cause, found.compared_with) == (PrefixCause.NEW, "")


def test_a_short_beginning_in_common_with_another_tenant_says_nothing():
    found = left([*HEAD[:40], *tokens(300, 5)], 0, [(HEAD, Scope("b", "", ""))])
    assert (found.cause, found.other_tenant) == (PrefixCause.NEW, 0)


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
