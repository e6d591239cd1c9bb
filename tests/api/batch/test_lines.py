from __future__ import annotations

import io
import itertools
import json
from typing import Any

import pytest

from headrace.api.batch.lines import (
    MAX_ERRORS,
    BadLine,
    BatchRequest,
    DuplicateId,
    Validation,
    answered,
    check_ids,
    in_job_order,
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


DOCUMENTS = [letter * 200 for letter in "abc"]


def job_line(name: str, **body: Any) -> bytes:
    url = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body}).encode()


def order(lines: list[bytes], **given: Any) -> list[str]:
    return [line.key for line in in_job_order(read_lines(lines), **given)]


def test_questions_about_one_document_follow_each_other():
    lines = [
        job_line(f"{i % 3}-{i}", prompt=DOCUMENTS[i % 3] + f" question {i}?", max_tokens=9) for i in range(12)
    ]
    documents = [name[0] for name in order(lines)]
    assert sorted(order(lines)) == sorted(f"{i % 3}-{i}" for i in range(12))
    assert sum(a != b for a, b in itertools.pairwise(documents)) == 2


def test_chats_are_ordered_by_their_tools_and_messages():
    lines = [
        job_line(
            f"{i % 2}-{i}",
            tools=[{"type": "function", "function": {"name": f"tool{i % 2}", "description": "x" * 100}}],
            messages=[{"role": "user", "content": f"{i}"}],
        )
        for i in range(6)
    ]
    assert [name[0] for name in order(lines)] in (["0"] * 3 + ["1"] * 3, ["1"] * 3 + ["0"] * 3)


def test_long_answers_to_short_prompts_go_first():
    lines = [
        job_line("short", prompt="x" * 300, max_tokens=2),
        job_line("long", prompt="y" * 300, max_tokens=2000),
        job_line("open", prompt="z" * 300),
    ]
    assert order(lines) == ["open", "long", "short"]


def test_bad_lines_and_half_characters_come_through():
    lines = [
        b"{",
        job_line("half", prompt="\ud800"),
        job_line("tokens", prompt=[1, 2, 3]),
        job_line("odd", max_tokens="many"),
    ]
    assert sorted(order(lines)) == ["batch_req_1", "half", "odd", "tokens"]


def test_a_batch_larger_than_the_window_is_read_as_it_is_needed():
    taken = 0

    def endless():
        nonlocal taken
        while True:
            taken += 1
            yield job_line(f"r{taken}", prompt=DOCUMENTS[taken % 3])

    ordered = in_job_order(read_lines(endless()), window_bytes=2000)
    first = [next(ordered).key for _ in range(9)]
    assert taken < 20
    assert sorted(first, key=lambda name: int(name[1:]))[0] == "r1"


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
