from __future__ import annotations

import gzip
import json
import logging

import pytest

from headrace.core.request import Request
from headrace.observe.recording.moments import Begun, Cancelled, Reset, Submitted, Took
from headrace.observe.recording.tape import Tape

BEGUN = Begun("test", {"num_blocks": 4})


def test_moments_are_written_in_order(tmp_path):
    tape = Tape(tmp_path / "trace.jsonl", 1 << 20)
    for moment in (BEGUN, Submitted(Request("r", (1, 2)), 0.5), Took(0.5, 0.1, None, ()), Reset(lower=True)):
        tape.tell(moment)
    tape.close()
    lines = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    assert [next(iter(line)) for line in lines] == ["headrace_trace", "submit", "step", "reset"]
    assert not tape._thread.is_alive()


def test_a_name_that_ends_in_gz_is_compressed(tmp_path):
    tape = Tape(tmp_path / "trace.jsonl.gz", 1 << 20)
    tape.tell(BEGUN)
    tape.close()
    text = gzip.decompress((tmp_path / "trace.jsonl.gz").read_bytes())
    assert json.loads(text)["settings"] == {"num_blocks": 4}


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_a_start_that_fails_leaves_the_last_recording_and_one_that_does_not_replaces_it(tmp_path, name):
    path = tmp_path / name
    for count in (50, 0, 2):
        tape = Tape(path, 1 << 20)
        for number in range(count):
            tape.tell(Took(float(number), 0.0, None, ()))
        tape.close()
        raw = path.read_bytes()
        lines = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode().splitlines()
        assert len(lines) == (count or 50)
        assert json.loads(lines[0])["step"] == 0.0


def test_a_file_that_another_server_writes_is_left_alone(tmp_path):
    tape = Tape(tmp_path / "trace.jsonl", 1 << 20)
    with pytest.raises(BlockingIOError):
        Tape(tmp_path / "trace.jsonl", 1 << 20)
    tape.tell(BEGUN)
    tape.close()
    assert json.loads((tmp_path / "trace.jsonl").read_text())["settings"] == {"num_blocks": 4}
    Tape(tmp_path / "trace.jsonl", 1 << 20).close()  # it is free again


def test_a_full_file_ends_the_recording_and_says_so(tmp_path, caplog):
    tape = Tape(tmp_path / "trace.jsonl", 400)
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
    tape = Tape(tmp_path / "trace.jsonl", 1 << 20)
    with caplog.at_level(logging.WARNING):
        tape.tell(Took(0.0, 0.0, None, (None,)))  # type: ignore[arg-type]
        tape.close()
    assert "recording to" in caplog.text
    assert "stopped" in caplog.text
    tape.tell(Cancelled("r", "x", 0.0))  # type: ignore[arg-type]
