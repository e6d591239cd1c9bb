"""Progress appears on a terminal when work takes long, and nowhere else."""

from __future__ import annotations

import io
import sys
import time

import pytest

from headrace.cli import output as module
from headrace.cli.output import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def long_work(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, after: float) -> str:
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(module, "AFTER_SECONDS", after)
    monkeypatch.setattr(module, "EVERY_SECONDS", 0.01)
    monkeypatch.setenv("TERM", "xterm")
    with progress("counting sheep", 3) as meter:
        for _ in meter.count(range(3)):
            time.sleep(0.1 if not after else 0.0)
        until = time.monotonic() + 60.0
        while not after and stream.isatty() and "counting sheep" not in stream.getvalue():
            assert time.monotonic() < until
            time.sleep(0.01)
        assert meter.current == 3
    return stream.getvalue()


def test_long_work_is_shown_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = long_work(monkeypatch, Terminal(), after=0.0)
    assert "counting sheep" in shown


def test_short_work_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    assert long_work(monkeypatch, Terminal(), after=60.0) == ""


def test_nothing_is_shown_where_errors_go_into_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    assert long_work(monkeypatch, io.StringIO(), after=0.0) == ""


def test_a_count_may_be_read_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    with progress("reading") as meter:
        meter.read = lambda: 7.0
        assert meter.current == 7.0
