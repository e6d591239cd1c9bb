"""Log lines as text and as JSON."""

from __future__ import annotations

import io
import json
import logging
import sys
import threading
from collections.abc import Iterator

import pytest

from headrace.core.events import (
    Audited,
    DraftingFailed,
    EngineLost,
    Layer,
    LostPart,
    Preempted,
    PreemptReason,
    Stepped,
    TransferFailed,
    TurnedAway,
)
from headrace.core.plan import Tier
from headrace.core.request import RejectReason
from headrace.observe import log as writer_file
from headrace.observe.log import (
    STORM_PREEMPTIONS,
    STORM_REPORT_SECONDS,
    WITHHELD,
    LogWriter,
    WarningLog,
    component,
    install,
    json_line,
    set_level,
    text_line,
)


def record(message: str, *args: object, name: str = "headrace.startup", level: int = logging.INFO, **more):
    made = logging.LogRecord(name, level, "file.py", 1, message, args, more.pop("exc_info", None))
    made.created, made.msecs = 1_795_559_223.25, 250.0
    if more:
        made.fields = more
    return made


def raised(text: str):
    try:
        try:
            raise KeyError(text)
        except KeyError as error:
            raise ValueError(f"bad: {text}") from error
    except ValueError:
        return sys.exc_info()


def test_a_text_line_has_time_level_component_message_and_fields() -> None:
    line = text_line(record("draining", open_requests=3, timeout_seconds=30.0, saved=None))
    assert line == "2026-11-24T22:27:03.250Z INFO    startup    draining open_requests=3 timeout_seconds=30"


def test_columns_are_aligned_whatever_the_level() -> None:
    lines = [text_line(record("here", level=level)) for level in (10, 20, 30, 40)]
    assert len({line.index("here") for line in lines}) == 1


def test_an_access_line_begins_with_status_method_and_path() -> None:
    fields = {"method": "GET", "path": "/v1/models", "status": 200, "request_id": "a b", "stream": False}
    line = text_line(record("request", name="headrace.access", **fields))
    assert line.endswith('access     200 GET  /v1/models           request_id="a b" stream=False')


def test_lines_show_the_name_of_the_server() -> None:
    assert " INFO    [small] " in text_line(record("here"), "small")
    assert json.loads(json_line(record("here"), "small"))["server"] == "small"
    assert "server" not in json.loads(json_line(record("here")))


def test_a_json_line_is_one_object_with_the_fields_that_apply() -> None:
    line = json_line(record("request", name="headrace.access", status=200, tenant=None, ttft_seconds=0.25))
    assert json.loads(line) == {
        "time": "2026-11-24T22:27:03.250Z",
        "level": "info",
        "component": "access",
        "message": "request",
        "status": 200,
        "ttft_seconds": 0.25,
    }


@pytest.mark.parametrize("evil", ["two\nlines", "\x1b[31mred", "a\u2028b", 'quote"', "a=b", "\x85"])
def test_no_value_can_forge_a_line_or_a_field(evil: str) -> None:
    line = text_line(record("got %s", evil, user=evil))
    assert len(line.splitlines()) == 1
    assert line.isprintable()
    assert line.partition("user=")[2].startswith('"')
    assert json.loads(json_line(record("got %s", evil, user=evil)))["user"] == evil
    assert len(json_line(record("got %s", evil, user=evil)).splitlines()) == 1


def test_an_exception_is_shown_with_its_cause_where_no_prompt_can_be() -> None:
    made = record("step failed", name="headrace.service.thread", exc_info=raised("block 7"))
    assert "KeyError: 'block 7'" in text_line(made)
    assert "ValueError: bad: block 7" in json.loads(json_line(made))["exception"]


@pytest.mark.parametrize("line", [text_line, json_line])
@pytest.mark.parametrize("name", ["headrace.api.app", "headrace.text.template", "uvicorn.error"])
def test_an_exception_where_a_request_is_processed_has_its_place_but_no_message(name: str, line) -> None:
    shown = line(record("request failed", name=name, exc_info=raised("my secret prompt")))
    assert "secret" not in shown
    assert f"ValueError {WITHHELD}" in shown
    assert f"KeyError {WITHHELD}" in shown
    assert "test_log.py" in shown


@pytest.mark.parametrize("line", [text_line, json_line])
def test_what_asyncio_says_of_a_lost_exception_has_no_message_of_it(line) -> None:
    message = "Task exception was never retrieved\nfuture: <Task exception=ValueError('my secret prompt')>"
    shown = line(record(message, name="asyncio", exc_info=raised("my secret prompt")))
    assert "never retrieved" in shown
    assert "secret" not in shown


def test_components_are_short() -> None:
    assert component("headrace.api.app") == "app"
    assert component("uvicorn.error") == "uvicorn"


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


STEP = Stepped(1, 0, 1, 24, 1, 0, 3, 10, 48, 40)


def counts(caplog: pytest.LogCaptureFixture) -> list[tuple[str, int]]:
    return [(record.getMessage().partition(":")[0], record.fields["count"]) for record in caplog.records]


@pytest.fixture(autouse=True)
def _warnings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "headrace")


def test_overload_is_logged_at_once_and_then_with_its_count(caplog) -> None:
    log = WarningLog()
    for number in range(50):
        log.fold(TurnedAway(f"r{number}", "acme", "default", RejectReason.QUEUE_FULL), 100.0 + number / 10)
    assert counts(caplog) == [("request rejected", 1)]
    log.fold(STEP, 109.0)
    assert len(caplog.records) == 1
    log.fold(STEP, 110.5)  # no further rejection is needed for the rest to be logged
    assert counts(caplog) == [("request rejected", 1), ("request rejected", 49)]
    assert "--max-num-queued-reqs" in caplog.text
    assert "acme" not in caplog.text
    log.fold(STEP, 200.0)
    assert len(caplog.records) == 2


def test_reasons_are_logged_apart(caplog) -> None:
    log = WarningLog()
    log.fold(TurnedAway("a", "t", "default", RejectReason.QUEUE_FULL), 1.0)
    log.fold(TurnedAway("b", "t", "default", RejectReason.TENANT_LIMIT), 1.0)
    assert len(caplog.records) == 2


def test_a_preemption_storm_is_logged_once_a_minute(caplog) -> None:
    log = WarningLog()
    for number in range(STORM_PREEMPTIONS - 1):
        log.fold(Preempted("r", PreemptReason.NO_BLOCKS, 10), number * 0.1)
    assert not caplog.records
    for number in range(30):
        log.fold(Preempted("r", PreemptReason.NO_BLOCKS, 10), 2.0 + number)
    assert counts(caplog) == [("preemption storm", STORM_PREEMPTIONS)]
    assert caplog.records[0].fields["lost_tokens"] == 10 * STORM_PREEMPTIONS
    for number in range(STORM_PREEMPTIONS):
        log.fold(Preempted("r", PreemptReason.NO_BLOCKS, 10), 2.0 + STORM_REPORT_SECONDS + number * 0.1)
    assert len(caplog.records) == 2


def test_few_preemptions_are_no_storm(caplog) -> None:
    log = WarningLog()
    for number in range(100):
        log.fold(Preempted("r", PreemptReason.NO_BLOCKS, 10), number * 1.0)
    assert not caplog.records


def test_a_loss_of_memory_is_logged_and_no_preemption_storm(caplog) -> None:
    log = WarningLog()
    for number in range(STORM_PREEMPTIONS):
        log.fold(Preempted(f"r{number}", PreemptReason.LOST, 10), 1.0)
    log.fold(EngineLost(LostPart.RANK, "rank 1 ended", STORM_PREEMPTIONS, 2), 1.0)
    assert [record.getMessage() for record in caplog.records] == [
        "the memory of the engine was lost (rank 1 ended): 20 running requests are computed again, 2 failed"
    ]


def test_failed_audits_and_transfers_are_logged(caplog) -> None:
    log = WarningLog()
    log.fold(Audited("r", Layer.SEMANTIC, True), 1.0)
    assert not caplog.records
    log.fold(Audited("r", Layer.SEMANTIC, False), 1.0)
    log.fold(TransferFailed(Tier.HOST, Tier.DISK), 1.0)
    assert counts(caplog) == [("audit failed", 1), ("copy of KV blocks from host to disk failed", 1)]


def test_drafting_that_failed_is_logged(caplog) -> None:
    WarningLog().fold(DraftingFailed("RuntimeError: no"), 1.0)
    assert "speculative decoding failed and is switched off: RuntimeError: no" in caplog.text
