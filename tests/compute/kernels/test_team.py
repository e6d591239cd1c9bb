"""The threads of the C++ kernels: every task once, whoever does it and whoever else computes; after a fork too."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from headrace.compute.kernels.cpp import CppKernels

WORDS = torch.arange(3_000_001, dtype=torch.int64)
SUM = 3_000_000 * 3_000_001 // 2

SOON = 60.0
SLICE_NANOSECONDS = 100_000
"""`SLICE_NANOSECONDS` of team.cpp."""

READING_CALLS = {"x86_64": 315, "aarch64": 275}
"""Number of the system call sched_getattr."""


class Scheduling(NamedTuple):
    """How the system schedules a thread; a slice of 0: it does not say."""

    policy: int
    nice: int
    nanoseconds: int


def scheduling(thread: int = 0) -> Scheduling:
    """Of a thread of this process, by default the caller."""
    form = struct.Struct("IIQiIQQQ")
    attributes = ctypes.create_string_buffer(form.size)
    if ctypes.CDLL(None).syscall(READING_CALLS[platform.machine()], thread, attributes, form.size, 0):
        return Scheduling(0, 0, 0)
    _, policy, _, nice, _, nanoseconds, _, _ = form.unpack(attributes.raw)
    return Scheduling(policy, nice, nanoseconds)


def all_threads() -> list[Scheduling]:
    """Of each thread of this process."""
    return [scheduling(int(thread)) for thread in os.listdir("/proc/self/task")]


has_slices = pytest.mark.skipif(
    platform.system() != "Linux" or platform.machine() not in READING_CALLS or not scheduling().nanoseconds,
    reason="this system has no slices of threads",
)


def in_child(check: Callable[[], bool]) -> bool:
    """What ``check`` returns in a forked child, whose threads are its own."""
    child = os.fork()
    if not child:
        try:
            os._exit(not check())
        finally:  # it raised
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.fixture(scope="module")
def kernels() -> CppKernels:
    return CppKernels()


@pytest.mark.parametrize("threads", [1, 2, 16, 3])
def test_every_task_is_done_once_by_however_many(kernels: CppKernels, threads: int) -> None:
    for _ in range(20):
        assert kernels.read(WORDS, threads) == SUM


def test_a_call_while_the_thread_pool_is_busy_runs_alone(kernels: CppKernels) -> None:
    sums: list[int] = []
    callers = [
        threading.Thread(target=lambda: sums.extend(kernels.read(WORDS, 3) for _ in range(20)))
        for _ in range(4)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert sums == [SUM] * 80


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Python's, of forking where there are threads
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_has_a_team_of_its_own(kernels: CppKernels) -> None:
    assert kernels.read(WORDS, 2) == SUM
    child = os.fork()
    if not child:
        os._exit(kernels.read(WORDS, 2) != SUM or kernels.read(WORDS, 4) != SUM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="there is one core"
)
def test_helpers_are_never_in_line_behind_the_thread_that_shares(kernels: CppKernels) -> None:
    child = os.fork()
    if not child:
        kernels.read(WORDS, 3)
        cores = os.sched_getaffinity(0)
        helpers = [int(thread) for thread in os.listdir("/proc/self/task") if int(thread) != os.getpid()]
        apart = [helper for helper in helpers if len(cores - os.sched_getaffinity(helper)) == 1]
        os._exit(len(helpers) != 2 or apart != helpers)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@has_slices
def test_threads_that_compute_have_short_slices_and_start_threads_without(kernels: CppKernels) -> None:
    def check() -> bool:
        os.nice(3)
        started: list[Scheduling] = []
        before = scheduling()
        kernels.read(WORDS, 3)
        expected = [Scheduling(0, before.nice, SLICE_NANOSECONDS)] * 3
        until = time.monotonic() + SOON
        while (found := all_threads()) != expected and time.monotonic() < until:
            time.sleep(0.001)  # a call does not wait for helpers that have not run yet
        thread = threading.Thread(target=lambda: started.append(scheduling()))
        thread.start()
        thread.join()
        return found == expected and started == [before]

    assert in_child(check)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@has_slices
def test_a_thread_of_another_policy_keeps_it(kernels: CppKernels) -> None:
    def check() -> bool:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        before = scheduling()
        kernels.read(WORDS, 2)
        return before.policy == os.SCHED_BATCH and scheduling() == before

    assert in_child(check)
