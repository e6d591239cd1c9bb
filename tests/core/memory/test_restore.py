from __future__ import annotations

import pytest

from headrace.core.memory.restore import AlwaysRestore, Link, RestoreIfFaster
from headrace.core.plan import Tier
from headrace.core.prediction.step_curve import StepCost
from headrace.core.prediction.step_times import StepTimes

SIZE, BYTES = 10, 1000
HOST, DISK = Tier.HOST, Tier.DISK


def policy(token_seconds: float, context_tokens: float = 1e12, **links: Link) -> RestoreIfFaster:
    times = StepTimes(StepCost(0.0, context_tokens), token_seconds)
    return RestoreIfFaster(times, SIZE, BYTES, {Tier(name): link for name, link in links.items()})


def test_always_is_always():
    assert AlwaysRestore().choose(0, [HOST, DISK, DISK]) == 3


def test_fetched_where_fetching_is_quicker_and_computed_where_that_is():
    """A block is ten tokens; over this link it takes one second."""
    link = Link(0.0, BYTES)
    assert policy(0.2, host=link).choose(0, [HOST] * 3) == 3
    assert policy(0.05, host=link).choose(0, [HOST] * 3) == 0


def test_a_slow_start_pays_from_some_length_on():
    slow = policy(0.2, host=Link(1.5, BYTES))
    assert slow.choose(0, [HOST]) == 0
    assert slow.choose(0, [HOST] * 2) == 2


def test_deep_blocks_are_worth_fetching_where_first_ones_are_not():
    """At position 100 a token costs twice a first one."""
    deep = policy(0.08, context_tokens=100.0, host=Link(0.0, BYTES))
    assert deep.choose(0, [HOST]) == 0
    assert deep.choose(100, [HOST]) == 1


def test_each_tier_by_its_own_link():
    both = policy(0.1, host=Link(0.0, 2 * BYTES), disk=Link(0.0, BYTES / 2))
    assert both.choose(0, [HOST, HOST, DISK, DISK]) == 2, "the disk is slower than computing"
    assert both.choose(0, [DISK, HOST]) == 0
    assert both.choose(0, [DISK, *[HOST] * 5]) == 6, "the way to the rest leads over it"


def test_a_tier_that_is_not_linked_is_not_there():
    assert policy(1.0, host=Link(0.0, BYTES)).choose(0, [HOST, DISK, HOST]) == 1


@pytest.mark.parametrize("took", [0.1, 10.0])
def test_it_learns_how_quickly_a_tier_answers(took):
    learner = policy(0.1, disk=Link(0.0, BYTES))
    for _ in range(100):
        learner.observe(DISK, took)
    assert learner.links[DISK].bytes_per_second == pytest.approx(BYTES / took, rel=0.01)
    assert bool(learner.choose(0, [DISK])) == (took < 1.0)


def test_it_pays_to_bring_to_the_disk_what_would_be_fetched_from_there():
    some = policy(0.1, context_tokens=100.0, disk=Link(3.0, BYTES))
    for blocks in range(1, 60):
        assert some.pays(DISK, blocks) == (some.choose(0, [DISK] * blocks) == blocks), blocks
    assert {some.pays(DISK, blocks) for blocks in range(1, 60)} == {False, True}


def test_to_the_host_and_back_are_two_ways_that_steps_wait_for():
    """Ten tokens take a second to compute; a block takes ``seconds`` one way."""
    for seconds, fetched, brought in ((0.4, 1, True), (0.6, 1, False), (1.1, 0, False)):
        some = policy(0.1, host=Link(0.0, BYTES / seconds))
        assert (some.choose(0, [HOST]), some.pays(HOST, 1)) == (fetched, brought)


def test_without_a_link_nothing_is_brought_down():
    assert not policy(1.0, host=Link(0.0, BYTES)).pays(DISK, 5)
