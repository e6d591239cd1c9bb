"""Which files of requests are read, and what is wrong with a line."""

from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path

import pytest

from headrace.api.batch.estimate import LoggedRequest, NoTexts, read_log
from headrace.api.batch.lines import BadLine
from headrace.observe.trace_file import MAGIC
from headrace.response_cache.history import History, Recorded

BODY = {"messages": [{"role": "user", "content": "Hi"}]}
CHAT = "/v1/chat/completions"


def read(path: Path, *lines: object, most: int = 10_000) -> list[LoggedRequest | BadLine]:
    path.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in lines))
    return list(read_log(path, most, MAGIC))


def one(path: Path, line: object) -> LoggedRequest:
    (found,) = read(path, line)
    assert isinstance(found, LoggedRequest), found
    return found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "log.jsonl"


def test_bodies_and_batch_lines(path: Path) -> None:
    assert one(path, BODY) == LoggedRequest(1, CHAT, BODY)
    assert one(path, {"prompt": "Hi"}).url == "/v1/completions"
    batch = {"custom_id": "a", "method": "POST", "url": CHAT, "body": BODY}
    assert one(path, batch) == LoggedRequest(1, CHAT, BODY)


def test_what_a_log_adds(path: Path) -> None:
    usage = {"usage": {"prompt_tokens": 3, "completion_tokens": 7}}
    line = {
        "body": BODY,
        "tenant": "t",
        "timestamp": "2026-01-01T00:00:01Z",
        "seconds": 2,
        "response": {"status_code": 200, "body": usage},
    }
    found = one(path, line)
    assert (found.tenant, found.seconds, found.output_tokens) == ("t", 2.0, 7)
    assert found.timestamp == one(path, {"body": BODY, "timestamp": 1767225601.0}).timestamp
    assert one(path, line | {"output_tokens": 9}).output_tokens == 9


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "not valid JSON"),
        ("[]", "expected a JSON object"),
        ({}, "none of body, messages, prompt"),
        ({"body": []}, "body must be a JSON object"),
        ({"body": BODY, "time": 1}, "unknown field 'time' beside body"),
        ({"body": BODY, "url": 1}, "url must be text"),
        ({"body": BODY, "tenant": ""}, "tenant must be text"),
        ({"body": BODY, "timestamp": 1767225601000}, "Unix time in seconds"),
        ({"body": BODY, "timestamp": "yesterday"}, "not a time of ISO 8601"),
        ({"body": BODY, "timestamp": True}, "Unix time in seconds"),
        ({"body": BODY, "seconds": -1}, "seconds must be"),
        ({"body": BODY, "output_tokens": 1.5}, "output_tokens must be"),
        ({"body": BODY, "response": []}, "response must be"),
        ({"body": BODY, "response": {"body": {"usage": {"completion_tokens": "many"}}}}, "counts of tokens"),
        ("x" * 200, "longer than 150 bytes"),
    ],
)
def test_a_bad_line_is_reported_and_the_next_is_read(path: Path, line: object, why: str) -> None:
    bad, good = read(path, line, {"prompt": "Hi"}, most=150)
    assert isinstance(bad, BadLine)
    assert bad.message.startswith("line 1: ")
    assert why in bad.message
    assert isinstance(good, LoggedRequest)
    assert good.number == 2


def test_blank_lines_count_and_compressed_files_are_read(path: Path) -> None:
    path.write_bytes(gzip.compress(b"\n" + json.dumps(BODY).encode() + b"\n"))
    assert list(read_log(path, 1000, MAGIC)) == [LoggedRequest(2, CHAT, BODY)]


def test_a_scheduler_trace_has_no_texts(path: Path) -> None:
    with pytest.raises(NoTexts, match="no texts and no sampling parameters"):
        read(path, {MAGIC: 1})


def test_a_history_gives_each_request_with_its_count(tmp_path: Path) -> None:
    async def record(bodies: bool) -> Path:
        file = tmp_path / f"history-{bodies}.db"
        history = History(file)
        recorded = Recorded(CHAT, "key-1", "t", json.dumps(BODY).encode()) if bodies else None
        for second in range(3):
            history.asked(b"k", "t", 1e9 + second, recorded)
        history.computed(b"k", 0.5, 11, 0.0)
        await history.stop()
        return file

    (found,) = read_log(asyncio.run(record(True)), 1000, MAGIC)
    assert found == LoggedRequest(1, CHAT, BODY, "key-1", "t", output_tokens=11, times=3)
    with pytest.raises(NoTexts, match="--record-history"):
        list(read_log(asyncio.run(record(False)), 1000, MAGIC))
