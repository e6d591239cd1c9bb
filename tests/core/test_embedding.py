"""Which inputs are computed together: turns of tenants, short inputs first, a bound that one input may exceed."""

from __future__ import annotations

from headrace.core.embedding import InputQueue


def test_tenants_take_turns_and_short_inputs_come_first() -> None:
    queue: InputQueue[str] = InputQueue()
    queue.add("large", "a", [5, 1, 3, 2])
    queue.add("small", "b", [4])
    assert queue.tokens == 15
    assert queue.take(7) == [("large", 1), ("small", 0), ("large", 3)]
    assert queue.take(100) == [("large", 2), ("large", 0)]
    assert not queue
    assert queue.tokens == 0


def test_one_input_may_exceed_the_limit() -> None:
    queue: InputQueue[str] = InputQueue()
    queue.add("call", "a", [9, 8])
    assert queue.take(4) == [("call", 1)]
    assert queue.take(4) == [("call", 0)]


def test_calls_of_a_tenant_follow_one_another() -> None:
    queue: InputQueue[str] = InputQueue()
    queue.add("first", "a", [3, 3])
    queue.add("second", "a", [1])
    assert queue.take(100) == [("first", 0), ("first", 1), ("second", 0)]


def test_a_removed_call_is_not_computed() -> None:
    queue: InputQueue[str] = InputQueue()
    queue.add("first", "a", [1, 2])
    queue.add("second", "b", [3])
    assert queue.take(1) == [("first", 0)]
    queue.remove("first")
    queue.remove("first")
    assert queue.tokens == 3
    assert len(queue) == 1
    assert queue.take(100) == [("second", 0)]


def test_a_call_without_inputs_leaves_no_trace() -> None:
    queue: InputQueue[str] = InputQueue()
    queue.add("call", "a", [])
    assert not queue
    assert queue.take(10) == []
