"""A thread for idle cores: what runs on it, and what the caller computes instead."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from headrace.compute import device
from headrace.compute.idle_cores import IdleThread

LONG = 60.0
"""Seconds that no test takes."""


@pytest.fixture
def opened() -> Iterator[list[IdleThread]]:
    threads: list[IdleThread] = []
    yield threads
    for each in threads:
        each.close()


def make(opened: list[IdleThread], seconds: float = LONG, share: float = 0.0) -> IdleThread:
    opened.append(IdleThread("test-idle", seconds, share))
    return opened[-1]


def needs_linux() -> None:
    if sys.platform != "linux" or not device.apart(device.run_on_idle_cores):
        pytest.skip("the operating system has no threads for idle cores")


def test_it_computes_on_idle_cores_and_the_caller_keeps_its_policy(opened: list[IdleThread]) -> None:
    needs_linux()
    before = os.sched_getscheduler(0)
    assert make(opened).call(lambda: os.sched_getscheduler(0), time.monotonic()) == os.SCHED_IDLE
    assert os.sched_getscheduler(0) == before != os.SCHED_IDLE


def test_an_error_is_raised_in_the_caller(opened: list[IdleThread]) -> None:
    with pytest.raises(ZeroDivisionError):
        make(opened).call(lambda: 1 // 0, time.monotonic())


def test_what_gets_no_cpu_time_is_computed_by_the_caller(opened: list[IdleThread]) -> None:
    needs_linux()
    idle, free, own = make(opened, 0.01, 0.9), threading.Event(), threading.get_ident()
    ran: list[int] = []

    def function() -> str:
        ran.append(threading.get_ident())
        if ran[-1] != own:
            free.wait()
        return "result"

    assert idle.call(function, time.monotonic() + LONG) == "result"
    assert idle.call(function, time.monotonic() + LONG) == "result"  # the thread is still busy with the first
    free.set()
    idle.close()
    assert [each == own for each in ran].count(False) == 1
    assert ran[1:] == [own, own]


def test_what_gets_cpu_time_goes_on_for_longer_than_the_limit(opened: list[IdleThread]) -> None:
    needs_linux()
    idle, ran = make(opened, 0.01), list[int]()

    def function() -> str:
        ran.append(threading.get_ident())
        until = time.thread_time() + 0.05
        while time.thread_time() < until:
            pass
        return "result"

    assert idle.call(function, time.monotonic() + LONG) == "result"
    assert len(ran) == 1
    assert ran[0] != threading.get_ident()


def test_what_has_waited_for_too_long_is_computed_by_the_caller(opened: list[IdleThread]) -> None:
    assert make(opened).call(threading.get_ident, time.monotonic() - 2 * LONG) == threading.get_ident()


def test_where_the_system_refuses_the_policy_the_caller_computes(
    opened: list[IdleThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refuse, raising=False)
    assert make(opened).call(threading.get_ident, time.monotonic()) == threading.get_ident()
