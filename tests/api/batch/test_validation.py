import io
import json
from typing import Any

import pytest

from headrace.api.batch.validation import MAX_ERRORS, Validation

GOOD: dict[str, Any] = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}


def line(**changes: Any) -> bytes:
    return json.dumps(GOOD | changes).encode() + b"\n"


def check(raw: bytes, max_lines: int = 1000) -> Validation:
    validation = Validation(io.BytesIO(raw), "/v1/completions", max_lines=max_lines, max_line_bytes=10_000)
    while validation.advance():
        pass
    return validation


def test_good_lines_are_counted() -> None:
    validation = check(b"\n".join(line(custom_id=str(number)) for number in range(600)), 600)
    assert (validation.lines, validation.errors) == (600, [])


@pytest.mark.parametrize(
    ("raw", "code", "param", "number"),
    [
        (b"", "empty_file", None, None),
        (b"\n \n", "empty_file", None, None),
        (line() + b"{\n", "invalid_json_line", None, 2),
        (line(custom_id=7), "invalid_custom_id", "custom_id", 1),
        (line(method="GET"), "invalid_method", "method", 1),
        (line(url="/v1/chat/completions"), "mismatched_url", "url", 1),
        (line(url="/metrics"), "invalid_url", "url", 1),
        (line(body=None), "invalid_body", "body", 1),
        (line(body={"stream": True}), "invalid_body", "body.stream", 1),
        (line(extra=1), "unknown_parameter", "extra", 1),
        (line() + b"\n" + line(), "duplicate_custom_id", "custom_id", 3),
        (line(body={"prompt": "x" * 10_000}), "line_too_long", None, 1),
    ],
)
def test_each_mistake_has_a_code_and_its_line(
    raw: bytes, code: str, param: str | None, number: int | None
) -> None:
    (error,) = check(raw).errors
    assert (error["code"], error["param"], error["line"]) == (code, param, number)


def test_a_file_with_too_many_lines_is_read_no_further() -> None:
    validation = check(b"".join(line(custom_id=str(number)) for number in range(50_000)), 10)
    assert validation.errors[0]["code"] == "too_many_requests"
    assert validation.lines < 1000


def test_errors_are_bounded() -> None:
    assert len(check(b"{\n" * 5000).errors) == MAX_ERRORS
