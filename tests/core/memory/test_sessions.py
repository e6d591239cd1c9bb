from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.memory.sessions import MAX_SESSIONS, MAX_TENANTS, Dropped, SessionBook


def keys(text):
    return [letter.encode() for letter in text]


def test_a_longer_prompt_of_a_session_replaces_what_differs():
    book = SessionBook(100)
    assert book.turn("t", "s", keys("abc")) == Dropped()
    assert book.turn("t", "s", keys("abcd")) == Dropped()
    assert book.turn("t", "s", keys("abxyz")) == Dropped(replaced=(b"c", b"d"))
    assert book.blocks("t") == 5


def test_blocks_of_another_session_stay():
    book = SessionBook(100)
    book.turn("t", "one", keys("abc"))
    book.turn("t", "two", keys("abd"))
    assert book.turn("t", "one", keys("x")) == Dropped(replaced=(b"c",))
    assert book.release("t", "two") == Dropped(released=(b"a", b"b", b"d"))
    assert book.release("t", "two") is None
    assert book.release("other", "one") is None


def test_a_session_may_change_its_name():
    book = SessionBook(100)
    book.turn("t", "resp_1", keys("abc"))
    assert book.turn("t", "resp_2", keys("abde"), continues="resp_1") == Dropped(replaced=(b"c",))
    assert book.release("t", "resp_1") is None
    assert book.release("t", "resp_2") == Dropped(released=(b"a", b"b", b"d", b"e"))
    assert book.blocks("t") == 0


def test_a_tenant_retains_a_bounded_number_of_blocks():
    book = SessionBook(4)
    book.turn("t", "one", keys("ab"))
    book.turn("t", "two", keys("cd"))
    assert book.turn("t", "three", keys("e")) == Dropped(released=(b"a", b"b"))
    assert book.turn("t", "four", keys("fghijk")) == Dropped(released=(b"j", b"k", b"c", b"d", b"e"))
    assert book.blocks("t") == 4


def test_sessions_and_tenants_are_bounded():
    book = SessionBook(10**9)
    for n in range(MAX_SESSIONS + 1):
        dropped = book.turn("t", f"s{n}", [f"k{n}".encode()])
    assert dropped.released == (b"k0",)
    for n in range(MAX_TENANTS):
        book.turn(f"t{n}", "s", keys("a"))
    assert book.blocks("t") == 0


@given(
    st.lists(
        st.tuples(st.sampled_from("pqr"), st.text("abcdef", min_size=1, max_size=6), st.booleans()),
        max_size=40,
    )
)
@settings(max_examples=200)
def test_a_block_is_dropped_when_its_last_session_lets_it_go(steps):
    book, held = SessionBook(1_000), {}
    for name, text, releases in steps:
        chain = [text[: n + 1].encode() for n in range(len(text))]
        before = Counter(key for each in held.values() for key in each)
        dropped = book.release("t", name) if releases else book.turn("t", name, chain)
        if releases:
            held.pop(name, None)
        else:
            held[name] = chain
        after = Counter(key for each in held.values() for key in each)
        gone = dropped.replaced + dropped.released if dropped else ()
        assert set(gone) == before.keys() - after.keys()
        assert book.blocks("t") == len(after)
