"""Checks an input file before any of its lines runs: every error is reported with its line."""

from __future__ import annotations

import hashlib
from typing import Any, BinaryIO

from headrace.api.batch.lines import BadLine, parse_line

MAX_ERRORS = 100
"""Maximum errors of one batch that are reported."""

SLICE_LINES = 256

KEY_BYTES = 16
"""Bytes of a digest that represents a custom_id, so that memory does not depend on its length."""


class Validation:
    """The check of one open file; call `advance` until it returns False.

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
