"""The lives of requests, on event lists made by hand."""

from __future__ import annotations

import json

from headrace.core.events import (
    AdmitReason,
    Admitted,
    Arrived,
    Chunked,
    ChunkReason,
    Emitted,
    Finished,
    Layer,
    LookedUp,
    Lookup,
    Preempted,
    PreemptReason,
    Skipped,
    SkipReason,
    Spared,
    Stepped,
    StepRows,
    TurnedAway,
    Verified,
)
from headrace.core.plan import Row
from headrace.core.request import FinishReason, RejectReason
from headrace.observe.steps import timelines
from headrace.observe.steps.timelines import Stage, Timelines


def stepped(step: int, began: float, *rows: tuple[str, int, int]) -> Stepped:
    work = StepRows(
        began,
        tuple(name for name, _, _ in rows),
        tuple(Row(i, a, n, (), True) for i, (_, a, n) in enumerate(rows)),
    )
    return Stepped(step, 0, 0, 0, len(rows), 0, 1, 8, 16, 1, work)


def lived() -> Timelines:
    """A request that waits, computes its prompt in two chunks, is preempted, resumes and ends."""
    reported = Timelines()
    for now, event in (
        (9.9, LookedUp("a", Layer.EXACT, Lookup.MISS, 0.1)),
        (10.0, Arrived("a", 40, "acme", 0)),
        (10.5, Skipped("a", SkipReason.NO_SLOT)),
        (12.0, Admitted("a", AdmitReason.NEW, 16, 40, 11.0)),
        (12.0, Chunked("a", 16, 20, ChunkReason.BUDGET)),
        (12.0, stepped(0, 11.0, ("a", 16, 20))),
        (13.0, Chunked("a", 36, 4, ChunkReason.REST)),
        (13.0, Emitted("a", (1,))),
        (13.0, stepped(1, 11.9, ("a", 36, 4))),
        (14.0, Verified("a", "ngram", 3, 1)),
        (14.0, Emitted("a", (2, 3))),
        (14.5, Preempted("a", PreemptReason.NO_BLOCKS, 42)),
        (16.0, Admitted("a", AdmitReason.RESUMED, 32, 43, 15.0)),
        (16.0, Chunked("a", 32, 11, ChunkReason.WHOLE)),
        (16.0, Emitted("a", (4,))),
        (16.0, Finished("a", FinishReason.STOP, 40, 4, 16)),
        (16.0, stepped(2, 15.0, ("a", 32, 11))),
    ):
        reported.fold(event, now)
    return reported


def test_a_life_has_its_stages_chunks_tokens_and_events() -> None:
    life = lived().get("a")
    assert life is not None
    shown = life.shown()
    assert json.loads(json.dumps(shown)) == shown
    assert [(each["stage"], each["start"], each["end"]) for each in shown["stages"]] == [
        ("queue", 0.0, 1.0),
        ("prefill", 1.0, 3.0),
        ("decode", 3.0, 4.5),
        ("queue", 4.5, 5.0),
        ("prefill", 5.0, 6.0),
    ]
    # The second step was planned before the first had ended; its time begins at that end.
    assert [(c["start"], c["end"], c["position"], c["tokens"]) for c in shown["chunks"]] == [
        (1.0, 2.0, 16, 20),
        (2.0, 3.0, 36, 4),
        (5.0, 6.0, 32, 11),
    ]
    assert shown["token_seconds"] == [3.0, 4.0, 4.0, 6.0]
    assert shown["output_tokens"] == 4
    events = [(each["event"], each["seconds"]) for each in shown["events"]]
    assert events == [
        ("cache_lookup", -0.2),
        ("waits", 0.5),
        ("admitted", 1.0),
        ("drafts", 4.0),
        ("preempted", 4.5),
        ("resumed", 5.0),
    ]
    assert "--max-num-seqs" in shown["events"][1]["why"]
    assert shown["finish"] == {"seconds": 6.0, "reason": "stop", "message": ""}


def test_an_open_request_has_a_stage_that_lasts_until_now() -> None:
    reported = Timelines()
    reported.fold(Arrived("a", 4, "t", 0), 1.0)
    reported.fold(Skipped("a", SkipReason.NO_BLOCKS), 1.5)
    life = reported.get("a")
    assert life is not None
    assert [tuple(span) for span in life.stages(3.0)] == [(Stage.QUEUE, 1.0, 3.0)]
    [waiting] = reported.waiting()
    assert (waiting.request_id, waiting.since) == ("a", 1.0)
    assert "no room" in waiting.reason


def test_a_request_that_a_cache_served_never_reached_the_engine() -> None:
    reported = Timelines()
    reported.fold(LookedUp("a", Layer.EXACT, Lookup.HIT, 0.25), 2.0)
    reported.fold(Spared("a", "acme", Layer.EXACT, 7, 5, 60.0), 2.0)
    life = reported.get("a")
    assert life is not None
    assert (life.tenant, life.prompt_tokens, life.output_tokens) == ("acme", 7, 5)
    assert life.finish == {"seconds": 0.25, "reason": "cached", "message": ""}
    assert [mark.event for mark in life.marks] == ["cache_lookup", "served_from_cache"]


def test_a_rejected_request_says_why() -> None:
    reported = Timelines()
    reported.fold(TurnedAway("a", "acme", "default", RejectReason.QUEUE_FULL), 2.0)
    reported.fold(Finished("a", FinishReason.REJECTED, 7, 0, 0, "full"), 2.0)
    life = reported.get("a")
    assert life is not None
    assert "queue was full" in life.marks[0].facts["why"]
    assert life.finish is not None
    assert life.finish["message"] == "full"


def test_ended_requests_and_token_times_are_bounded(monkeypatch) -> None:
    monkeypatch.setattr(timelines, "MOST_TIMES", 10)
    reported = Timelines(keep=5)
    for i in range(20):
        name = f"r{i}"
        reported.fold(Arrived(name, 4, "t", 0), i)
        reported.fold(Emitted(name, (1, 2, 3)), i)
        reported.fold(Finished(name, FinishReason.STOP, 4, 3, 0), i)
        reported.fold(LookedUp(f"never{i}", Layer.EXACT, Lookup.MISS, 0.0), i)
    assert [name for name, _ in reported.items()] == ["r17", "r18", "r19"]
    assert reported.get("never14") is None
    assert reported.get("never19") is not None


def test_events_of_one_request_are_bounded(monkeypatch) -> None:
    monkeypatch.setattr(timelines, "MOST_TIMES_EACH", 4)
    reported = Timelines()
    reported.fold(Arrived("a", 4, "t", 0), 0.0)
    for i in range(2000):
        reported.fold(Skipped("a", SkipReason.NO_SLOT), i)
        reported.fold(Emitted("a", (1,)), i)
    life = reported.get("a")
    assert life is not None
    assert len(life.tokens) == 4
    assert life.shown()["token_seconds_dropped"] == 1996
    assert len(life.marks) + life.dropped == 2000
    assert life.dropped > 0


def test_an_unknown_request_changes_nothing() -> None:
    reported = Timelines()
    reported.fold(Emitted("a", (1,)), 1.0)
    reported.fold(Skipped("a", SkipReason.NO_SLOT), 1.0)
    reported.fold(stepped(0, 0.5, ("a", 0, 4)), 1.0)
    assert list(reported.items()) == []


def test_the_place_of_a_copied_block_follows_from_the_cached_tokens():
    book = Timelines()
    for name, cached in (("whole", 32), ("part", 37), ("none", 0), ("waits", 5)):
        book.fold(Arrived(name, 64, "t", 0, 0.0), 0.0)
        book.fold(Admitted(name, AdmitReason.NEW, cached, 64, 1.0), 1.0)
    book.fold(Preempted("waits", PreemptReason.NO_BLOCKS, 5), 2.0)
    assert book.copies(16) == {"part": 2}
