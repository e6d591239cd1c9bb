"""The threads of the C++ kernels: every task once, whoever does it and whoever else computes; after a fork too."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from headrace.compute.kernels.cpp import CppKernels

WORDS = torch.arange(3_000_001, dtype=torch.int64)
SUM = 3_000_000 * 3_000_001 // 2


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
