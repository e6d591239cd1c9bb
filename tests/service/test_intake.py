from __future__ import annotations

import asyncio

import pytest

from headrace.service import intake
from headrace.service.intake import Intake

pytestmark = pytest.mark.anyio


async def test_each_turn_of_the_loop_runs_one_piece_of_all_calls(monkeypatch):
    monkeypatch.setattr(intake, "PIECE_SECONDS", -1.0)  # every part of the work is a piece of its own
    turns, done, most = Intake(), 0, 0

    async def call() -> None:
        nonlocal done
        pieces = turns.pieces()
        for _ in range(20):
            await pieces.turn()
            done += 1

    calls = [asyncio.create_task(call()) for _ in range(10)]
    while not all(each.done() for each in calls):
        before = done
        await asyncio.sleep(0)
        most = max(most, done - before)
    assert done == 200
    assert most <= 2  # not ten: another task waits for two parts at most


async def test_calls_take_turns(monkeypatch):
    monkeypatch.setattr(intake, "PIECE_SECONDS", -1.0)
    turns, order = Intake(), list[int]()

    async def call(number: int) -> None:
        pieces = turns.pieces()
        for _ in range(3):
            await pieces.turn()
            order.append(number)

    await asyncio.gather(*(call(number) for number in range(3)))
    assert sorted(order[:3]) == sorted(order[3:6]) == sorted(order[6:]) == [0, 1, 2]


async def test_a_small_call_does_not_wait():
    pieces = Intake().pieces()
    pieces._ends = float("inf")
    waiting = pieces.turn()
    try:
        waiting.send(None)
    except StopIteration:
        return
    raise AssertionError("it yielded")


async def test_a_call_that_is_cancelled_leaves_the_lock_to_others(monkeypatch):
    monkeypatch.setattr(intake, "PIECE_SECONDS", -1.0)
    turns = Intake()
    first = asyncio.create_task(turns.pieces().turn())
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait_for(turns.pieces().turn(), 5)
