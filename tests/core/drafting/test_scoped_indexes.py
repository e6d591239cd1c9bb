from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.drafting.continuation_index import BYTES_PER_TOKEN, INITIAL_TOKENS
from headrace.core.drafting.scoped_indexes import ScopedIndexes

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


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(1, 3 * INITIAL_TOKENS)), max_size=20))
def test_all_scopes_together_stay_within_the_bound(added):
    proposals = ScopedIndexes(6 * ONE)
    for scope, length in added:
        proposals.add(scope.encode(), range(length))
        assert proposals.counts().nbytes <= 6 * ONE
