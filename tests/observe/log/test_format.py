"""Log lines as text and as JSON."""

from __future__ import annotations

import json
import logging
import sys

import pytest

from headrace.observe.log.format import WITHHELD, component, json_line, text_line


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
@pytest.mark.parametrize("name", ["headrace.api.edge", "headrace.text.template", "uvicorn.error"])
def test_an_exception_where_a_request_is_processed_has_its_place_but_no_message(name: str, line) -> None:
    shown = line(record("request failed", name=name, exc_info=raised("my secret prompt")))
    assert "secret" not in shown
    assert f"ValueError {WITHHELD}" in shown
    assert f"KeyError {WITHHELD}" in shown
    assert "test_format.py" in shown


@pytest.mark.parametrize("line", [text_line, json_line])
def test_what_asyncio_says_of_a_lost_exception_has_no_message_of_it(line) -> None:
    message = "Task exception was never retrieved\nfuture: <Task exception=ValueError('my secret prompt')>"
    shown = line(record(message, name="asyncio", exc_info=raised("my secret prompt")))
    assert "never retrieved" in shown
    assert "secret" not in shown


def test_components_are_short() -> None:
    assert component("headrace.api.edge") == "edge"
    assert component("uvicorn.error") == "uvicorn"
