""""""

import random
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.drafting import suffix
from headrace.core.drafting.proposal import DraftRow, Proposal
from headrace.core.drafting.suffix import (
    BYTES_PER_TOKEN,
    CANDIDATES,
    CHUNK,
    INITIAL_TOKENS,
    MIN_MATCH,
    MIN_SURVIVAL,
    ContinuationIndex,
    NgramProposer,
    ScopedIndexes,
    SuffixProposer,
    scope_of,
)
from headrace.core.request import Request

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


@settings(max_examples=60)
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


ONE = INITIAL_TOKENS * BYTES_PER_TOKEN


def test_a_scope_proposes_its_own_outputs_only():
    proposals = ScopedIndexes(8 * ONE)
    proposals.add(b"a", [1, 2, 3, 4])
    assert proposals.propose(b"a", [1, 2, 3], 1).tokens == (4,)
    assert proposals.propose(b"b", [1, 2, 3], 1).tokens == ()
    proposals.add(b"b", [1, 2, 3, 5])
    assert proposals.propose(b"a", [1, 2, 3], 1).tokens == (4,)
    assert proposals.propose(b"b", [1, 2, 3], 1).tokens == (5,)


def test_a_new_scope_takes_the_place_of_the_least_recently_used():
    proposals = ScopedIndexes(2 * ONE)
    proposals.add(b"a", [1, 2, 3, 4])
    proposals.add(b"b", [1, 2, 3, 5])
    proposals.propose(b"a", [1, 2, 3], 1)
    proposals.add(b"c", [1, 2, 3, 6])
    assert proposals.propose(b"b", [1, 2, 3], 1).tokens == ()
    assert proposals.propose(b"a", [1, 2, 3], 1).tokens == (4,)
    assert proposals.counts().evicted_scopes == 1


def test_without_room_for_one_index_nothing_is_kept():
    proposals = ScopedIndexes(ONE - 1)
    proposals.add(b"a", [1, 2, 3, 4])
    assert proposals.propose(b"a", [1, 2, 3], 1).tokens == ()
    assert proposals.counts().nbytes == 0


def test_forgetting_gives_the_memory_back():
    proposals = ScopedIndexes(8 * ONE)
    for scope in (b"a", b"b", b"c"):
        proposals.add(scope, list(range(2 * INITIAL_TOKENS)))
    proposals.forget(b"a")
    assert proposals.propose(b"a", [1, 2, 3], 1).tokens == ()
    assert proposals.counts().scopes == 2
    proposals.forget()
    assert proposals.counts()[:3] == (0, 0, 0)


@settings(max_examples=40)
@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(1, 3 * INITIAL_TOKENS)), max_size=20))
def test_all_scopes_together_stay_within_the_bound(added):
    proposals = ScopedIndexes(6 * ONE)
    for scope, length in added:
        proposals.add(scope.encode(), range(length))
        assert proposals.counts().nbytes <= 6 * ONE


OUTPUT = list(range(100, 140))


def request(name: str = "r", **more: object) -> Request:
    return Request(name, (1, 2, 3), **more)  # type: ignore[arg-type]


def propose(
    proposer: SuffixProposer, asking: Request, output: list[int], max_tokens: int = 4
) -> Proposal | None:
    (found,) = proposer.propose([DraftRow(asking, [*asking.tokens, *output], max_tokens)])
    return found


def test_a_past_output_is_proposed_again() -> None:
    proposer = SuffixProposer(8)
    for each in range(4):
        proposer.ended(request(str(each)), [1, 2, 3, *OUTPUT])
    found = propose(proposer, request(), OUTPUT[:10])
    assert found is not None
    assert found.tokens == tuple(OUTPUT[10:14])
    assert found.source == "suffix"
    assert propose(proposer, request(), [7, 8, 9]) is None


def test_the_end_of_the_prompt_leads_to_the_output() -> None:
    proposer = SuffixProposer(8)
    proposer.ended(request(), [1, 2, 3, *OUTPUT])
    found = propose(proposer, request(), [], max_tokens=1)
    assert found is not None
    assert found.tokens == (100,)


@pytest.mark.parametrize("other", [{"salt": "b"}, {"tenant": "b"}, {"adapter": "b"}])
def test_no_proposal_crosses_a_scope(other: dict[str, str]) -> None:
    proposer = SuffixProposer(8)
    proposer.ended(request(), [1, 2, 3, *OUTPUT])
    assert propose(proposer, request(), OUTPUT[:10]) is not None
    assert propose(proposer, request(**other), OUTPUT[:10]) is None
    assert scope_of(request()) != scope_of(request(**other))


def test_an_output_that_may_not_be_stored_is_not_indexed() -> None:
    proposer = SuffixProposer(8)
    proposer.ended(request(indexed=False), [1, 2, 3, *OUTPUT])
    assert propose(proposer, request(), OUTPUT[:10]) is None


def test_a_tenant_or_all_can_be_forgotten() -> None:
    proposer = SuffixProposer(8)
    for tenant in ("a", "b"):
        proposer.ended(request(tenant=tenant), [1, 2, 3, *OUTPUT])
    proposer.forget("a")  # before they were indexed
    assert propose(proposer, request(tenant="a"), OUTPUT[:10]) is None
    assert propose(proposer, request(tenant="b"), OUTPUT[:10]) is not None
    proposer.forget()  # afterwards
    assert propose(proposer, request(tenant="b"), OUTPUT[:10]) is None
    assert proposer.nbytes == 0


def test_outputs_are_indexed_a_few_tokens_at_a_time() -> None:
    proposer = SuffixProposer(8)
    outputs = [list(range(at, at + CHUNK + 1)) for at in (1000, 2000)]
    for output in outputs:
        proposer.ended(request(), [1, 2, 3, *output])
    for at, output in enumerate(outputs):
        assert propose(proposer, request(), output[:-1]) is None, "its last token has not been indexed yet"
        assert proposer.counts.outputs == at + 1
    assert propose(proposer, request(), [7, 8, 9]) is None
    for output in outputs:
        found = propose(proposer, request(), output[CHUNK - 3 : CHUNK])
        assert found is not None, "parts are joined"
        assert found.tokens == (output[CHUNK],)


def test_the_indexes_are_bounded() -> None:
    proposer = SuffixProposer(8, max_bytes=200_000)
    for at in range(200):
        proposer.ended(request(tenant=f"t{at}"), [1, 2, 3, *OUTPUT])
        propose(proposer, request(), [])
    assert 0 < proposer.nbytes <= 200_000
    assert proposer.counts.evicted_scopes > 0
    assert SuffixProposer(8, max_bytes=0).nbytes == 0


def test_outputs_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "MAX_PENDING", 3)
    proposer = SuffixProposer(8)
    for _ in range(10):
        proposer.ended(request(), [1, 2, 3, *OUTPUT])
    propose(proposer, request(), [])
    assert proposer.counts.outputs == 3


LOOP = [1, 2, 3, 1, 2, 3, 1, 2]


def looked_up(
    proposer: NgramProposer, tokens: list[int], max_tokens: int = 100, name: str = "r"
) -> Proposal | None:
    (found,) = proposer.propose([DraftRow(Request(name, (1,)), tokens, max_tokens)])
    return found


def brute_force(tokens: list[int], max_tokens: int, min_n: int, max_n: int) -> tuple[int, ...] | None:
    """The newest of the places that agree longest with the end, and what followed; by comparing everything."""
    count = len(tokens)
    gram = tokens[count - min_n :]
    places = [p for p in range(min_n, count) if tokens[p - min_n : p] == gram][::-1]
    best, longest = 0, 0
    for place in places:
        agreed = 0
        while agreed < min(max_n, place) and tokens[place - 1 - agreed] == tokens[count - 1 - agreed]:
            agreed += 1
        if agreed > longest:
            best, longest = place, agreed
    if not longest:
        return None
    proposed: list[int] = []
    for at in range(max_tokens):
        proposed.append((tokens + proposed)[best + at])
    return tuple(proposed)


@settings(max_examples=300)
@given(
    tokens=st.lists(st.integers(0, 3), min_size=3, max_size=30),
    max_tokens=st.integers(1, 6),
    min_n=st.integers(1, 3),
    more_n=st.integers(0, 4),
    steps=st.integers(1, 5),
)
def test_equals_a_search_through_the_whole_text(
    tokens: list[int], max_tokens: int, min_n: int, more_n: int, steps: int
) -> None:
    proposer = NgramProposer(max_tokens, min_n, min_n + more_n)
    for end in range(3, len(tokens) + 1, steps):  # the text grows by steps
        known = tokens[:end]
        if end <= min_n:
            continue
        found = looked_up(proposer, known)
        assert (found.tokens if found else None) == brute_force(known, max_tokens, min_n, min_n + more_n)
        if found:
            assert len(found.confidences) == len(found.tokens)
            assert all(0 < each < 1 for each in found.confidences)


def test_the_longest_agreement_wins_over_the_newest_place() -> None:
    tokens = [7, 1, 2, 50, 8, 1, 2, 60, 7, 1, 2]
    found = looked_up(NgramProposer(1, 2, 8), tokens)
    assert found is not None
    assert found.tokens == (50,)
    found = looked_up(NgramProposer(1, 2, 2), tokens)
    assert found is not None
    assert found.tokens == (60,)


def test_a_short_period_goes_on() -> None:
    found = looked_up(NgramProposer(7), LOOP)
    assert found is not None
    assert found.tokens == (3, 1, 2, 3, 1, 2, 3)


def test_nothing_without_an_earlier_occurrence() -> None:
    assert looked_up(NgramProposer(4), [1, 2, 3, 4, 5]) is None
    assert looked_up(NgramProposer(4), [1]) is None


def test_at_most_what_is_asked_for() -> None:
    found = looked_up(NgramProposer(7), LOOP, max_tokens=2)
    assert found is not None
    assert found.tokens == (3, 1)
    assert looked_up(NgramProposer(7), LOOP, max_tokens=0) is None


def test_a_longer_agreement_is_more_confident() -> None:
    short = looked_up(NgramProposer(1), [1, 2, 3, 9, 1, 2], name="a")
    long = looked_up(NgramProposer(1), [5, 6, 7, 1, 2, 3, 5, 6, 7, 1, 2], name="b")
    assert short is not None
    assert long is not None
    assert long.confidences[0] > short.confidences[0]


def test_memory_is_reported_and_given_back() -> None:
    proposer = NgramProposer(4)
    text = list(range(3000))
    looked_up(proposer, text)
    assert 2 * 3000 <= proposer.nbytes <= 4 * 3000
    proposer.ended(Request("r", (1,)), text)
    assert proposer.nbytes == 0


def test_tokens_of_any_id_are_found() -> None:
    text = [0xD800, 0xFEFF, 300_000, 7, 0xD800, 0xFEFF]  # as characters: half of a pair, a byte order mark
    found = looked_up(NgramProposer(2), text)
    assert found is not None
    assert found.tokens == (300_000, 7)


def test_another_request_under_the_same_id_has_another_text() -> None:
    proposer = NgramProposer(4)
    looked_up(proposer, LOOP)
    assert looked_up(proposer, [4, 5, 6, 7]) is None


def test_ids_beyond_unicode_may_share_characters_and_the_tokens_proposed_are_those_of_the_text() -> None:
    far = 1 << 40
    found = looked_up(NgramProposer(2, min_n=1, max_n=3), [far, far + 1, far + 2, 7, far, far + 1])
    assert found is not None
    assert found.tokens == (far + 2, 7)
