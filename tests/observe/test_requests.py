"""The book of requests on event lists made by hand."""

from __future__ import annotations

import json
from enum import StrEnum

import pytest

from headrace.core.events import (
    AdmitReason,
    Admitted,
    Arrived,
    Chunked,
    ChunkReason,
    DeclineReason,
    Emitted,
    Finished,
    Layer,
    LookedUp,
    Lookup,
    Moved,
    MoveReason,
    Preempted,
    PreemptReason,
    Recomputed,
    RecomputeReason,
    RestoreDeclined,
    Skipped,
    SkipReason,
    TurnedAway,
)
from headrace.core.plan import Tier
from headrace.core.request import FinishReason, RejectReason, Slo
from headrace.observe.reasons import reason_text
from headrace.observe.requests import HISTORY, LOOKUPS, RequestBook


def test_a_request_is_explained_from_arrival_to_end() -> None:
    book = RequestBook()
    book.fold(Arrived("a", 40, "acme", 3), 10.0)
    book.fold(Skipped("a", SkipReason.NO_SLOT), 10.5)
    book.fold(Admitted("a", AdmitReason.NEW, 16, 40), 11.0)
    book.fold(Chunked("a", 16, 24, ChunkReason.REST), 11.0)
    book.fold(Emitted("a", (1, 2)), 12.0)
    book.fold(Preempted("a", PreemptReason.NO_BLOCKS, 41), 13.0)
    reported = book.explain("a", now=14.0)
    assert reported is not None
    assert (reported["state"], reported["position"], reported["age_seconds"]) == ("waiting", 0, 4.0)
    assert "chosen as the victim" in reported["waits_because"]
    assert reported["cost"] == {
        "computed_tokens": 25,
        "cached_tokens": 16,
        "generated_tokens": 2,
        "waited_seconds": 1.0,
        "served_seconds": 3.0,
    }
    book.fold(Admitted("a", AdmitReason.RESUMED, 32, 42), 14.0)
    book.fold(Finished("a", FinishReason.STOP, 40, 2, 16, stop_token=2), 15.0)

    reported = book.explain("a")
    assert reported is not None
    assert json.loads(json.dumps(reported)) == reported
    assert reported["waits_because"] is None
    assert all(each.pop("why") for each in reported["history"])
    assert reported["history"] == [
        {"seconds": 0.5, "event": "skipped", "reason": "no_slot"},
        {"seconds": 1.0, "event": "admitted", "reason": "new", "cached_tokens": 16},
        {"seconds": 1.0, "event": "chunked", "reason": "rest", "start": 16, "length": 24},
        {"seconds": 3.0, "event": "preempted", "reason": "no_blocks", "lost_tokens": 41},
        {"seconds": 4.0, "event": "admitted", "reason": "resumed", "cached_tokens": 32},
    ]
    assert reported["finish"] == {"seconds": 5.0, "reason": "stop", "message": "", "stop_token": 2}
    assert (reported["state"], reported["position"], reported["preemptions"]) == ("finished", None, 1)
    assert (reported["prompt_tokens"], reported["output_tokens"], reported["computed_tokens"]) == (40, 2, 24)
    assert (reported["cached_tokens"], reported["cost"]["cached_tokens"]) == (16, 48)
    assert (reported["first_token_seconds"], reported["tenant"], reported["priority"]) == (2.0, "acme", 3)


def test_a_semantic_miss_says_why() -> None:
    book = RequestBook()
    book.fold(LookedUp("a", Layer.EXACT, Lookup.MISS, 0.1, "unknown"), 9.0)
    book.fold(LookedUp("a", Layer.SEMANTIC, Lookup.MISS, 0.1, "judge_pending"), 9.0)
    for name in ("a", "b"):
        book.fold(Arrived(name, 40, "acme", 3), 10.0)
    assert [(book.explain(name) or {})["semantic_miss"] for name in ("a", "b")] == ["judge_pending", None]


def test_lookups_of_requests_that_never_arrive_are_forgotten() -> None:
    book = RequestBook()
    for number in range(2 * LOOKUPS):
        book.fold(LookedUp(str(number), Layer.SEMANTIC, Lookup.MISS, 0.1, "low_score"), 9.0)
    for number in (0, 2 * LOOKUPS - 1):
        book.fold(Arrived(str(number), 1, "t", 0), 10.0)
    assert (book.explain("0") or {})["semantic_miss"] is None
    assert (book.explain(str(2 * LOOKUPS - 1)) or {})["semantic_miss"] == "low_score"


def test_one_that_runs_and_stands_still_says_why_until_it_goes_on() -> None:
    book = RequestBook()
    book.fold(Arrived("a", 40, "acme", 3, service_class="background"), 10.0)
    book.fold(Admitted("a", AdmitReason.NEW, 16, 40), 11.0)
    book.fold(Skipped("a", SkipReason.NOT_IDLE), 12.0)
    reported = book.explain("a")
    assert (reported["state"], reported["position"]) == ("running", None)
    assert reported["waits_because"] == reason_text(SkipReason.NOT_IDLE)
    book.fold(Emitted("a", (1,)), 13.0)
    assert book.explain("a")["waits_because"] is None


def test_position_counts_waiting_requests_ahead() -> None:
    book, ranked = RequestBook(), RequestBook(by_priority=True)
    for watcher in (book, ranked):
        for number, priority in enumerate((5, 5, 0)):
            watcher.fold(Arrived(str(number), 1, "t", priority), float(number))

    def positions(watcher: RequestBook) -> list[int]:
        return [(watcher.explain(str(number)) or {})["position"] for number in range(3)]

    assert positions(book) == [0, 1, 2]
    assert positions(ranked) == [1, 2, 0]
    book.fold(Admitted("0", AdmitReason.NEW, 0, 1), 3.0)
    assert positions(book) == [None, 0, 1]


def test_only_the_last_finished_are_kept_and_all_the_live() -> None:
    book = RequestBook(keep=3)
    for number in range(10):
        book.fold(Arrived(str(number), 1, "t", 0), 0.0)
    for number in range(8):
        book.fold(Finished(str(number), FinishReason.LENGTH, 1, 1, 0), 1.0)
    known = [number for number in range(10) if book.explain(str(number)) is not None]
    assert known == [5, 6, 7, 8, 9]


def test_a_long_history_is_cut_and_says_so() -> None:
    book = RequestBook()
    book.fold(Arrived("a", 10_000, "t", 0), 0.0)
    for start in range(HISTORY + 10):
        book.fold(Chunked("a", start, 1, ChunkReason.BUDGET), 1.0)
    reported = book.explain("a")
    assert reported is not None
    assert (len(reported["history"]), reported["history_dropped"]) == (HISTORY, 10)
    assert reported["computed_tokens"] == HISTORY + 10


def test_a_request_refused_at_the_door_is_explained() -> None:
    book = RequestBook()
    book.fold(Finished("x", FinishReason.REJECTED, 9, 0, 0, "prompt too long"), 1.0)
    reported = book.explain("x")
    assert reported is not None
    assert reported["finish"]["message"] == "prompt too long"
    assert book.explain("unknown") is None


def test_class_and_targets_are_reported() -> None:
    book = RequestBook()
    book.fold(Arrived("a", 40, "acme", 3, service_class="flex", slo=Slo(1.0, None)), 10.0)
    reported = book.explain("a")
    assert reported is not None
    assert (reported["service_class"], reported["slo"]) == (
        "flex",
        {"ttft_seconds": 1.0, "tpot_seconds": None},
    )
    assert reported["waits_because"] is None


def test_a_rejected_request_shows_the_reason() -> None:
    book = RequestBook()
    book.fold(TurnedAway("a", "acme", "flex", RejectReason.TENANT_LIMIT), 1.0)
    book.fold(Finished("a", FinishReason.REJECTED, 7, 0, 0, "enough"), 1.0)
    reported = book.explain("a")
    assert reported is not None
    assert (reported["tenant"], reported["service_class"], reported["prompt_tokens"]) == ("acme", "flex", 7)
    assert reported["history"][0]["event"] == "turned_away"
    assert "exceeded a quota" in reported["history"][0]["why"]


@pytest.mark.parametrize(
    "reasons",
    [
        AdmitReason,
        SkipReason,
        ChunkReason,
        PreemptReason,
        RejectReason,
        MoveReason,
        DeclineReason,
        RecomputeReason,
    ],
)
def test_every_reason_has_words(reasons: type[StrEnum]) -> None:
    assert all(reason_text(reason) for reason in reasons)


def test_restored_and_recomputed_tokens_are_reported() -> None:
    book = RequestBook()
    book.fold(Arrived("a", 40, "t", 0), 0.0)
    book.fold(Moved(Tier.DEVICE, Tier.HOST, 1, 100, MoveReason.EVICTED), 0.5)
    book.fold(Moved(Tier.HOST, Tier.DEVICE, 2, 200, MoveReason.RESTORED, "a"), 1.0)
    book.fold(RestoreDeclined("a", 16), 1.0)
    book.fold(Recomputed("a", 8, RecomputeReason.EVICTED), 1.0)
    reported = (book.explain("a") or {})["history"]
    assert [(entry["event"], entry["reason"]) for entry in reported] == [
        ("moved", "restored"),
        ("not_restored", "quicker_to_compute"),
        ("recomputed", "evicted"),
    ]
    assert (reported[0]["tier"], reported[0]["blocks"], reported[1]["tokens"]) == ("host", 2, 16)
