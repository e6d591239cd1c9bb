"""The thread behind the semantic cache: what it answers, what it forgets, and that nothing it meets ends it."""

from __future__ import annotations

import threading
import time

import pytest

from headrace.response_cache.rules.guards import Veto
from headrace.response_cache.rules.judge import Decline, Doubt
from headrace.response_cache.semantic.rows import RowStore
from headrace.response_cache.semantic.search_thread import Computed, Proposal, SearchThread
from tests.response_cache.semantic.scenes import Words, librarian, row

LONG = 1e9


def computed(
    question: str, said: str = "yes", partition=b"p", instead=None, key: bytes | None = None
) -> Computed:
    own = question.encode() if key is None else key
    return Computed(own, partition, question, lambda: said, ("*",), 1e12, instead)


def settle(made: SearchThread) -> None:
    done = threading.Event()
    made._add_task(done.set)
    assert done.wait(60)


def verdict(made: SearchThread, question: str, partition=b"p"):
    return made.search(partition, b"asker " + question.encode(), question, time.monotonic() + LONG).result(60)


@pytest.fixture
def started():
    made = librarian()
    made.start()
    yield made
    made.stop()


def test_it_proposes_stored_entries(started):
    assert verdict(started, "shoes red") == Decline(Doubt.NO_NEIGHBOUR)
    started.note(computed("shoes red"))
    settle(started)
    found = verdict(started, "shoes red please")
    assert isinstance(found, Proposal)
    assert found.key == b"shoes red"
    assert 0.8 < found.similarity < 1.0
    assert verdict(started, "shoes red please", b"another partition") == Decline(Doubt.NO_NEIGHBOUR)
    assert verdict(started, "shoes not red") == Decline(Veto.NEGATION)
    assert verdict(started, "word " * 30) == Decline(Doubt.TOO_LONG)
    started.forget(b"shoes red")
    settle(started)
    assert verdict(started, "shoes red") == Decline(Doubt.NO_NEIGHBOUR)


def test_a_question_is_embedded_once():
    embedder = Words()
    made = librarian(embedder)
    made.start()
    verdict(made, "shoes red")
    made.note(computed("shoes red", key=b"asker shoes red"))
    settle(made)
    assert embedder.texts == ["shoes red", "yes"]
    made.stop()


def test_questions_about_now_and_long_ones_are_not_kept(started):
    started.note(computed("shoes sold today"))
    started.note(computed("shoes " * 30))
    settle(started)
    assert started.facts().entries == 0
    started.note(computed("shoes red", said="word " * 300))  # a long answer is known by its beginning
    settle(started)
    assert started.facts().entries == 1


def test_an_audit_compares_and_a_wrong_entry_goes(started):
    started.note(computed("shoes red", said="yes"))
    reported: list[bool] = []
    started.note(computed("shoes red please", said="Yes!", instead=b"shoes red"), reported.append)
    settle(started)
    assert reported == [True]
    started.note(computed("shoes red now", said="never", instead=b"shoes red"), reported.append)
    settle(started)
    assert reported == [True, False]
    found = verdict(started, "shoes red")
    assert isinstance(found, Proposal)
    assert found.key != b"shoes red"
    started.note(
        computed("shoes red again", said="never", instead=b"shoes red"), reported.append
    )  # not there any more
    settle(started)
    assert reported == [True, False]


def test_tags(started):
    started.note(computed("shoes red"))
    started.forget_tag("other")
    settle(started)
    assert started.facts().entries == 1
    started.forget_tag("*")
    settle(started)
    assert started.facts().entries == 0


def test_whose_time_is_over_is_not_embedded():
    embedder = Words()
    made = librarian(embedder, clock=lambda: 100.0)
    made.start()
    assert made.search(b"p", b"k", "shoes red", until=100.0).result(60) is None
    assert embedder.texts == []
    made.stop()


def test_an_embedder_that_fails_costs_the_questions_at_hand():
    embedder = Words()
    made = librarian(embedder)
    made.start()
    embedder.error = RuntimeError("no memory")
    made.note(computed("shoes red"))
    with pytest.raises(RuntimeError, match="no memory"):
        verdict(made, "shoes red")
    settle(made)
    embedder.error = None
    made.note(computed("shoes red"))
    settle(made)
    assert isinstance(verdict(made, "shoes red"), Proposal)
    made.stop()


def test_a_cancelled_query_is_not_embedded():
    embedder = Words()
    made = librarian(embedder)
    made.start()
    embedder.hold.clear()
    first = made.search(b"p", b"a", "shoes red", time.monotonic() + LONG)
    while not first.running():
        time.sleep(0.001)
    given_up = made.search(b"p", b"b", "blue hats", time.monotonic() + LONG)
    assert given_up.cancel()
    embedder.hold.set()
    assert first.result(60) == Decline(Doubt.NO_NEIGHBOUR)
    settle(made)
    assert embedder.texts == ["shoes red"]
    made.stop()


def test_it_is_rebuilt_from_the_file(tmp_path):
    row_store = RowStore(tmp_path / "rows", "words@1")
    row_store.write([row("hats blue", key=b"gone"), row("socks old", expires=1.0)], [])
    made = librarian(row_store=row_store)
    made.start()
    made.note(computed("shoes red"))
    made.forget(b"gone")
    made.stop()

    again = librarian(row_store=RowStore(tmp_path / "rows", "words@1"))
    again.start()
    assert isinstance(verdict(again, "shoes red"), Proposal)
    assert verdict(again, "hats blue") != Proposal(b"gone", 1.0, "hats blue")
    assert again.facts().entries == 1
    again.stop()


def test_what_the_room_does_not_hold_leaves_the_file_too(tmp_path):
    row_store = RowStore(tmp_path / "rows", "words@1")
    made = librarian(row_store=row_store, max_bytes=2 * row("shoes 1").nbytes)
    made.start()
    for number in range(5):
        made.note(computed(f"shoes {number}"))
    settle(made)
    assert made.facts().entries == 2
    made.stop()
    left = RowStore(tmp_path / "rows", "words@1")
    assert [each.question for each in left.load(0.0)] == ["shoes 3", "shoes 4"]
    left.close()


class Slow(Words):
    """Each call takes ten of the seconds that `now` counts."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def embed(self, texts):
        self.now += 10.0
        return super().embed(texts)


def test_notes_leave_most_of_the_time_to_questions():
    embedder = Slow()
    made = librarian(embedder, clock=lambda: embedder.now)
    made.start()
    made.note(computed("shoes red", said="yes"))
    while embedder.texts != ["yes", "shoes red"]:
        time.sleep(0.001)
    made.note(computed("blue hats", said="no"))
    assert made.search(b"p", b"k", "shoes red", LONG).result(60) is not None
    assert "blue hats" not in embedder.texts
    made.stop(60)  # whoever ends does what is left
    assert embedder.texts[-2:] == ["no", "blue hats"]


def test_notes_that_come_together_are_embedded_together_and_errands_stay_in_their_order():
    calls: list[list[str]] = []

    class Counting(Words):
        def embed(self, texts):
            calls.append(list(texts))
            return super().embed(texts)

    embedder = Counting()
    made = librarian(embedder)
    for number in range(5):
        made.note(computed(f"question {number}", said=f"answer {number}"))
    made.forget(b"question 4")
    made.note(computed("question 5", said="answer 5"))
    made.start()
    settle(made)
    made.stop()
    assert [[text for text in texts if text.startswith("answer")] for texts in calls] == [
        ["answer 0", "answer 1", "answer 2", "answer 3"],
        ["answer 4"],
        ["answer 5"],
    ]
    assert made.facts().entries == 5


def test_more_notes_than_can_be_taken_are_left(monkeypatch):
    monkeypatch.setattr("headrace.response_cache.semantic.search_thread._BACKLOG", 2)
    made = librarian()
    for number in range(4):
        made.note(computed(f"question {number}"))
    made.forget(b"question 0")  # is never left
    made.start()
    settle(made)
    made.stop()
    assert made.facts().entries == 1
