"""What is cleared ahead: far enough, not everything, never twice at once, and given up where it cannot be done."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from headrace.compute.ahead import ClearedAhead
from headrace.compute.device import resident_bytes
from headrace.compute.kv import PagedKV
from headrace.compute.model.families import parse_config
from tests.compute.model.configs import LLAMA


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
            thread.join()


def reach(ahead: ClearedAhead, *blocks: int) -> None:
    for each in blocks:
        ahead.reached(each)
        settle()


def test_a_distance_is_cleared_in_pieces_before_anything_is_used() -> None:
    pool = FakePool()
    reach(ClearedAhead(pool, ahead_bytes=100, piece_bytes=40), 0)
    assert pool.calls == [(0, 40), (40, 80), (80, 100)]


def test_nothing_happens_until_a_piece_is_missing() -> None:
    pool = FakePool()
    ahead = ClearedAhead(pool, ahead_bytes=100, piece_bytes=40)
    reach(ahead, 0)
    pool.calls.clear()
    reach(ahead, 1, 20, 39, 20)
    assert pool.calls == []
    reach(ahead, 41)
    assert pool.calls == [(100, 140), (140, 141)]


def test_the_distance_stays_and_the_end_is_the_pools() -> None:
    pool = FakePool()
    ahead = ClearedAhead(pool, ahead_bytes=100, piece_bytes=100)
    reach(ahead, 0, 300)
    assert pool.calls[-1] == (300, 400)
    pool.calls.clear()
    reach(ahead, 899)
    assert pool.calls[-1] == (900, 999)
    reach(ahead, 900, 1000)
    assert pool.calls[-1] == (999, 1000)


def test_a_piece_is_no_less_than_a_block() -> None:
    pool = FakePool()
    reach(ClearedAhead(pool, ahead_bytes=3, piece_bytes=0), 0)
    assert pool.calls == [(0, 1), (1, 2), (2, 3)]


def test_where_it_cannot_be_done_it_is_tried_once() -> None:
    pool = FakePool(able=False)
    reach(ClearedAhead(pool, ahead_bytes=100, piece_bytes=40), 0, 50, 900)
    assert pool.calls == [(0, 40)]


def test_while_one_thread_clears_no_other_begins() -> None:
    started, go_on = threading.Event(), threading.Event()

    class SlowPool(FakePool):
        def populate(self, first: int, end: int) -> bool:
            started.set()
            go_on.wait()
            return super().populate(first, end)

    pool = SlowPool()
    ahead = ClearedAhead(pool, ahead_bytes=100, piece_bytes=100)
    ahead.reached(0)
    started.wait()
    ahead.reached(500)
    go_on.set()
    settle()
    assert pool.calls == [(0, 100)]
    reach(ahead, 500)
    assert pool.calls[-1] == (500, 600)


def test_memory_of_a_real_pool_is_there_before_it_is_written() -> None:
    kv = PagedKV(parse_config(LLAMA), 20_000, 16, torch.float32)
    assert kv.nbytes > 64 << 20
    if not kv.populate(0, 1):
        pytest.skip("this system cannot be told to clear pages: the step that writes them will")
    before = resident_bytes()
    reach(ClearedAhead(kv, ahead_bytes=kv.nbytes // 2), 0)
    taken = resident_bytes() - before
    assert 0.4 * kv.nbytes < taken < 0.8 * kv.nbytes


ENDS_AT_ONCE = """
import torch
from headrace.compute.ahead import ClearedAhead
from headrace.compute.kv import PagedKV
from headrace.compute.model.families import parse_config
from tests.compute.model.configs import LLAMA
ClearedAhead(PagedKV(parse_config(LLAMA), 200_000, 16, torch.float32), piece_bytes=1 << 18).reached(0)
"""


def test_a_program_may_end_while_memory_is_cleared() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", ENDS_AT_ONCE], cwd=root, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
