import random
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.drafting.continuation_index import (
    CANDIDATES,
    INITIAL_TOKENS,
    MIN_MATCH,
    MIN_SURVIVAL,
    ContinuationIndex,
)

ROOM = 1 << 20


def text(letters):
    return [ord(letter) for letter in letters]


def proposed(index, context, most=16):
    return "".join(map(chr, index.propose(text(context), most).tokens))


def test_goes_on_as_an_earlier_output_did():
    index = ContinuationIndex()
    for _ in range(30):  # until it is trusted far enough
        index.add(text("the cat sat on the mat"), max_bytes=ROOM)
    assert proposed(index, "a dog, then the cat") == " sat on the mat"
    assert proposed(index, "nothing like it") == ""


def test_the_prompts_end_leads_into_the_answer():
    index = ContinuationIndex()
    for _ in range(8):
        index.add(text("Certainly!"), lead=text("<assistant>"), max_bytes=ROOM)
    assert proposed(index, "another question <assistant>") == "Certainly!"


def test_the_longest_agreement_decides_and_then_the_majority():
    index = ContinuationIndex()
    for _ in range(CANDIDATES):
        index.add(text("by and large no"), max_bytes=ROOM)
    index.add(text("it went by and large yes"), max_bytes=ROOM)
    assert proposed(index, "at sea by and large ", most=1) == "n"
    longest = index.propose(text("it went by and large "), 1)
    assert longest.matched == 16
    assert proposed(index, "it went by and large ", most=1) == "y"


def test_probabilities_fall_with_disagreement_and_follow_what_was_right():
    index = ContinuationIndex()
    rng = random.Random(1)
    for _ in range(200):
        index.add(text(f"roll: {rng.choice('123456')}. The answer is final."), max_bytes=ROOM)
    die = index.propose(text("so I roll: "), 1).probabilities[0]
    rest = index.propose(text("6. The answer"), 1).probabilities[0]
    assert die < 0.6 < 0.9 < rest


@given(
    outputs=st.lists(st.lists(st.integers(0, 3), max_size=40), min_size=1, max_size=6),
    part=st.integers(1, 9),
    context=st.lists(st.integers(0, 3), max_size=12),
)
def test_parts_of_an_output_are_joined(outputs, part, context):
    whole, parts = ContinuationIndex(), ContinuationIndex()
    for output in outputs:
        whole.add(output, lead=[9, 8], max_bytes=ROOM)
        for start in range(0, max(1, len(output)), part):
            lead = [9, 8, *output[:start]]
            parts.add(output[start : start + part], lead, continued=start > 0, max_bytes=ROOM)
    assert parts.outputs == whole.outputs
    assert parts.tokens == whole.tokens
    assert parts._votes(array("I", context)) == whole._votes(array("I", context))


def test_parts_that_pass_the_end_of_the_log_are_found():
    index, output = ContinuationIndex(), list(range(100, 100 + 3 * INITIAL_TOKENS))
    for start in range(0, len(output), 50):
        index.add(
            output[start : start + 50], output[max(0, start - 8) : start], continued=start > 0, max_bytes=0
        )
    assert index.outputs == 1
    for at in range(-INITIAL_TOKENS // 2, -50):
        assert index.propose(output[at - 8 : at], 4).tokens[:1] == (output[at],)


def test_a_proposal_ends_with_its_output_and_where_it_would_not_pay():
    index = ContinuationIndex()
    index.add(text("abcdefghijklmnop"), max_bytes=ROOM)
    unsure = index.propose(text("xabc"), 16)
    chance = 1.0
    for probability in unsure.probabilities:
        chance *= probability
    assert chance >= MIN_SURVIVAL
    assert 0 < len(unsure.tokens) < len("defghijklmnop")
    assert index.propose(text("mnop"), 16).tokens == ()


@pytest.mark.parametrize("context", [[], [1], [1, 2]])
def test_a_context_too_short_proposes_nothing(context):
    index = ContinuationIndex()
    index.add([1, 2, 3, 4, 5], max_bytes=ROOM)
    assert index.propose(context, 4).tokens == ()


def test_memory_is_bounded_and_the_oldest_is_forgotten():
    index = ContinuationIndex()
    smallest = index.nbytes
    index.add(range(100), max_bytes=smallest)
    assert index.propose([10, 11, 12], 1).tokens == (13,)
    for i in range(10):
        index.add(range(1000 * i + 1000, 1000 * i + 2000), max_bytes=smallest)
    assert index.nbytes == smallest
    assert index.tokens <= INITIAL_TOKENS
    assert index.propose([10, 11, 12], 1).tokens == ()
    assert index.propose([10500, 10501, 10502], 1).tokens == (10503,)


def test_it_grows_into_its_room_and_keeps_what_it_had():
    index = ContinuationIndex()
    smallest = index.nbytes
    for i in range(40):
        index.add(range(1000 * i, 1000 * i + 1000), max_bytes=16 * smallest)
    assert index.nbytes == 16 * smallest
    assert all(index.propose(range(1000 * i, 1000 * i + 4), 1).tokens == (1000 * i + 4,) for i in range(40))


def test_an_output_longer_than_the_log_is_taken_in_by_its_end():
    index = ContinuationIndex()
    index.add(range(3 * INITIAL_TOKENS), max_bytes=index.nbytes)
    last = 3 * INITIAL_TOKENS
    assert index.propose([last - 6, last - 5, last - 4], 1).tokens == (last - 3,)
    assert index.propose([5, 6, 7], 1).tokens == ()


@settings(max_examples=60, deadline=None)
@given(
    outputs=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=400), min_size=1, max_size=60),
    contexts=st.lists(st.lists(st.integers(0, 3), min_size=MIN_MATCH, max_size=40), min_size=1, max_size=8),
    doublings=st.integers(0, 2),
)
def test_every_proposal_was_once_written_after_the_same_tokens(outputs, contexts, doublings):
    index = ContinuationIndex()
    room = index.nbytes << doublings
    for output in outputs:
        index.add(output, max_bytes=room)
    written = [bytes(output) for output in outputs]
    for context in [*contexts, *(output[:20] for output in outputs if len(output) > MIN_MATCH)]:
        given = index.propose(context, 8)
        agreed = bytes(context[-given.matched :]) if given.tokens else b""
        for end in range(len(given.tokens)):  # each step follows from a place that has all steps before it
            assert any(agreed + bytes(given.tokens[: end + 1]) in output for output in written)
    assert index.nbytes <= room
