"""Writes log lines on a thread of its own, so that logging never blocks the event loop or the engine.

A log call only puts its record into a queue. The thread formats and writes records in batches: at once for a warning
or an error, otherwise within `BATCH_SECONDS`. Python calls `close` at exit, which writes what is still queued.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Literal, TextIO

from headrace.observe.log.format import json_line, text_line

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


def install(stream: TextIO, level: Level, style: Literal["text", "json"]) -> LogWriter:
    """Install a writer as the only log handler of the process.

    Our own records are logged from ``level`` up. Libraries log warnings and errors only, because their debug lines may
    contain headers and keys.
    """
    writer = LogWriter(stream, json_line if style == "json" else text_line)
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
