from __future__ import annotations

import gzip
import json
from contextlib import suppress

import pytest

from headrace.core.request import FinishReason, Request
from headrace.lab.replay.trace import BadTrace, Step, read_trace
from headrace.observe.trace_file import Begun, Submitted, Took, TraceWriter
from tests.lab.replay.recorded import record_life

HEADER = '{"headrace_trace": 2, "version": "test", "settings": {}}\n'
STEP = '{"step": 1.0, "seconds": 0.1, "events": []}\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r":1: this is not JSON"),
        ('{"a": 1}\n', r":1: this is not a trace"),
        ('{"headrace_trace": 9}\n', r":1: this trace has version 9; this Headrace reads version 2"),
        (HEADER + STEP + "{]\n", r":3: this is not JSON"),
        (HEADER + STEP + "[]\n", r":3: expected a JSON object"),
        (HEADER + '{"leap": 1}\n', r":2: .* unknown kind of line with the fields leap"),
        (HEADER + '{"step": "soon", "seconds": 0.1, "events": []}\n', r":2: .* could not convert"),
        (HEADER + '{"step": 1, "seconds": 0.1, "events": [["Emitted", {}]]}\n', r":2: .* lacks 'request_id'"),
        (HEADER + '{"cancel": "r", "why": "bored", "now": 1}\n', r":2: .* 'bored' is not a valid"),
        (HEADER + '{"submit": {"id": "r"}, "now": 1}\n', r":2: .* lacks 'arrived'"),
        (HEADER + '{"knobs": {"colour": 1}}\n', r":2: .* 'colour'"),
    ],
)
def test_a_corrupted_line_is_named(tmp_path, text, message):
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(BadTrace, match=r"trace\.jsonl" + message):
        read_trace(path)


def test_bytes_that_are_no_text_are_named(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(HEADER.encode() + b"\xff\xfe\n")
    with pytest.raises(BadTrace, match="not text"):
        read_trace(path)


def test_a_last_line_that_breaks_off_ends_the_trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(HEADER + STEP + STEP[:20])
    trace = read_trace(path)
    assert len(trace.lines) == 1
    assert trace.cut == "line 3 is incomplete"


def test_a_kill_in_the_middle_of_a_letter_breaks_off_a_line_only(tmp_path):
    """Names of tenants are whatever callers write; the file must end well at any byte."""
    path = tmp_path / "trace.jsonl"
    tape = TraceWriter(path, 1 << 20)
    tape.tell(Begun("test", {}))
    tape.tell(Took(0.0, 0.1, None, ()))
    tape.tell(Submitted(Request("r", (1,), tenant="Zoë"), 0.0))
    tape.close()
    whole = path.read_bytes()
    for size in range(whole.rindex(b"\n", 0, -1) + 2, len(whole)):
        path.write_bytes(whole[:size])
        assert read_trace(path).cut == "line 3 is incomplete"
    path.write_bytes(whole)
    assert read_trace(path).of(Submitted)[0].request.tenant == "Zoë"


def test_a_damaged_compressed_file_is_a_bad_trace_or_a_short_one(tmp_path):
    path = tmp_path / "trace.jsonl.gz"
    whole = gzip.compress((HEADER + STEP * 200).encode())
    for place in range(12, len(whole), 3):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        with suppress(BadTrace):  # or it ends where it breaks off: nothing else
            read_trace(path)


def test_why_a_recording_stopped_is_kept(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(HEADER + STEP + '{"stopped": "full"}\n')
    assert read_trace(path).cut == "full"


def test_a_compressed_trace_is_read_and_so_is_half_of_one(tmp_path, monkeypatch):
    plain, small = tmp_path / "trace.jsonl", tmp_path / "trace.jsonl.gz"
    record_life(1, plain, monkeypatch)
    small.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_trace(small).lines == read_trace(plain).lines
    small.write_bytes(small.read_bytes()[:-40])
    assert 0 < len(read_trace(small).lines) < len(read_trace(plain).lines)


def test_what_requests_were_answered_is_collected(tmp_path, monkeypatch):
    path = tmp_path / "trace.jsonl"
    record, _ = record_life(1, path, monkeypatch)
    trace = read_trace(path)
    assert {name: len(answer.tokens) for name, answer in trace.answers.items() if answer.tokens} == {
        name: len(tokens) for name, tokens in record.tokens.items()
    }
    assert {name: answer.reason for name, answer in trace.answers.items()} == {
        name: end.reason for name, (end,) in record.ends.items()
    }
    stopped = [
        name for name, (end,) in record.ends.items() if end.reason is FinishReason.STOP and end.stop_token
    ]
    assert stopped
    assert all(trace.answers[name].tokens[-1] == 0 for name in stopped)


def test_a_request_comes_back_with_what_scheduling_goes_by(tmp_path, monkeypatch):
    path = tmp_path / "trace.jsonl"
    record_life(2, path, monkeypatch)
    reported = [json.loads(line)["submit"] for line in path.read_text().splitlines() if '"submit"' in line]
    requests = [moment.request for moment in read_trace(path).of(Submitted)]
    for told_one, request in zip(reported, requests, strict=True):
        assert told_one["priority"] == request.priority
        assert told_one["max_tokens"] == request.params.max_tokens
        assert len(told_one["tokens"]) == 4 * len(request.tokens)
    assert read_trace(path).of(Step)
