from __future__ import annotations

from headrace.core.queueing.tenant_queue import SWEEP, TenantQueue
from headrace.core.sequence import Sequence, Status
from tests.doubles.scenes import request


def sequences(count: int) -> list[Sequence]:
    return [Sequence(request(f"r{i}"), (i,), 64) for i in range(count)]


def test_lowest_rank_first_in_any_order_of_arrival():
    queue = TenantQueue()
    a, b, c = sequences(3)
    for sequence in (c, a, b):
        queue.push(sequence)
    assert queue.peek(0.0) is a
    assert [queue.pop(0.0), queue.pop(0.0), queue.pop(0.0), queue.pop(0.0)] == [a, b, c, None]
    assert not queue


def test_those_that_ended_are_neither_counted_nor_met():
    queue = TenantQueue()
    many = sequences(3 * SWEEP)
    for sequence in many:
        queue.push(sequence)
    for sequence in many[:-1]:
        sequence.enter(Status.FINISHED)
        queue.note_end(sequence)
        assert len(queue._timely._heap) <= 2 * len(queue) + SWEEP
    assert len(queue) == len(list(queue)) == 1
    assert queue.pop(0.0) is many[-1]
    assert queue.peek(0.0) is None
