from __future__ import annotations

import json
import math
from dataclasses import fields

import pytest

from headrace.core.events import (
    AdmitReason,
    Admitted,
    Emitted,
    Finished,
    PromptScored,
    Stepped,
    StepRows,
)
from headrace.core.knobs import Knobs
from headrace.core.plan import Row, TokenLogprob
from headrace.core.request import FinishReason, Request, SamplingParams, Slo
from headrace.observe.recording.fingerprints import read
from headrace.observe.recording.moments import (
    Adopted,
    Begun,
    Cancelled,
    Drained,
    Outcome,
    Raised,
    Reset,
    Submitted,
    Took,
    Turned,
)
from headrace.observe.recording.wire import RECORDED, WITHHELD, Scribe, event_line, plain


def as_is(request_id, tokens):
    return tokens


def test_every_field_of_a_request_is_recorded_or_withheld():
    """A new field must be decided on: what scheduling goes by is told, what says anything of the text is not."""
    assert {each.name for each in fields(Request)} == {*RECORDED, *WITHHELD}
    assert not set(RECORDED) & set(WITHHELD)


def test_groups_stay_apart_and_have_no_names():
    """A group's name is what callers write into ``prompt_cache_key``."""
    scribe = Scribe(b"key")
    reported = [
        scribe.line(Submitted(Request(id, (1,), affinity=group), 0.0))["submit"]["affinity"]
        for id, group in (("a", "secret group"), ("b", "secret group"), ("c", "another"), ("d", ""))
    ]
    assert reported[0] == reported[1] != reported[2]
    assert reported[3] == ""
    assert "secret" not in reported[0]


def test_no_text_and_no_token_reaches_the_file():
    scribe = Scribe(b"key")
    params = SamplingParams(
        max_tokens=9, stop=("secret stop",), stop_token_ids=(700_001,), bad_words=((700_002,),), seed=700_003
    )
    request = Request(
        "r",
        (700_004, 700_005),
        params,
        salt="secret salt",
        eos_token_ids=frozenset({700_006}),
        answered=(700_010,),
    )
    score = TokenLogprob(700_007, -1.0, 1, ((700_008, -2.0),))
    lines = [
        scribe.line(Submitted(request, 1.0)),
        scribe.line(
            Took(
                1.0,
                0.5,
                Outcome({}, {0: 1}, {}),
                (
                    Emitted("r", (700_009,), (score,)),
                    PromptScored("r", 0, (score,)),
                    Finished("r", FinishReason.STOP, 2, 1, 0, stop_token=700_006),
                ),
            )
        ),
    ]
    text = json.dumps(lines)
    assert "secret" not in text
    assert "7000" not in text
    assert lines[0]["submit"]["max_tokens"] == 9
    assert lines[1]["events"][1] == ["PromptScored", {"request_id": "r", "start": 0, "logprobs": 1}]
    assert lines[1]["events"][2][1]["stop_token"] == 0


@pytest.mark.parametrize(
    ("moment", "line"),
    [
        (Begun("1.0", {"a": (1, 2)}), {"headrace_trace": 2, "version": "1.0", "settings": {"a": [1, 2]}}),
        (Cancelled("r", FinishReason.STOP, 2.0), {"cancel": "r", "why": "stop", "now": 2.0}),
        (Reset(lower=True), {"reset": "all"}),
        (Reset(lower=False), {"reset": "device"}),
        (Adopted(7), {"adopted": 7}),
        (Raised(3.0, "Stalled: x"), {"raised": "Stalled: x", "now": 3.0}),
        (Drained(()), {"events": []}),
        (Took(1.0, 0.25, None, ()), {"step": 1.0, "seconds": 0.25, "events": []}),
        (
            Took(1.0, 0.25, Outcome({2: 3}, {}, {0: "NaN"}), ()),
            {
                "step": 1.0,
                "seconds": 0.25,
                "out": {"counts": {"2": 3}, "failures": {"0": "NaN"}},
                "events": [],
            },
        ),
    ],
)
def test_lines(moment, line):
    assert json.loads(json.dumps(Scribe(b"key").line(moment))) == line


def test_knobs_come_back_whole():
    line = json.loads(json.dumps(Scribe(b"key").line(Turned(Knobs(batched_tokens=7)))))
    assert Knobs(**line["knobs"]) == Knobs(batched_tokens=7)


def test_events_are_short_and_tokens_shown_as_asked():
    assert event_line(Admitted("r", AdmitReason.NEW, 4, 8), as_is) == [
        "Admitted",
        {"request_id": "r", "reason": "new", "cached_tokens": 4, "known_tokens": 8},
    ]
    _, reported = event_line(Emitted("r", (5, 6)), lambda request_id, tokens: tuple(reversed(tokens)))
    assert read(reported["tokens"]) == (6, 5)
    assert event_line(Stepped(1, 2, 3, 4, 5, 6, 7, 8, 9, 10), as_is)[1]["blocks_total"] == 8


def test_the_rows_of_a_step_are_not_written():
    """A replay plans the same rows; a trace would be twice as long."""
    work = StepRows(1.0, ("r",), (Row(0, 1, 1, (), True),))
    step = Stepped(1, 2, 3, 4, 5, 6, 7, 8, 9, 10)
    assert event_line(step._replace(work=work), as_is) == event_line(step, as_is)


def test_infinite_times_and_targets_are_plain_json():
    reported = plain({"arrived": -math.inf, "slo": Slo(1.0, None)})
    assert json.dumps(reported, allow_nan=False) == '{"arrived": "-inf", "slo": [1.0, null]}'
    assert float(reported["arrived"]) == -math.inf
