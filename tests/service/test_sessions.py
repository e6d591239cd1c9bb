from headrace.core.block_keys import chained_keys, root_key
from headrace.core.events import Finished, Layer, Spared
from headrace.core.memory.sessions import SessionBook
from headrace.core.request import DEFAULT_RETENTION, FinishReason, Request
from headrace.service import sessions as module
from headrace.service.sessions import REPLACED_RETENTION, Sessions, Turn

SIZE = 4


class Pool:
    """Takes what the engine would be told."""

    def __init__(self):
        self.reported = []

    def retain(self, keys, priority):
        self.reported.append((tuple(keys), priority))


def make():
    pool = Pool()
    return Sessions(SessionBook(100), SIZE, pool.retain), pool


def serve(sessions, id, tokens, turn, output=2):
    sessions.enter(Request(id, tuple(tokens), tenant="t", salt="s"), turn)
    sessions.fold(Finished(id, FinishReason.STOP, len(tokens), output, 0), 1.0)


def keys(tokens):
    return tuple(chained_keys(root_key("s", ""), tokens, SIZE))


def test_a_newer_prompt_replaces_what_differs():
    sessions, pool = make()
    first, second = list(range(16)), [*range(8), *range(50, 62)]
    serve(sessions, "a", first, Turn("s"))
    assert pool.reported == []
    serve(sessions, "b", second, Turn("s"))
    assert pool.reported == [(keys(first)[2:], REPLACED_RETENTION)]


def test_a_session_ends_with_the_request_that_says_so_or_by_its_name():
    sessions, pool = make()
    serve(sessions, "a", range(8), Turn("s", releases=True))
    assert pool.reported == [(keys(range(8)), DEFAULT_RETENTION)]
    serve(sessions, "b", range(8), Turn("s"))
    assert sessions.release("t", "s")
    assert not sessions.release("t", "s")
    assert pool.reported[1:] == pool.reported[:1]


def test_a_request_that_computed_nothing_changes_nothing():
    sessions, pool = make()
    serve(sessions, "a", range(8), Turn("s"))
    serve(sessions, "b", range(50, 58), Turn("s"), output=0)
    sessions.fold(Finished("unknown", FinishReason.STOP, 8, 2, 0), 1.0)
    assert pool.reported == []
    sessions.enter(Request("c", tuple(range(8)), tenant="t"), Turn("s", releases=True))
    sessions.fold(Spared("c", "t", Layer.EXACT, 8, 2, 0.0), 1.0)
    assert pool.reported == [(keys(range(8)), DEFAULT_RETENTION)]


def test_the_number_of_followed_requests_is_bounded(monkeypatch):
    monkeypatch.setattr(module, "MOST_OPEN", 1)
    sessions, _ = make()
    sessions.enter(Request("a", (1, 2, 3, 4), tenant="t"), Turn("one"))
    sessions.enter(Request("b", (1, 2, 3, 4), tenant="t"), Turn("two"))
    for id in "ab":
        sessions.fold(Finished(id, FinishReason.STOP, 4, 2, 0), 1.0)
    assert not sessions.release("t", "one")
    assert sessions.release("t", "two")
