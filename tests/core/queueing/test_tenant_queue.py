""""""

from __future__ import annotations

import random
from collections.abc import Sequence as Many
from itertools import combinations

from headrace.core.queueing.tenant_queue import SWEEP, TenantQueue, requests_to_defer
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


def waiting(*lines: tuple[float, float]) -> list[Sequence]:
    """Sequences by latest start and seconds of their prompts."""
    made = []
    for number, (latest_start, seconds) in enumerate(sorted(lines)):
        sequence = Sequence(request(f"r{number}"), (number,), 64)
        sequence.latest_start, sequence.prompt_seconds = latest_start, seconds
        made.append(sequence)
    return made


def in_time(line: Many[Sequence], now: float) -> bool:
    for sequence in line:
        if now > sequence.latest_start:
            return False
        now += sequence.prompt_seconds
    return True


def test_no_request_is_deferred_while_all_can_be_in_time():
    assert requests_to_defer(waiting((0.0, 1.0), (1.0, 5.0), (6.0, 1.0)), 0.0) == []
    assert requests_to_defer([], 0.0) == []


def test_the_longest_is_given_up_though_it_is_not_the_one_that_would_be_late():
    first, longest, last = waiting((0.0, 1.0), (2.0, 5.0), (3.0, 1.0))
    assert requests_to_defer([first, longest, last], 0.0) == [longest]


def test_a_request_that_is_already_late_delays_no_other():
    late, other = waiting((0.0, 1.0), (2.0, 5.0))
    assert requests_to_defer([late, other], 1.0) == [late]


def test_no_other_choice_saves_more():
    for seed in range(200):
        rng = random.Random(seed)
        line = waiting(*((rng.randint(-1, 12), rng.randint(1, 6)) for _ in range(rng.randint(1, 7))))
        lost = requests_to_defer(line, 0.0)
        kept = [sequence for sequence in line if sequence not in lost]
        assert in_time(kept, 0.0), seed
        assert not any(in_time(choice, 0.0) for choice in combinations(line, len(kept) + 1)), seed
