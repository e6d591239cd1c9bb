"""The writer: nothing is lost, nothing blocks, and libraries stay quiet."""

from __future__ import annotations

import io
import json
import logging
import threading
from collections.abc import Iterator

import pytest

from headrace.observe.log import writer as writer_file
from headrace.observe.log.writer import LogWriter, install, set_level


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flush gives up at last, on a slow machine before everything is written."""
    monkeypatch.setattr(writer_file, "CLOSE_SECONDS", 60.0)


@pytest.fixture
def restored() -> Iterator[None]:
    """The loggers as they were before the test."""
    root, ours = logging.getLogger(), logging.getLogger("headrace")
    handlers, levels = root.handlers[:], (root.level, ours.level)
    yield
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


def test_records_are_written_in_order_and_flush_waits_for_them(restored: None) -> None:
    out = io.StringIO()
    writer = install(out, "info", "json")
    for number in range(1000):
        logging.getLogger("headrace.test").info("line %d", number)
    writer.flush()
    assert [json.loads(line)["message"] for line in out.getvalue().splitlines()] == [
        f"line {number}" for number in range(1000)
    ]
    writer.close()


def test_levels_hold_for_our_records_and_libraries_log_warnings_only(restored: None) -> None:
    out = io.StringIO()
    writer = install(out, "debug", "text")
    logging.getLogger("headrace.test").debug("ours")
    logging.getLogger("httpcore.http11").debug("authorization: Bearer secret")
    logging.getLogger("uvicorn.error").warning("theirs")
    set_level("error")
    logging.getLogger("headrace.test").warning("below")
    writer.flush()
    assert [line.split()[-1] for line in out.getvalue().splitlines()] == ["ours", "theirs"]
    writer.close()


def test_a_server_that_ran_before_does_not_silence_the_log(restored: None) -> None:
    parent, child = logging.getLogger("uvicorn"), logging.getLogger("uvicorn.error")
    parent.propagate = False
    child.setLevel(logging.CRITICAL)
    out = io.StringIO()
    writer = install(out, "info", "text")
    child.warning("theirs")
    writer.flush()
    assert out.getvalue().split()[-1] == "theirs"
    writer.close()


def test_other_handlers_are_replaced(restored: None) -> None:
    old = logging.StreamHandler(io.StringIO())
    logging.getLogger().addHandler(old)
    writer = install(io.StringIO(), "info", "text")
    assert logging.getLogger().handlers == [writer]
    writer.close()


def made(message: str, *args: object, name: str = "x", level: int = logging.INFO) -> logging.LogRecord:
    return logging.LogRecord(name, level, "", 0, message, args, None)


class Blocked(io.StringIO):
    """An output that is blocked until a test opens it."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.open = threading.Event(), threading.Event()

    def write(self, text: str) -> int:
        self.reached.set()
        assert self.open.wait(60)
        return super().write(text)


def test_a_blocked_output_blocks_no_log_call_and_what_is_dropped_is_counted(monkeypatch) -> None:
    monkeypatch.setattr(writer_file, "MOST_QUEUED", 10)
    out = Blocked()
    writer = LogWriter(out)
    writer.handle(made("first", level=logging.WARNING))
    assert out.reached.wait(60)
    for _ in range(25):
        writer.handle(made("more"))
    out.open.set()
    writer.flush()
    lines = out.getvalue().splitlines()
    assert sum(line.endswith("more") for line in lines) == 10
    assert sum("15 log lines were dropped" in line for line in lines) == 1
    writer.close()


def test_a_record_that_cannot_be_formatted_is_reported_and_the_next_one_written() -> None:
    out = io.StringIO()
    writer = LogWriter(out)
    writer.handle(made("%d", "x", name="bad"))
    writer.handle(made("fine"))
    writer.flush()
    first, second = out.getvalue().splitlines()
    assert "log record of bad cannot be formatted" in first
    assert second.endswith("fine")
    writer.close()


def test_a_closed_output_ends_nothing() -> None:
    out = io.StringIO()
    writer = LogWriter(out)
    out.close()
    writer.handle(made("lost"))
    writer.flush()
    assert writer._thread.is_alive()
    writer.close()
