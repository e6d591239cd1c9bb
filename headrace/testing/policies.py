"""Checks that every order, admission, victim and eviction policy must pass.

A policy must be deterministic and let every request end. Each check takes a factory: the policy's class, or a function
without parameters that makes one.

```
import pytest
from headrace.testing import ORDER_CHECKS
from my_package import ShortestFirst

@pytest.mark.parametrize("check", ORDER_CHECKS, ids=lambda check: check.__name__)
def test_shortest_first(check):
    check(ShortestFirst)
```
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial

from headrace.core.memory.block_pool import BlockPool
from headrace.core.memory.eviction import Block, EvictionPolicy
from headrace.core.queueing.order import OrderPolicy, ask_rank
from headrace.core.scheduler.admission import AdmissionPolicy, Queue, ask_admission, ask_ready_at
from headrace.core.scheduler.victims import VictimPolicy
from headrace.core.sequence import Sequence
from headrace.testing.crowd import check_outputs, make_crowd, make_request, serve_crowd
from headrace.testing.engines import Record

MakeOrder = Callable[[], OrderPolicy]
MakeAdmission = Callable[[], AdmissionPolicy]
MakeVictims = Callable[[], VictimPolicy]
MakeEviction = Callable[[], EvictionPolicy]


# -- queue order ----------------------------------------------------------------------------------------------


def ranks_are_valid_and_unique(make: MakeOrder) -> None:
    """Each rank is a tuple of numbers that ends with ``number``; ranks differ, are comparable, and deterministic."""
    policy, again = make(), make()
    ranks = [ask_rank(policy, each, number) for number, each in enumerate(make_crowd())]
    assert len(set(ranks)) == len(ranks), "two requests have the same rank"
    sorted(ranks)
    repeated = [ask_rank(again, each, number) for number, each in enumerate(make_crowd())]
    assert ranks == repeated, "a second policy gives the same requests other ranks"


def earlier_of_equal_requests_ranks_first(make: MakeOrder) -> None:
    """Of requests that differ only in their arrival, the earlier one has the lower rank."""
    policy = make()
    ranks = [ask_rank(policy, make_request("r"), number) for number in range(5)]
    assert ranks == sorted(ranks), f"ranks of equal requests, by arrival: {ranks}"


def order_serves_every_request(make: MakeOrder) -> None:
    """An engine with this order completes every request of a crowd, and a second run has the same events."""
    _check_runs(partial(serve_crowd, order=make))


# -- admission ------------------------------------------------------------------------------------------------


def admits_only_waiting_requests(make: MakeAdmission) -> None:
    """`admit` returns a number from 0 to the number of waiting requests."""
    for queue in _queues():
        count = ask_admission(make(), queue, 100.0)
        assert count <= queue.waiting, f"{count} admitted of {queue.waiting} waiting requests"


def admits_at_the_time_it_names(make: MakeAdmission) -> None:
    """If no request runs, `admit` admits at least one at the time that `ready_at` returns."""
    for queue in _queues():
        if queue.running == 0:
            due = max(ask_ready_at(make(), queue), 0.0)
            assert ask_admission(make(), queue, due) > 0, (
                f"no request is admitted at {due}, the time it named"
            )


def admission_serves_every_request(make: MakeAdmission) -> None:
    """An engine with this admission completes every request of a crowd, and a second run has the same events."""
    _check_runs(partial(serve_crowd, admission=make))


def _queues() -> list[Queue]:
    return [
        Queue(waiting, oldest, running, admitted=9)
        for waiting, running, oldest in itertools.product((1, 2, 5), (0, 1, 4), (0.0, 3.0))
    ]


# -- victims --------------------------------------------------------------------------------------------------


def victim_is_a_candidate_but_not_the_first(make: MakeVictims) -> None:
    """The victim is one of the candidates, and not the first of several, which must make progress."""
    sequences = [Sequence(make_request(f"r{i}"), (i,), 64) for i in range(4)]
    for count in range(1, 5):
        chosen = make().choose(sequences[:count], 0.0)
        assert any(chosen is each for each in sequences[:count]), f"{chosen!r} is not one of the candidates"
        assert chosen is make().choose(sequences[:count], 0.0), "a second policy chooses another victim"
        assert count == 1 or chosen is not sequences[0], "the first of several candidates must make progress"


def victims_let_every_request_end(make: MakeVictims) -> None:
    """An engine with this victim policy completes every request of a crowd, and a second run has the same events."""
    _check_runs(partial(serve_crowd, victims=make))


# -- eviction -------------------------------------------------------------------------------------------------


def priorities_are_numbers(make: MakeEviction) -> None:
    """The priority of a block is a number other than NaN, and the same in a second call."""
    policy = make()
    for hits, used, wanted in itertools.product((0, 3), (0, 70), (False, True)):
        block = Block(1)
        block.hits, block.used, block.wanted = hits, used, wanted
        priority = policy.priority(block)
        assert isinstance(priority, int | float), f"the priority {priority!r} is not a number"
        assert not math.isnan(priority), "the priority is NaN"
        assert priority == policy.priority(block), "the same block has another priority in a second call"


def eviction_returns_every_block_once(make: MakeEviction) -> None:
    """When all blocks are cached and idle, a request for all of them gets each one once."""
    pool = BlockPool(6, 2, make(), lambda event: None)
    table = pool.allocate(6)
    parent = b""
    for i, block in enumerate(table):
        parent = pool.register(block, parent, (i, i))
    pool.release(table)
    assert sorted(pool.allocate(6)) == list(range(6)), "blocks are missing or allocated twice"
    pool.check()


def eviction_serves_every_request(make: MakeEviction) -> None:
    """An engine with this eviction policy completes every request of a crowd, and a second run has the same events."""
    _check_runs(partial(serve_crowd, eviction=make))


# -- all of a kind --------------------------------------------------------------------------------------------

ORDER_CHECKS = (
    ranks_are_valid_and_unique,
    earlier_of_equal_requests_ranks_first,
    order_serves_every_request,
)
ADMISSION_CHECKS = (
    admits_only_waiting_requests,
    admits_at_the_time_it_names,
    admission_serves_every_request,
)
VICTIM_CHECKS = (victim_is_a_candidate_but_not_the_first, victims_let_every_request_end)
EVICTION_CHECKS = (priorities_are_numbers, eviction_returns_every_block_once, eviction_serves_every_request)


def check_order(make: MakeOrder) -> None:
    """All `ORDER_CHECKS`."""
    for check in ORDER_CHECKS:
        check(make)


def check_admission(make: MakeAdmission) -> None:
    """All `ADMISSION_CHECKS`."""
    for check in ADMISSION_CHECKS:
        check(make)


def check_victims(make: MakeVictims) -> None:
    """All `VICTIM_CHECKS`."""
    for check in VICTIM_CHECKS:
        check(make)


def check_eviction(make: MakeEviction) -> None:
    """All `EVICTION_CHECKS`."""
    for check in EVICTION_CHECKS:
        check(make)


def _check_runs(serve: Callable[..., Record]) -> None:
    for overlap in (0, 1):
        record = serve(overlap=overlap)
        check_outputs(record)
        assert serve(overlap=overlap).events == record.events, "a second run has other events"
