from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.lab.workload.dataset import BadLine, jsonl
from headrace.lab.workload.work import Message


def written(folder: Path, text: str) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_line_ends_at_a_newline_alone(tmp_path: Path) -> None:
    texts = ["one\u2028two", "three\x85four"]
    lines = [json.dumps({"question": text}, ensure_ascii=False) for text in texts]
    path = written(tmp_path, "\ufeff" + "\r\n".join(lines) + "\r\n")
    drawn = {work.prompt for work in jsonl(path, 2, 8)}
    assert drawn == {(Message("user", text),) for text in texts}


def test_what_is_null_is_not_said(tmp_path: Path) -> None:
    path = written(tmp_path, '{"text": "a", "max_tokens": null, "tenant": null, "service_tier": null}')
    (work,) = jsonl(path, 1, 8)
    assert (work.max_tokens, work.tenant, work.service_class) == (8, "default", "default")


@pytest.mark.parametrize(
    "line",
    [
        '{"messages": [{"role": "user"}]}',
        '{"messages": "hello"}',
        '{"messages": ["hello"]}',
        '{"prompt": ["hello"]}',
        '{"text": "a", "max_tokens": "many"}',
        '{"text": "a", "max_tokens": 1e400}',
        '{"text": "a", "max_tokens": [1]}',
        '{"text": "a", "max_tokens": 0}',
        '{"question": 5}',
        '{"turns": [5]}',
        "[]",
        "{",
        "{}",
        "[" * 100_000,
    ],
)
def test_a_line_that_cannot_be_read_is_named(tmp_path: Path, line: str) -> None:
    path = written(tmp_path, line)
    with pytest.raises(BadLine, match=r"prompts\.jsonl:1: "):
        jsonl(path, 1, 8)


def test_a_file_in_another_encoding_is_named(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"text": "\xe9"}')
    with pytest.raises(BadLine, match="not UTF-8"):
        jsonl(path, 1, 8)
