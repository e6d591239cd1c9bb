"""What is cleared ahead: far enough, not everything, never twice at once, and given up where it cannot be done."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from headrace.compute.device import resident_bytes
from headrace.compute.memory_clearing import MemoryClearing, Pool
from headrace.compute.model.families import parse_config
from headrace.compute.model.kv import PagedKV
from tests.compute.model.configs import LLAMA
from tests.waiting import eventually


class FakePool:
    """1,000 blocks of one byte."""

    def __init__(self, *, able: bool = True) -> None:
        self.num_blocks = self.nbytes = 1000
        self.calls: list[tuple[int, int]] = []
        self._able = able

    def populate(self, first: int, end: int) -> bool:
        self.calls.append((first, end))
        return self._able


def settle() -> None:
    """Until no thread clears."""
    for thread in threading.enumerate():
        if thread.name == "headrace-clear":
            thread.join(60.0)
            assert not thread.is_alive()


def make(pool: Pool, far: int, near_bytes: int, piece_bytes: int) -> MemoryClearing:
    return MemoryClearing(pool, far, near_bytes, piece_bytes, rest_seconds=0.001)


def step(ahead: MemoryClearing, *blocks: int) -> None:
    """Steps that are over, and then a rest until nothing more is cleared."""
    for each in blocks:
        ahead.begin(each)
        ahead.rest()
        settle()


def test_before_the_first_step_nothing_is_cleared() -> None:
    pool = FakePool()
    ahead = make(pool, 100, 100, 40)
    ahead.rest()
    settle()
    assert pool.calls == []


def test_a_distance_is_cleared_in_whole_pieces() -> None:
    pool = FakePool()
    step(make(pool, 0, 100, 40), 0)
    assert pool.calls == [(0, 40), (40, 80)]


def test_nothing_happens_until_a_piece_is_missing() -> None:
    pool = FakePool()
    ahead = make(pool, 0, 100, 40)
    step(ahead, 0)
    pool.calls.clear()
    step(ahead, 1, 19, 10)
    assert pool.calls == []
    step(ahead, 20)
    assert pool.calls == [(80, 120)]


def test_beside_steps_the_near_is_cleared_and_the_far_once_none_runs() -> None:
    pool = FakePool()
    ahead = make(pool, 500, 100, 50)
    ahead.begin(0)
    eventually(lambda: len(pool.calls) == 2)
    time.sleep(0.05)
    assert pool.calls == [(0, 50), (50, 100)]
    ahead.begin(30)  # the step before has not rested
    time.sleep(0.05)
    assert len(pool.calls) == 2
    ahead.begin(60)
    eventually(lambda: len(pool.calls) == 3)
    ahead.rest()
    settle()
    assert pool.calls[3:] == [(first, first + 50) for first in range(150, 550, 50)]


def test_memory_that_was_given_back_is_cleared_again_with_the_next_step() -> None:
    pool = FakePool()
    ahead = make(pool, 500, 100, 50)
    ahead.begin(0)
    eventually(lambda: len(pool.calls) == 2)
    ahead.restart()  # the thread has ended, although the far is not cleared
    assert not any(thread.name == "headrace-clear" for thread in threading.enumerate())
    ahead.rest()
    time.sleep(0.01)
    assert pool.calls == [(0, 50), (50, 100)]
    step(ahead, 0)
    assert pool.calls[2:4] == [(0, 50), (50, 100)]


def test_a_step_that_begins_stops_the_far() -> None:
    begun: list[int] = []

    class BusyPool(FakePool):
        def populate(self, first: int, end: int) -> bool:
            if end == 300:
                ahead.begin(0)
                begun.append(end)
            return super().populate(first, end)

    pool = BusyPool()
    ahead = make(pool, 500, 100, 50)
    ahead.begin(0)
    ahead.rest()
    eventually(lambda: bool(begun))
    time.sleep(0.05)
    assert pool.calls[-1] == (250, 300)
    ahead.rest()
    settle()
    assert pool.calls[-1] == (450, 500)


def test_the_distance_stays_and_the_end_is_the_pools() -> None:
    pool = FakePool()
    ahead = make(pool, 100, 100, 70)
    step(ahead, 0, 300)
    assert pool.calls[-1] == (280, 350)
    step(ahead, 899)
    assert pool.calls[-1] == (910, 980)
    step(ahead, 900)
    assert pool.calls[-1] == (980, 1000)
    step(ahead, 950, 1000)
    assert pool.calls[-1] == (980, 1000)


def test_a_piece_is_no_less_than_a_block() -> None:
    pool = FakePool()
    step(make(pool, 0, 3, 0), 0)
    assert pool.calls == [(0, 1), (1, 2), (2, 3)]


def test_where_it_cannot_be_done_it_is_tried_once() -> None:
    pool = FakePool(able=False)
    step(make(pool, 0, 100, 40), 0, 50, 900)
    assert pool.calls == [(0, 40)]


def test_while_one_thread_clears_no_other_begins() -> None:
    started, go_on = threading.Event(), threading.Event()

    class SlowPool(FakePool):
        def populate(self, first: int, end: int) -> bool:
            started.set()
            go_on.wait()
            return super().populate(first, end)

    pool = SlowPool()
    ahead = make(pool, 0, 100, 100)
    ahead.begin(0)
    started.wait()
    ahead.begin(500)
    assert sum(thread.name == "headrace-clear" for thread in threading.enumerate()) == 1
    go_on.set()
    ahead.rest()
    settle()
    assert pool.calls == [(first, first + 100) for first in range(0, 600, 100)]


def test_memory_of_a_real_pool_is_there_before_it_is_written() -> None:
    share = 0.0
    for _ in range(4):  # the system may take pages of libraries away meanwhile
        kv = PagedKV(parse_config(LLAMA).shape, 20_000, 16, torch.float32)
        assert kv.nbytes > 64 << 20
        if not kv.populate(0, 1):
            pytest.skip("this system cannot be told to clear pages: the step that writes them will")
        before = resident_bytes()
        step(make(kv, 0, kv.nbytes // 2, 1 << 20), 0)
        share = (resident_bytes() - before) / kv.nbytes
        if 0.4 < share < 0.8:
            break
    assert 0.4 < share < 0.8


ENDS_AT_ONCE = """
import torch
from headrace.compute.memory_clearing import MemoryClearing
from headrace.compute.model.kv import PagedKV
from headrace.compute.model.families import parse_config
from tests.compute.model.configs import LLAMA
MemoryClearing(PagedKV(parse_config(LLAMA).shape, 200_000, 16, torch.float32), 200_000, piece_bytes=1 << 18).begin(0)
"""


@pytest.mark.slow
def test_a_program_may_end_while_memory_is_cleared() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", ENDS_AT_ONCE], cwd=root, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
