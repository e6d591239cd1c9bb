"""Log records as lines: aligned text for reading, or JSON for machines. Pure functions of a record.

A record has its structured fields in ``extra={"fields": {...}}``; fields with the value None are omitted. The message
of an exception may quote a prompt, so it is withheld for code that processes requests.
"""

from __future__ import annotations

import json
import logging
import re
import time
import traceback
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

FIELDS = "fields"
"""The attribute of a record that holds its structured fields."""

WITHHOLDING = ("headrace.api", "headrace.text", "headrace.response_cache", "uvicorn", "asyncio")
"""Loggers of code that handles prompts: only type and location of an exception are logged, not its message."""

ACCESS = "headrace.access"
"""The logger of the access log, whose text lines begin with `LEADING`."""

LEADING = ("status", "method", "path")
"""Fields of the access log that are shown without their names."""

WITHHELD = "(message withheld: it may quote a request)"

_PLAIN = re.compile(r"[^\s\"'=\\\x00-\x1f\x7f-\xa0\u2028\u2029]+")
_BREAKS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")
_COMPONENT_WIDTH = 10
_PATH_WIDTH = len("/v1/chat/completions")


@lru_cache(maxsize=256)
def component(name: str) -> str:
    """The short name of a logger: its last part, or for other libraries the package."""
    if not name.startswith("headrace"):
        return name.partition(".")[0]
    return name.rpartition(".")[2]


def timestamp(record: logging.LogRecord) -> str:
    """The time of a record in UTC, in ISO 8601 with milliseconds."""
    return f"{_second(int(record.created))}.{int(record.msecs):03d}Z"


@lru_cache(maxsize=2)
def _second(second: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))


def json_line(record: logging.LogRecord) -> str:
    """A record as one JSON object: time, level, component, message, its fields, and the exception if there is one."""
    line: dict[str, Any] = {
        "time": timestamp(record),
        "level": record.levelname.lower(),
        "component": component(record.name),
        "message": _message(record),
    }
    line |= {name: value for name, value in _fields(record).items() if value is not None}
    error = exception_text(record)
    if error:
        line["exception"] = error
    return json.dumps(line, separators=(",", ":"), default=str)


def text_line(record: logging.LogRecord) -> str:
    """A record as one line of text, with the lines of an exception indented below it."""
    fields = _fields(record)
    if record.name == ACCESS:
        status, method, path = (_shown(fields[name]) for name in LEADING)
        message = f"{status} {method:<4} {path:<{_PATH_WIDTH}}"
        pairs = [f" {k}={_shown(v)}" for k, v in fields.items() if v is not None and k not in LEADING]
    else:
        message = _BREAKS.sub(lambda mark: repr(mark[0])[1:-1], _message(record))
        pairs = [f" {name}={_shown(value)}" for name, value in fields.items() if value is not None]
    where = component(record.name)
    line = f"{timestamp(record)} {record.levelname:<7} {where:<{_COMPONENT_WIDTH}} {message}{''.join(pairs)}"
    error = exception_text(record)
    return line + "".join(f"\n    {each}" for each in error.splitlines()) if error else line


def _message(record: logging.LogRecord) -> str:
    """The message of a record. asyncio appends the lost exception to its message, so only the first line is kept."""
    message = record.getMessage()
    return message.partition("\n")[0] if record.name == "asyncio" else message


def exception_text(record: logging.LogRecord) -> str:
    """The traceback of a record; without the messages of its exceptions where they may quote a request."""
    error = record.exc_info[1] if record.exc_info else None
    if error is None:
        return ""
    if not record.name.startswith(WITHHOLDING):
        return "".join(traceback.format_exception(error)).rstrip()
    lines: list[str] = []
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        frames = "".join(traceback.format_tb(error.__traceback__))
        lines.append(f"{frames}{type(error).__name__} {WITHHELD}")
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "\nwhile handling:\n".join(lines)


def _fields(record: logging.LogRecord) -> Mapping[str, Any]:
    fields: Mapping[str, Any] = getattr(record, FIELDS, {})
    return fields


def _shown(value: object) -> str:
    kind = type(value)
    if kind is int or kind is bool:
        return str(value)
    if kind is float:
        return f"{value:.4g}"
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=True)
