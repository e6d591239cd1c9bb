from __future__ import annotations

import gzip
import json
import logging
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
from headrace.core.images import ImageSpan
from headrace.core.knobs import Knobs
from headrace.core.plan import Row, TokenLogprob
from headrace.core.request import FinishReason, Request, SamplingParams, Slo
from headrace.observe.trace_file import (
    RECORDED,
    STOP,
    WITHHELD,
    Adopted,
    Background,
    Begun,
    Cancelled,
    Drained,
    Fingerprints,
    Outcome,
    Raised,
    Reset,
    Scribe,
    Spent,
    Submitted,
    Took,
    TraceWriter,
    Turned,
    event_line,
    plain,
    read,
    written,
)


def request(name: str, *tokens: int, **more) -> Request:
    return Request(name, tokens, **more)


def common(left, right) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right))
    )


def test_fingerprints_are_equal_just_as_far_as_prefixes_are():
    prints = Fingerprints(b"key")
    first, _ = prints.begin(request("a", *range(50)))
    assert len(first) == len(set(first)) == 50
    for same in (0, 1, 7, 49):
        other, _ = prints.begin(request(f"b{same}", *range(same), 99, *range(same + 1, 50)))
        assert common(first, other) == same
        assert not set(first[same:]) & set(other[same:])


def test_prompts_with_images_agree_up_to_the_first_that_differs():
    prints = Fingerprints(b"key")
    first, _ = prints.begin(request("a", *range(50), images=(ImageSpan(20, 5, bytes(32)),)))
    other, _ = prints.begin(request("b", *range(50), images=(ImageSpan(20, 5, b"1" * 32),)))
    assert common(first, other) == 20
    assert not set(first[20:]) & set(other[20:])
    assert prints.begin(request("c", *range(50), images=(ImageSpan(20, 5, bytes(32)),)))[0] == first


def test_other_salts_adapters_and_recordings_have_nothing_in_common():
    prints = Fingerprints(b"key")
    first, _ = prints.begin(request("a", 1, 2, 3))
    assert not set(first) & set(prints.begin(request("b", 1, 2, 3, salt="x"))[0])
    assert not set(first) & set(prints.begin(request("c", 1, 2, 3, adapter="x"))[0])
    assert not set(first) & set(Fingerprints(b"another").begin(request("a", 1, 2, 3))[0])


def test_a_later_prompt_continues_an_answer():
    prints = Fingerprints(b"key")
    prompt, brought = prints.begin(request("a", 1, 2, answered=(3,)))
    answer = brought + prints.answer("a", (4,)) + prints.answer("a", (5, 6))
    assert prints.begin(request("b", 1, 2, 3, 4, 5, 6, 7))[0][:6] == prompt + answer


def test_only_tokens_that_end_an_answer_get_the_stop_mark():
    prints = Fingerprints(b"key")
    ends = {"eos_token_ids": frozenset({7})}
    prints.begin(request("a", 7, params=SamplingParams(stop_token_ids=(9,)), **ends))
    assert STOP not in prints.answer("a", (1, 2))
    assert prints.answer("a", (9,)) == prints.answer("a", (7,)) == (STOP,)
    prints.begin(request("b", 1, params=SamplingParams(ignore_eos=True), **ends))
    assert STOP not in prints.answer("b", (7,))
    assert prints.begin(request("c", 7, answered=(1, 7), **ends))[1][-1] == STOP


def test_a_refused_twin_does_not_disturb_the_live_one():
    prints, alone = Fingerprints(b"key"), Fingerprints(b"key")
    for one in (prints, alone):
        one.begin(request("a", 1, 2))
    prints.begin(request("a", 8, 9))
    prints.end("a")
    assert prints.answer("a", (3,)) == alone.answer("a", (3,))
    prints.end("a")
    with pytest.raises(KeyError):
        prints.answer("a", (4,))


def test_text_and_back():
    assert read(written((1, 2, (1 << 24) - 1))) == (1, 2, (1 << 24) - 1)
    assert written(()) == ""
    for wrong in ("AAA", "AAAAA===", "AAAAAA==", "\u00e9"):
        with pytest.raises(ValueError):  # noqa: PT011 - base64's own error or ours
            read(wrong)


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
        (Spent(0.25), {"spent": 0.25}),
        (Background(-1), {"background": -1}),
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


BEGUN = Begun("test", {"num_blocks": 4})


def test_moments_are_written_in_order(tmp_path):
    tape = TraceWriter(tmp_path / "trace.jsonl", 1 << 20)
    for moment in (BEGUN, Submitted(Request("r", (1, 2)), 0.5), Took(0.5, 0.1, None, ()), Reset(lower=True)):
        tape.tell(moment)
    tape.close()
    lines = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    assert [next(iter(line)) for line in lines] == ["headrace_trace", "submit", "step", "reset"]
    assert not tape._thread.is_alive()


def test_a_name_that_ends_in_gz_is_compressed(tmp_path):
    tape = TraceWriter(tmp_path / "trace.jsonl.gz", 1 << 20)
    tape.tell(BEGUN)
    tape.close()
    text = gzip.decompress((tmp_path / "trace.jsonl.gz").read_bytes())
    assert json.loads(text)["settings"] == {"num_blocks": 4}


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_a_start_that_fails_leaves_the_last_recording_and_one_that_does_not_replaces_it(tmp_path, name):
    path = tmp_path / name
    for count in (50, 0, 2):
        tape = TraceWriter(path, 1 << 20)
        for number in range(count):
            tape.tell(Took(float(number), 0.0, None, ()))
        tape.close()
        raw = path.read_bytes()
        lines = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode().splitlines()
        assert len(lines) == (count or 50)
        assert json.loads(lines[0])["step"] == 0.0


def test_a_file_that_another_server_writes_is_left_alone(tmp_path):
    tape = TraceWriter(tmp_path / "trace.jsonl", 1 << 20)
    with pytest.raises(BlockingIOError):
        TraceWriter(tmp_path / "trace.jsonl", 1 << 20)
    tape.tell(BEGUN)
    tape.close()
    assert json.loads((tmp_path / "trace.jsonl").read_text())["settings"] == {"num_blocks": 4}
    TraceWriter(tmp_path / "trace.jsonl", 1 << 20).close()  # it is free again


def test_a_full_file_ends_the_recording_and_says_so(tmp_path, caplog):
    tape = TraceWriter(tmp_path / "trace.jsonl", 400)
    with caplog.at_level(logging.WARNING):
        for number in range(1000):
            tape.tell(Took(float(number), 0.0, None, ()))
        tape.close()
    text = (tmp_path / "trace.jsonl").read_text()
    assert 400 <= len(text) < 600
    assert json.loads(text.splitlines()[-1]) == {"stopped": "the trace has reached 400 bytes"}
    assert "serving continues" in caplog.text
    waiting = tape._queue.qsize()
    assert (
        waiting <= 2
    )  # released, but for what was being put as it ended: one moment, and the end of `close`
    tape.tell(Reset(lower=True))
    assert tape._queue.qsize() == waiting  # nothing piles up behind a recording that has ended


def test_what_cannot_be_written_ends_the_recording_only(tmp_path, caplog):
    tape = TraceWriter(tmp_path / "trace.jsonl", 1 << 20)
    with caplog.at_level(logging.WARNING):
        tape.tell(Took(0.0, 0.0, None, (None,)))  # type: ignore[arg-type]
        tape.close()
    assert "recording to" in caplog.text
    assert "stopped" in caplog.text
    tape.tell(Cancelled("r", "x", 0.0))  # type: ignore[arg-type]
