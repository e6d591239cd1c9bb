from __future__ import annotations

import io

import pytest
from rich.console import Console

from headrace.core.events import (
    AdmitReason,
    Admitted,
    Arrived,
    Chunked,
    ChunkReason,
    Emitted,
    Finished,
    Preempted,
    PreemptReason,
    Skipped,
    SkipReason,
)
from headrace.core.plan import Row
from headrace.core.request import FinishReason
from headrace.lab.replay.exact import Divergence, PlannedRow, RequestStates, Scene
from headrace.lab.replay.rerun import Tally
from headrace.lab.replay.show import (
    Timeline,
    comparison_rows,
    divergence_text,
    row_text,
    scene_panel,
)
from headrace.observe.steps.record import Waiting


def text_of(shown) -> str:
    out = io.StringIO()
    Console(file=out, width=140).print(shown)
    return out.getvalue()


def scene(step=7, now=12.5, events=(), rows=(), waiting=(), **more) -> Scene:
    return Scene(step, 9, now, 0.002, rows, (), len(rows), waiting, 3, 12, events, **more)


def row(name, start, length, prompt=10) -> PlannedRow:
    return PlannedRow(name, prompt, Row(0, start, length, (), True))


@pytest.mark.parametrize(
    ("planned", "text"),
    [
        (row("r", 10, 1), "token 2"),  # position 10 holds the first token; the row draws the second
        (row("r", 0, 10), "[0, 10) of prompt of 10"),
        (row("r", 4, 1), "[4, 5) of prompt of 10"),
        (row("r", 0, 14), "[0, 14) of prompt of 10 and recomputed output"),
    ],
)
def test_a_row_says_what_it_computes(planned, text):
    assert row_text(planned) == text


def test_a_panel_shows_rows_waiting_blocks_and_events():
    events = (
        Preempted("old", PreemptReason.NO_BLOCKS, 33),
        Finished("done", FinishReason.FAILED, 1, 2, 0, "[red] NaN"),
    )
    waiting = (Waiting("late", 12.0, "no_blocks"),)
    text = text_of(scene_panel(scene(events=events, rows=(row("r[1]", 0, 10),), waiting=waiting), 10.0))
    assert "step 7   2.5000 s   took 2.00 ms   1 rows, 10 tokens   1 running, 1 waiting   line 9" in text
    assert "r[1]" in text
    assert "[0, 10) of prompt of 10" in text
    assert "late   0.500 s  no blocks" in text
    assert "3 of 12 held" in text
    assert "old preempted (no_blocks): 33 computed tokens lost" in text
    assert "done finished (failed) after 2 tokens: [red] NaN" in text


def test_a_long_queue_is_cut_and_counted():
    waiting = tuple(Waiting(f"w{i}", 0.0, "no_slot") for i in range(30))
    text = text_of(scene_panel(scene(waiting=waiting), 0.0))
    assert "w15" in text
    assert "w16" not in text
    assert "and 14 more" in text


def test_an_error_outside_the_core_is_reported_as_such():
    text = text_of(scene_panel(scene(recorded_error="RuntimeError: CUDA"), 0.0))
    assert "raised when recorded: RuntimeError: CUDA" in text
    assert "nothing: the cause is outside the core" in text


def test_a_timeline_tells_one_request_and_joins_its_tokens():
    line = Timeline("r")
    line.add(
        scene(
            0, 1.0, (Arrived("r", 8, "me", 0), Skipped("r", SkipReason.NO_SLOT), Arrived("other", 1, "x", 0))
        )
    )
    line.add(scene(4, 2.0, (Admitted("r", AdmitReason.NEW, 4, 8), Chunked("r", 4, 4, ChunkReason.WHOLE))))
    for step in range(5, 9):
        line.add(scene(step, 2.0 + step, (Emitted("r", (1, 2)),)))
    line.add(scene(9, 20.0, (Finished("r", FinishReason.LENGTH, 8, 8, 4),)))
    text = text_of(line.table())
    reported = [
        "arrived: 8 tokens of me",
        "waits: no slot",
        "admitted (new), 4 of 8 tokens cached",
        "prompt [4, 8) planned: whole",
    ]
    reported += ["tokens 1 to 8", "finished (length) after 8 tokens"]
    assert [text.index(each) for each in reported] == sorted(text.index(each) for each in reported)
    assert "other" not in text
    assert "19.0000" in text  # seconds since it came
    assert Timeline("nobody").table() is None


def test_lives_side_by_side():
    first, second = Tally(), Tally()
    first.ttft, second.ttft = [1.0, 2.0, 3.0], []
    rows = dict(comparison_rows([first, second]))
    assert rows["TTFT s p50 / p95 / p99"] == ["2.000 / 2.900 / 2.980", "- / - / -"]


def test_where_two_lives_part():
    lines = divergence_text(Divergence(12, ["Admitted", {"request_id": "r"}], None))
    assert lines[0].endswith("line 12 on")
    assert "'Admitted'" in lines[1]
    assert "no further event" in lines[2]


def test_the_board_shows_which_requests_wait_since_when_and_why():
    board = RequestStates()
    reported = [
        (1.0, Arrived("a", 1, "x", 0)),
        (2.0, Skipped("a", SkipReason.NO_BLOCKS)),
        (3.0, Admitted("a", AdmitReason.NEW, 0, 1)),
        (4.0, Preempted("a", PreemptReason.NO_BLOCKS, 5)),
        (4.0, Arrived("b", 1, "x", 0)),
    ]
    for now, event in reported:
        board.fold(event, now)
    assert list(board.waiting.values()) == [
        Waiting("a", 4.0, "preempted: no_blocks"),
        Waiting("b", 4.0, "arrived"),
    ]
    board.fold(Finished("a", FinishReason.CANCELLED, 1, 0, 0), 5.0)
    assert list(board.waiting) == ["b"]
    assert not board.running
