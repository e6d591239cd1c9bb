from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.drafting.ngram import NgramProposer
from headrace.core.drafting.proposal import DraftRow, Proposal
from headrace.core.request import Request

LOOP = [1, 2, 3, 1, 2, 3, 1, 2]


def propose(
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
        found = propose(proposer, known)
        assert (found.tokens if found else None) == brute_force(known, max_tokens, min_n, min_n + more_n)
        if found:
            assert len(found.confidences) == len(found.tokens)
            assert all(0 < each < 1 for each in found.confidences)


def test_the_longest_agreement_wins_over_the_newest_place() -> None:
    tokens = [7, 1, 2, 50, 8, 1, 2, 60, 7, 1, 2]
    found = propose(NgramProposer(1, 2, 8), tokens)
    assert found is not None
    assert found.tokens == (50,)
    found = propose(NgramProposer(1, 2, 2), tokens)
    assert found is not None
    assert found.tokens == (60,)


def test_a_short_period_goes_on() -> None:
    found = propose(NgramProposer(7), LOOP)
    assert found is not None
    assert found.tokens == (3, 1, 2, 3, 1, 2, 3)


def test_nothing_without_an_earlier_occurrence() -> None:
    assert propose(NgramProposer(4), [1, 2, 3, 4, 5]) is None
    assert propose(NgramProposer(4), [1]) is None


def test_at_most_what_is_asked_for() -> None:
    found = propose(NgramProposer(7), LOOP, max_tokens=2)
    assert found is not None
    assert found.tokens == (3, 1)
    assert propose(NgramProposer(7), LOOP, max_tokens=0) is None


def test_a_longer_agreement_is_more_confident() -> None:
    short = propose(NgramProposer(1), [1, 2, 3, 9, 1, 2], name="a")
    long = propose(NgramProposer(1), [5, 6, 7, 1, 2, 3, 5, 6, 7, 1, 2], name="b")
    assert short is not None
    assert long is not None
    assert long.confidences[0] > short.confidences[0]


def test_memory_is_reported_and_given_back() -> None:
    proposer = NgramProposer(4)
    text = list(range(3000))
    propose(proposer, text)
    assert 2 * 3000 <= proposer.nbytes <= 4 * 3000
    proposer.ended(Request("r", (1,)), text)
    assert proposer.nbytes == 0


def test_tokens_of_any_id_are_found() -> None:
    text = [0xD800, 0xFEFF, 300_000, 7, 0xD800, 0xFEFF]  # as characters: half of a pair, a byte order mark
    found = propose(NgramProposer(2), text)
    assert found is not None
    assert found.tokens == (300_000, 7)


def test_another_request_under_the_same_id_has_another_text() -> None:
    proposer = NgramProposer(4)
    propose(proposer, LOOP)
    assert propose(proposer, [4, 5, 6, 7]) is None


def test_ids_beyond_unicode_may_share_characters_and_the_tokens_proposed_are_those_of_the_text() -> None:
    far = 1 << 40
    found = propose(NgramProposer(2, min_n=1, max_n=3), [far, far + 1, far + 2, 7, far, far + 1])
    assert found is not None
    assert found.tokens == (far + 2, 7)
