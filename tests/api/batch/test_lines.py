import json
from typing import Any

import pytest

from headrace.api.batch.lines import (
    BadLine,
    BatchRequest,
    DuplicateId,
    answered,
    check_ids,
    parse_line,
    read_lines,
    refused,
    result_key,
    succeeded,
)

GOOD: dict[str, Any] = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}


def raw(**changes: Any) -> bytes:
    return json.dumps({**GOOD, **changes}).encode()


def test_a_good_line_is_a_request() -> None:
    assert parse_line(3, raw()) == BatchRequest(3, "a", "/v1/completions", {"prompt": "x"})


@pytest.mark.parametrize(
    ("line", "custom_id", "message"),
    [
        (b"{", None, "line 7 is not valid JSON"),
        (b"\xff\xfe\x00", None, "line 7 is not valid JSON"),
        (b"[" * 100_000, None, "line 7 is not valid JSON"),
        (b"[]", None, "must be a JSON object"),
        (raw(custom_id=None), None, "custom_id must be a string"),
        (raw(custom_id=""), None, "1 to 512 characters"),
        (raw(custom_id="x" * 513), None, "1 to 512 characters"),
        (raw(method="GET"), "a", "method must be"),
        (raw(url="http://elsewhere/v1/x"), "a", "url must be a path"),
        (raw(body=[]), "a", "body must be a JSON object"),
        (raw(body={"stream": True}), "a", "body.stream must not be set"),
        (raw(extra=1), "a", "unknown field 'extra'"),
    ],
)
def test_a_bad_line_says_what_is_wrong(line: bytes, custom_id: str | None, message: str) -> None:
    parsed = parse_line(7, line)
    assert isinstance(parsed, BadLine)
    assert parsed.custom_id == custom_id
    assert message in parsed.message


def test_blank_lines_are_passed_over_and_counted() -> None:
    assert [line.number for line in read_lines([raw(), b"\n", b"  \n", raw(custom_id="b")])] == [1, 4]


def test_a_custom_id_may_come_only_once() -> None:
    assert check_ids(read_lines([raw(), b"{", b"{", raw(custom_id="b")])) == {
        "a",
        "b",
        "batch_req_2",
        "batch_req_3",
    }
    with pytest.raises(DuplicateId, match="'a' is in line 1 and in line 3"):
        check_ids(read_lines([raw(), b"{", raw(method="GET")]))


def test_results_belong_to_their_lines() -> None:
    request = BatchRequest(1, "a", "/v1/completions", {})
    assert result_key(answered(request, 200, "r", {})) == request.key
    for bad in (BadLine(2, "b", "why"), BadLine(3, None, "why")):
        assert result_key(refused(bad)) == bad.key


def test_only_answers_succeed() -> None:
    request = BatchRequest(1, "a", "/v1/completions", {})
    assert succeeded(answered(request, 200, "r", {}))
    assert not succeeded(answered(request, 400, "r", {}))
    assert not succeeded(refused(BadLine(1, "a", "why")))
