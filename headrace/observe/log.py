"""Log records as lines, aligned text or JSON; the thread that writes them; warnings from events.

A record has its structured fields in ``extra={"fields": {...}}``; fields with the value None are omitted. The message
of an exception may quote a prompt, so it is withheld for code that processes requests.
"""

from __future__ import annotations

import json
import logging
import queue
import re
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, Literal, TextIO

from headrace.core.events import (
    Audited,
    DraftingFailed,
    EngineLost,
    Event,
    Preempted,
    PreemptReason,
    TransferFailed,
    TurnedAway,
)
from headrace.observe.reasons import reason_text

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


def json_line(record: logging.LogRecord, name: str = "") -> str:
    """A record as one JSON object: time, level, component, message, its fields, and the exception if there is one.

    ``name`` is that of the server, if it has one.
    """
    line: dict[str, Any] = {
        "time": timestamp(record),
        "level": record.levelname.lower(),
        **({"server": name} if name else {}),
        "component": component(record.name),
        "message": _message(record),
    }
    line |= {name: value for name, value in _fields(record).items() if value is not None}
    error = exception_text(record)
    if error:
        line["exception"] = error
    return json.dumps(line, separators=(",", ":"), default=str)


def text_line(record: logging.LogRecord, name: str = "") -> str:
    """A record as one line of text with the ``name`` of the server, the lines of an exception indented below it."""
    fields = _fields(record)
    if record.name == ACCESS:
        status, method, path = (_shown(fields[name]) for name in LEADING)
        message = f"{status} {method:<4} {path:<{_PATH_WIDTH}}"
        pairs = [f" {k}={_shown(v)}" for k, v in fields.items() if v is not None and k not in LEADING]
    else:
        message = _BREAKS.sub(lambda mark: repr(mark[0])[1:-1], _message(record))
        pairs = [f" {name}={_shown(value)}" for name, value in fields.items() if value is not None]
    where, server = component(record.name), f"[{name}] " if name else ""
    line = f"{timestamp(record)} {record.levelname:<7} {server}{where:<{_COMPONENT_WIDTH}} {message}{''.join(pairs)}"
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


# Writes log lines on a thread of its own, so that logging never blocks the event loop or the engine.

BATCH_SECONDS = 0.1
"""Time for which the thread collects records before it writes them; waking it for each one costs the engine time."""

MOST_QUEUED = 100_000
"""Maximum number of queued records. Further ones are dropped and counted, so a blocked output cannot fill memory."""

CLOSE_SECONDS = 5.0
"""How long `close` waits for the output."""

Level = Literal["debug", "info", "warning", "error"]


class LogWriter(logging.Handler):
    """A log handler that writes lines of ``line`` to ``stream``."""

    def __init__(self, stream: TextIO, line: Callable[[logging.LogRecord], str] = text_line) -> None:
        super().__init__()
        self._stream = stream
        self._line = line
        self._queue: queue.SimpleQueue[logging.LogRecord | threading.Event] = queue.SimpleQueue()
        self._urgent = threading.Event()
        self._dropped = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="headrace-log", daemon=True)
        self._thread.start()

    def handle(self, record: logging.LogRecord) -> bool:
        """Queue a record. Unlike the base class it takes no lock: the queue is thread-safe."""
        passed = bool(self.filter(record))
        if passed:
            self.emit(record)
        return passed

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record, or drop it if too many wait."""
        if self._queue.qsize() >= MOST_QUEUED:
            self._dropped += 1
            return
        self._queue.put(record)
        if record.levelno >= logging.WARNING:
            self._urgent.set()

    def flush(self) -> None:
        """Wait until all records queued so far are written, at most `CLOSE_SECONDS`."""
        if self._thread.is_alive():
            written = threading.Event()
            self._queue.put(written)
            self._urgent.set()
            written.wait(CLOSE_SECONDS)

    def close(self) -> None:
        """Write what is queued and remove the handler from logging's list; later records are still written."""
        if not self._closed:
            self._closed = True
            self.flush()
        super().close()

    def _run(self) -> None:
        while True:
            batch = [self._queue.get()]
            self._urgent.wait(BATCH_SECONDS)
            self._urgent.clear()
            while not self._queue.empty():
                batch.append(self._queue.get())
            self._write(batch)

    def _write(self, batch: list[logging.LogRecord | threading.Event]) -> None:
        lines = [self._safe_line(each) for each in batch if isinstance(each, logging.LogRecord)]
        if self._dropped:
            dropped, self._dropped = self._dropped, 0
            lines.append(self._safe_line(_dropped_record(dropped)))
        try:
            if lines:
                self._stream.write("\n".join(lines) + "\n")
                self._stream.flush()
        except (OSError, ValueError):  # the output is closed or full: there is no other place to report it
            pass
        for each in batch:
            if isinstance(each, threading.Event):
                each.set()

    def _safe_line(self, record: logging.LogRecord) -> str:
        try:
            return self._line(record)
        except Exception as error:  # a record with wrong arguments must not end the thread
            text = f"a log record of {record.name} cannot be formatted: {type(error).__name__}"
            return self._line(_record(logging.ERROR, text))


def install(stream: TextIO, level: Level, style: Literal["text", "json"], name: str = "") -> LogWriter:
    """Install a writer as the only log handler of the process; its lines show the ``name`` of the server.

    Our own records are logged from ``level`` up. Libraries log warnings and errors only, because their debug lines may
    contain headers and keys.
    """
    writer = LogWriter(stream, partial(json_line if style == "json" else text_line, name=name))
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(writer)
    root.setLevel(logging.WARNING)
    for name in (
        "uvicorn",
        "uvicorn.error",
    ):  # a server that ran in this process before may have silenced them
        library = logging.getLogger(name)
        library.handlers.clear()
        library.setLevel(logging.NOTSET)
        library.propagate = True
    logging.captureWarnings(True)
    set_level(level)
    return writer


def set_level(level: Level) -> None:
    """Change the lowest level of our own records, at any time."""
    logging.getLogger("headrace").setLevel(level.upper())


def _record(level: int, message: str) -> logging.LogRecord:
    return logging.LogRecord("headrace.log", level, "", 0, message, (), None)


def _dropped_record(count: int) -> logging.LogRecord:
    return _record(logging.WARNING, f"{count} log lines were dropped because the output was blocked")


# Warnings made from events: overload, preemption storms, failed audits, drafts and copies to disk.

REPORT_SECONDS = 10.0
"""Shortest time between two lines of the same kind."""

STORM_SECONDS = 10.0
STORM_PREEMPTIONS = 20
"""This many preemptions within `STORM_SECONDS` are a preemption storm."""

STORM_REPORT_SECONDS = 60.0
"""Shortest time between two warnings of a preemption storm."""

_admission = logging.getLogger("headrace.admission")
_scheduler = logging.getLogger("headrace.scheduler")
_cache = logging.getLogger("headrace.cache")


class _Report:
    """Events of one kind that have not been logged yet."""

    __slots__ = ("count", "due", "logger", "message")

    def __init__(self, logger: logging.Logger, message: str) -> None:
        self.logger = logger
        self.message = message
        self.count = 0
        self.due = float("-inf")


class WarningLog:
    """A `core.ports.Watcher` that logs warnings."""

    fold_tokens = None

    def __init__(self) -> None:
        self._reports: dict[str, _Report] = {}
        self._unlogged = 0
        self._preempted: deque[tuple[float, int]] = deque()
        self._storm_due = float("-inf")

    def fold(self, event: Event, now: float) -> None:
        if isinstance(event, TurnedAway):
            what = f"request rejected: {reason_text(event.reason)}"
            self._add(f"rejected {event.reason}", _admission, what, now)
        elif isinstance(event, Preempted):
            if event.reason is not PreemptReason.LOST:
                self._count_preemption(event.lost_tokens, now)
        elif isinstance(event, EngineLost):
            _scheduler.error(
                "the memory of the engine was lost (%s): %d running requests are computed again, %d failed",
                *(event.message, event.recomputed, event.failed),
            )
        elif isinstance(event, DraftingFailed):
            what = f"speculative decoding failed and is switched off: {event.message}"
            self._add("drafting", _scheduler, what, now)
        elif isinstance(event, Audited):
            if not event.right:
                what = f"audit failed: the {event.layer} cache served an answer that differs from the computed one"
                self._add(f"audit {event.layer}", _cache, what, now)
        elif isinstance(event, TransferFailed):
            what = f"copy of KV blocks from {event.source} to {event.target} failed"
            self._add(f"transfer {event.source} {event.target}", _scheduler, what, now)
        if self._unlogged:
            self._log_due(now)

    def _add(self, kind: str, logger: logging.Logger, message: str, now: float) -> None:
        report = self._reports.get(kind)
        if report is None:
            report = self._reports[kind] = _Report(logger, message)
        report.count += 1
        self._unlogged += 1

    def _log_due(self, now: float) -> None:
        for report in self._reports.values():
            if report.count and now >= report.due:
                report.logger.warning(report.message, extra={"fields": {"count": report.count}})
                self._unlogged -= report.count
                report.count = 0
                report.due = now + REPORT_SECONDS

    def _count_preemption(self, lost_tokens: int, now: float) -> None:
        recent = self._preempted
        recent.append((now, lost_tokens))
        while recent[0][0] < now - STORM_SECONDS:
            recent.popleft()
        if len(recent) >= STORM_PREEMPTIONS and now >= self._storm_due:
            self._storm_due = now + STORM_REPORT_SECONDS
            fields = {"count": len(recent), "lost_tokens": sum(lost for _, lost in recent)}
            _scheduler.warning(
                "preemption storm: the KV cache is too small for the running requests; "
                "lower --max-num-seqs or give the cache more memory",
                extra={"fields": fields | {"seconds": STORM_SECONDS}},
            )
