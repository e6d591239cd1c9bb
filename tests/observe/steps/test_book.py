"""The last steps, on event lists made by hand."""

from __future__ import annotations

import json

from headrace.core.events import (
    AdmitReason,
    Admitted,
    Arrived,
    Chunked,
    ChunkReason,
    Finished,
    Moved,
    MoveReason,
    Preempted,
    PreemptReason,
    Skipped,
    SkipReason,
    Stepped,
    StepRows,
    Verified,
)
from headrace.core.plan import Row, Tier
from headrace.core.request import FinishReason
from headrace.observe.steps import book as books
from headrace.observe.steps.book import StepBook
from headrace.observe.steps.record import RowKind, Waiting


def stepped(step: int, began: float, *rows: tuple[str, Row]) -> Stepped:
    work = StepRows(began, tuple(name for name, _ in rows), tuple(row for _, row in rows))
    return Stepped(step, 0, 0, 0, len(rows), 1, 3, 8, 48, 40, work)


def row(start: int, length: int, drafts: tuple[int, ...] = (), blocks: tuple[int, ...] = ()) -> Row:
    return Row(0, start, length, blocks, True, drafts)


def test_a_step_has_rows_events_and_the_queue() -> None:
    book = StepBook()
    for event in (
        Arrived("a", 33, "t", 0),
        Arrived("b", 9, "t", 0),
        Admitted("a", AdmitReason.NEW, 0, 33),
        Moved(Tier.HOST, Tier.DEVICE, 2, 100, MoveReason.RESTORED, "a"),
        Chunked("a", 0, 32, ChunkReason.BUDGET),
        Skipped("b", SkipReason.NO_SLOT),
        stepped(0, 1.0, ("a", row(0, 32, blocks=(4, 7)))),
    ):
        book.fold(event, 2.0)
    [step] = book.records()
    assert [(r.request_id, r.kind, r.start, r.length, r.new_blocks) for r in step.rows] == [
        ("a", RowKind.PREFILL, 0, 32, (4, 7))
    ]
    assert [(note.request_id, note.event) for note in step.notes] == [
        ("a", "arrived"),
        ("b", "arrived"),
        ("a", "admitted"),
        ("a", "restored"),
    ]
    assert [each.request_id for each in step.queue] == ["b"]
    assert "--max-num-seqs" in step.queue[0].reason
    assert (step.began, step.ended, step.blocks_held, step.blocks_total) == (1.0, 2.0, 3, 8)
    shown = step.shown(1.0)
    assert json.loads(json.dumps(shown)) == shown
    assert (shown["began"], shown["ended"]) == (0.0, 1.0)


def test_the_last_token_of_a_prompt_is_prefill_and_drafts_are_decode() -> None:
    book = StepBook()
    book.fold(Chunked("a", 32, 1, ChunkReason.REST), 1.0)
    book.fold(Verified("b", "ngram", 3, 2), 1.0)
    book.fold(stepped(0, 0.0, ("a", row(32, 1)), ("b", row(50, 4, (1, 2, 3)))), 1.0)
    book.fold(stepped(1, 1.0, ("a", row(33, 1)), ("b", row(53, 1))), 2.0)
    first, second = book.records()
    assert [r.kind for r in first.rows] == [RowKind.PREFILL, RowKind.DECODE]
    assert (first.rows[1].drafted, first.rows[1].accepted) == (3, 2)
    assert [r.kind for r in second.rows] == [RowKind.DECODE] * 2
    assert second.rows[1].drafted == 0


def test_a_request_admitted_for_the_next_step_is_shown_with_that_step() -> None:
    """With overlap the next step is planned before this one is committed."""
    book = StepBook()
    book.fold(Admitted("b", AdmitReason.NEW, 0, 4), 1.0)
    book.fold(stepped(0, 0.0, ("a", row(5, 1))), 1.0)
    book.fold(stepped(1, 0.5, ("a", row(6, 1)), ("b", row(0, 4))), 2.0)
    first, second = book.records()
    assert not first.notes
    assert [note.event for note in second.notes] == ["admitted"]
    assert second.began == 1.0


def test_a_preempted_request_waits_again_and_an_ended_one_does_not() -> None:
    book = StepBook(waiting=(Waiting("old", 0.5, "no slot"),))
    book.fold(Admitted("a", AdmitReason.NEW, 0, 4), 1.0)
    book.fold(Preempted("a", PreemptReason.NO_BLOCKS, 9), 2.0)
    book.fold(stepped(0, 1.0, ("c", row(5, 1))), 2.0)
    book.fold(Finished("old", FinishReason.CANCELLED, 1, 0, 0), 3.0)
    book.fold(stepped(1, 2.0, ("c", row(6, 1))), 3.0)
    first, second = book.records()
    assert [each.request_id for each in first.queue] == ["old", "a"]
    assert first.queue[1].reason.startswith("preempted: ")
    assert [each.request_id for each in second.queue] == ["a"]
    assert [note.event for note in first.notes] == ["preempted"]
    assert book.running == frozenset()


def test_steps_and_rows_are_bounded(monkeypatch) -> None:
    monkeypatch.setattr(books, "MOST_QUEUED", 2)
    book = StepBook(most=5, most_rows=7)
    for i in range(4):
        book.fold(Arrived(f"w{i}", 1, "t", 0), 0.0)
    for i in range(10):
        book.fold(stepped(i, i, ("a", row(i, 1)), ("b", row(i, 1))), i + 1.0)
    assert [step.step for step in book.records()] == [7, 8, 9]
    assert [step.step for step in book.records(after=7, most=1)] == [9]
    assert len(book.records()[0].queue) == 2
    assert book.last == 9
