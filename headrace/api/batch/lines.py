"""The lines of a batch, in OpenAI's JSONL format: requests, results, and the endpoints that a batch may use.

```
in   {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": […], …}}
out  {"id": "batch_req_1", "custom_id": "a", "response": {"status_code": 200, "request_id": …, "body": {…}},
      "error": null}
```
An input file is checked by `Validation` before any of its lines runs. Lines run in the order of `in_job_order`: results
name their line, so any order is allowed. `batch.work` runs them and stores the output.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO, NamedTuple

from headrace.core.constraint import WrittenFloat
from headrace.core.prediction.output_lengths import prior_tokens
from headrace.core.queueing.order import order_job

MAX_CUSTOM_ID_CHARACTERS = 512

ENDPOINTS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
    *("/v1/embeddings", "/v1/rerank", "/v1/score"),
)
"""The endpoints that batches may use, on a server that has a model for them."""

EXPIRED = "batch_expired"
CANCELLED = "batch_cancelled"
UNEXECUTED = {
    EXPIRED: "This request could not be executed before the completion window expired.",
    CANCELLED: "This request was not executed because the batch was cancelled.",
}
"""Errors of lines that never ran, by their code; they count neither as completed nor as failed."""


class BatchRequest(NamedTuple):
    """A valid line: a request's path and body. ``number`` counts from 1."""

    number: int
    custom_id: str
    url: str
    body: dict[str, Any]

    @property
    def key(self) -> str:
        """The key that distinguishes this line's result from all others."""
        return self.custom_id


class BadLine(NamedTuple):
    """An invalid line; ``custom_id`` is None if it is missing or invalid.

    ``code`` is the kind of the error, ``param`` its field.
    """

    number: int
    custom_id: str | None
    message: str
    code: str = "invalid_line"
    param: str | None = None

    @property
    def key(self) -> str:
        """The key that distinguishes this line's result from all others."""
        return self.custom_id if self.custom_id is not None else line_id(self.number)


Line = BatchRequest | BadLine


class DuplicateId(ValueError):
    """Two lines of one batch have the same ``custom_id``, so their results could not be distinguished."""


def line_id(number: int) -> str:
    """The ``id`` of the result of line ``number``."""
    return f"batch_req_{number}"


def read_lines(raw_lines: Iterable[bytes]) -> Iterator[Line]:
    """Parse a batch line by line; blank lines are skipped."""
    for number, raw in enumerate(raw_lines, start=1):
        if raw.strip():
            yield parse_line(number, raw)


def check_ids(lines: Iterable[Line]) -> set[str]:
    """The keys of all lines.

    Raises:
        DuplicateId: a ``custom_id`` occurs twice.
    """
    seen: dict[str, int] = {}
    for line in lines:
        if line.key in seen:
            raise DuplicateId(
                f"custom_id {line.key!r:.200} is in line {seen[line.key]} and in line {line.number}"
            )
        seen[line.key] = line.number
    return set(seen)


def parse_line(number: int, raw: bytes) -> Line:
    """The request of a line, or its error."""
    try:
        value = json.loads(raw, parse_float=WrittenFloat)
    except (ValueError, RecursionError) as error:
        return BadLine(number, None, f"line {number} is not valid JSON: {error}", "invalid_json_line")
    if not isinstance(value, dict):
        return BadLine(number, None, f"line {number} must be a JSON object", "invalid_json_line")
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID_CHARACTERS:
        wanted = f"a string of 1 to {MAX_CUSTOM_ID_CHARACTERS} characters"
        message = f"line {number}: custom_id must be {wanted}"
        return BadLine(number, None, message, "invalid_custom_id", "custom_id")
    url, body = value.get("url"), value.get("body")
    if unknown := value.keys() - {"custom_id", "method", "url", "body"}:
        wrong, code, param = f"unknown field {min(unknown)!r:.200}", "unknown_parameter", str(min(unknown))
    elif value.get("method") != "POST":
        wrong, code, param = 'method must be "POST"', "invalid_method", "method"
    elif not isinstance(url, str) or not url.startswith("/v1/"):
        wrong, code, param = "url must be a path that begins with /v1/", "invalid_url", "url"
    elif not isinstance(body, dict):
        wrong, code, param = "body must be a JSON object", "invalid_body", "body"
    elif body.get("stream"):
        wrong, code, param = "body.stream must not be set in a batch", "invalid_body", "body.stream"
    else:
        return BatchRequest(number, custom_id, url, body)
    return BadLine(number, custom_id, f"line {number}: {wrong}", code, param)


def answered(request: BatchRequest, status_code: int, request_id: str, body: Any) -> dict[str, Any]:
    """The result of a request that the server answered, with or without success."""
    response = {"status_code": status_code, "request_id": request_id, "body": body}
    return {
        "id": line_id(request.number),
        "custom_id": request.custom_id,
        "response": response,
        "error": None,
    }


def _not_run(line: Line, code: str, message: str) -> dict[str, Any]:
    """The result of a line that was not run."""
    error = {"code": code, "message": message}
    return {"id": line_id(line.number), "custom_id": line.custom_id, "response": None, "error": error}


def refused(line: BadLine) -> dict[str, Any]:
    """The result of an invalid line."""
    return _not_run(line, "invalid_line", line.message)


def over_quota(request: BatchRequest) -> dict[str, Any]:
    """The result of a line that does not run because the tenant's files have reached their limit."""
    message = (
        "This request was not executed: the tenant's limit of stored bytes is reached; delete some files."
    )
    return _not_run(request, "storage_quota_exceeded", message)


def result_key(result: dict[str, Any]) -> str:
    """The key of the line that a result belongs to."""
    custom_id = result.get("custom_id")
    return custom_id if isinstance(custom_id, str) else str(result.get("id"))


def unexecuted(request: BatchRequest, code: str) -> dict[str, Any]:
    """The result of a line that never ran; ``code`` is one of `UNEXECUTED`."""
    return _not_run(request, code, UNEXECUTED[code])


def was_executed(result: dict[str, Any]) -> bool:
    """Whether the line of a result ran."""
    error = result.get("error")
    return not (isinstance(error, dict) and error.get("code") in UNEXECUTED)


class Used(NamedTuple):
    """The tokens that a line used."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


def used(result: dict[str, Any]) -> Used:
    """The tokens of a result, from the usage of any of the endpoints."""
    body = (result.get("response") or {}).get("body")
    usage = body.get("usage") if isinstance(body, dict) else None
    if not isinstance(usage, dict):
        return Used()

    def count(*names: str) -> int:
        return sum(int(usage.get(name) or 0) for name in names)

    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    outside = (
        "cache_read_input_tokens",
        "cache_creation_input_tokens",
    )  # Anthropic's input_tokens has only the rest
    return Used(
        count("prompt_tokens", "input_tokens", *outside),
        int(cached or 0) + count(outside[0]),
        count("completion_tokens", "output_tokens"),
    )


def succeeded(result: dict[str, Any]) -> bool:
    """Whether a result is a response with status 200."""
    response = result.get("response")
    return isinstance(response, dict) and response.get("status_code") == 200


WINDOW_BYTES = 64 << 20
"""Bytes of prompts that are ordered together: a batch larger than memory is processed as several jobs."""

GRAIN_BYTES = 64
"""Approximate text of one block of tokens: shorter common prefixes save nothing."""


def in_job_order(lines: Iterable[Line], window_bytes: int = WINDOW_BYTES) -> Iterator[Line]:
    """The same lines, with common prefixes together; ``window_bytes`` bytes of prompts are read ahead.

    `core.queueing.order` explains the order. Prompts are compared as text, before template and tokenizer: a common
    prefix of two texts is also a common prefix of their tokens.
    """
    window: list[Line] = []
    prompts: list[bytes] = []
    read = 0
    for line in lines:
        window.append(line)
        prompts.append(_prompt(line))
        read += len(prompts[-1])
        if read >= window_bytes:
            yield from _ordered(window, prompts)
            window, prompts, read = [], [], 0
    yield from _ordered(window, prompts)


def _ordered(window: list[Line], prompts: list[bytes]) -> Iterator[Line]:
    outputs = [_expected_tokens(line) for line in window]
    return (window[index] for index in order_job(prompts, outputs, GRAIN_BYTES))


def _prompt(line: Line) -> bytes:
    """The text that determines a line's tokens, in the order of a chat template."""
    if isinstance(line, BadLine):
        return b""
    body = line.body
    asked = body.get("messages", body.get("prompt", body.get("input")))
    try:
        text = json.dumps([line.url, body.get("tools"), asked], ensure_ascii=False)
    except RecursionError:
        return b""
    return text.encode(errors="surrogatepass")


def _expected_tokens(line: Line) -> float:
    if isinstance(line, BadLine):
        return 0.0
    named = (line.body.get(name) for name in ("max_completion_tokens", "max_output_tokens", "max_tokens"))
    asked = next((value for value in named if value is not None), None)
    limit = asked if isinstance(asked, int) and asked > 0 else float("inf")
    return prior_tokens(limit)


MAX_ERRORS = 100
"""Maximum errors of one batch that are reported."""

SLICE_LINES = 256

KEY_BYTES = 16
"""Bytes of a digest that represents a custom_id, so that memory does not depend on its length."""


class Validation:
    """The check of one open file, which reports every error with its line; call `advance` until it returns False.

    Attributes:
        lines: requests so far.
        errors: as in the field ``errors.data`` of a batch.
    """

    def __init__(self, file: BinaryIO, endpoint: str, *, max_lines: int, max_line_bytes: int) -> None:
        self.lines = 0
        self.errors: list[dict[str, Any]] = []
        self._file = file
        self._endpoint = endpoint
        self._max_lines = max_lines
        self._max_line_bytes = max_line_bytes
        self._number = 0
        self._seen: set[bytes] = set()

    def advance(self) -> bool:
        """Check the next lines; return whether more follow. It blocks on the disk."""
        for _ in range(SLICE_LINES):
            raw = self._file.readline(self._max_line_bytes + 1)
            if not raw:
                if not self.lines and not self.errors:
                    self._report("empty_file", "The input file has no lines.", None, None)
                return False
            self._number += 1
            if len(raw) > self._max_line_bytes:
                message = f"line {self._number} is longer than {self._max_line_bytes} bytes"
                self._report("line_too_long", message, self._number, None)
                return False
            if raw.strip():
                self._check(raw)
            if len(self.errors) >= MAX_ERRORS:
                return False
            if self.lines > self._max_lines:
                message = f"The input file has more than {self._max_lines} requests."
                self._report("too_many_requests", message, None, None)
                return False
        return True

    def _check(self, raw: bytes) -> None:
        line = parse_line(self._number, raw)
        self.lines += 1
        if isinstance(line, BadLine):
            self._report(line.code, line.message, line.number, line.param)
        elif line.url != self._endpoint:
            message = f"line {line.number}: url must be the batch's endpoint {self._endpoint}"
            self._report("mismatched_url", message, line.number, "url")
        if line.custom_id is not None:
            key = hashlib.sha256(line.custom_id.encode("utf-8", "surrogatepass")).digest()[:KEY_BYTES]
            if key in self._seen:
                message = f"line {line.number}: an earlier line has the same custom_id"
                self._report("duplicate_custom_id", message, line.number, "custom_id")
            self._seen.add(key)

    def _report(self, code: str, message: str, line: int | None, param: str | None) -> None:
        self.errors.append({"code": code, "message": message, "param": param, "line": line})
