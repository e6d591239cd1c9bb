"""Requests whose prompts peers hold: who asks, what comes, and what happens if it does not come."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from headrace.core.engine import Engine
from headrace.core.events import Admitted, Finished, Moved, MoveReason, Skipped, SkipReason
from headrace.core.memory.block_table import ASK_SECONDS, LOOK_UP_SECONDS, RESTORE_SECONDS
from headrace.core.peers import PeersAnswered, Pulled
from headrace.core.plan import Tier
from headrace.core.request import FinishReason
from headrace.testing.engines import PEER_BLOCKS, Record, drain, hashing_engine
from headrace.testing.hashing_peers import HashingPeers
from headrace.testing.hashing_runner import HashingRunner, expected_tokens
from tests.doubles.scenes import request

STORY = tuple(range(100, 117))  # four full blocks and a token
OTHER = tuple(range(300, 317))


def scene(held: Sequence[int] = STORY, **settings) -> tuple[Engine, HashingRunner, HashingPeers, Record]:
    """An empty engine whose peers have computed ``held``."""
    peers = HashingPeers()
    engine, runner = hashing_engine(
        **{"num_blocks": 16, "max_model_len": 40, "host_blocks": 20, "peers": peers} | settings
    )
    peers.hold(held, 4)
    return engine, runner, peers, Record()


def ask(engine: Engine, record: Record, name: str, tokens: Sequence[int], **fields) -> int:
    """Let one request run alone until it has ended; how many of its tokens were not computed."""
    engine.submit(request(name, tuple(tokens), max_tokens=3, **fields), 0.0)
    drain(engine, record)
    engine.check_consistency()
    assert record.tokens[name] == expected_tokens(tuple(tokens), 0, 3, frozenset())
    (admitted,) = [event for event in record.of(Admitted) if event.request_id == name]
    return admitted.cached_tokens


@pytest.mark.parametrize("overlap", [0, 1])
def test_what_a_peer_holds_is_pulled_and_not_computed(overlap):
    engine, runner, _, record = scene(overlap=overlap)
    assert ask(engine, record, "a", STORY) == 16
    assert runner.computed_tokens == len(STORY) - 16 + 2
    assert record.of(PeersAnswered) == [PeersAnswered("a", "peer", 16, 16, 0.0)]
    assert Moved(Tier.PEER, Tier.HOST, 4, 4000, MoveReason.FETCHED, "a") in record.events
    assert sum(event.blocks for event in record.of(Pulled)) == 4
    reasons = [event.reason for event in record.of(Skipped)]
    assert SkipReason.RESTORING in reasons


def test_only_what_is_missing_is_asked_for():
    engine, _, peers, record = scene()
    ask(engine, record, "half", STORY[:9])
    assert len(peers.asked.pop().keys) == 2
    assert ask(engine, record, "whole", (*STORY, 1, 2, 3, 4)) == 16
    assert len(peers.asked.pop().keys) == 3
    assert ask(engine, record, "again", STORY) == 16
    assert not peers.asked, "nothing is missing"


def test_a_request_of_another_salt_gets_nothing_of_it():
    engine, _, peers, record = scene()
    peers.hold(OTHER, 4, "tenant")
    assert ask(engine, record, "a", STORY, salt="tenant") == 0
    assert ask(engine, record, "b", OTHER) == 0
    assert ask(engine, record, "c", OTHER, salt="tenant") == 16


def test_while_peers_are_asked_a_request_waits_and_others_pass():
    engine, _, peers, record = scene()
    peers._delay = lambda: 3
    engine.submit(request("waits", STORY, max_tokens=3), 0.0)
    record.fold(engine.step(0.0))
    assert record.of(Skipped) == [Skipped("waits", SkipReason.ASKING_PEERS)]
    peers._delay = lambda: 0
    engine.submit(request("passes", OTHER, max_tokens=3), 0.0)
    for now in range(5):
        record.fold(engine.step(float(now)))
    assert [event.request_id for event in record.of(Finished)] == ["passes"]
    peers.answer_all()
    drain(engine, record)
    assert record.tokens["waits"] == expected_tokens(STORY, 0, 3, frozenset())


def test_a_waiting_request_is_looked_up_again_only_when_something_has_come(monkeypatch):
    engine, runner, peers, record = scene()
    peers._delay, runner.disk_steps = (lambda: 3), 40
    lookups, match = [], engine.scheduler.pool.match
    monkeypatch.setattr(engine.scheduler.pool, "match", lambda *a, **k: lookups.append(1) or match(*a, **k))

    def steps(count: int, apart: float) -> int:
        lookups.clear()
        nonlocal now
        for _ in range(count):
            now += apart
            record.fold(engine.step(now))
            engine.check_consistency()
        return len(lookups)

    now = 0.0
    engine.submit(request("a", STORY, max_tokens=3), now)
    assert steps(10, 0.001) == 1, "peers are asked"
    peers.answer_all()
    assert steps(1, 0.001) == 2, "the answer names what to fetch"
    assert steps(20, 0.001) == 0, "copies are under way"
    assert steps(1, LOOK_UP_SECONDS) == 1
    assert steps(30, 0.001) == 1, "the last copy has come"
    assert [event.reason for event in record.of(Skipped)] == [
        SkipReason.ASKING_PEERS,
        SkipReason.RESTORING,
    ]
    drain(engine, record, now)
    assert record.tokens["a"] == expected_tokens(STORY, 0, 3, frozenset())


@pytest.mark.parametrize("ends", [FinishReason.CANCELLED, None])
def test_a_request_that_waits_until_more_copies_may_begin(ends, monkeypatch):
    monkeypatch.setattr("headrace.core.memory.tiers.MAX_TRANSFERS", 3)
    monkeypatch.setattr("headrace.core.memory.tiers.MIN_STARTED", 1)
    engine, runner, peers, record = scene()
    peers.hold(OTHER, 4)
    runner.disk_steps = 3
    for name, tokens in (("first", STORY), ("second", OTHER)):
        engine.submit(request(name, tokens, max_tokens=3), 0.0)
    record.fold(engine.step(0.0))
    if ends is not None:
        engine.cancel("first", ends, 0.0)
    drain(engine, record)
    engine.check_consistency()
    assert record.tokens["second"] == expected_tokens(OTHER, 0, 3, frozenset())
    assert {event.request_id: event.cached_tokens for event in record.of(Admitted)}["second"] == 16


def test_a_request_may_be_cancelled_while_peers_are_asked():
    engine, _, peers, record = scene()
    peers._delay = lambda: 3
    engine.submit(request("gone", STORY, max_tokens=3), 0.0)
    record.fold(engine.step(0.0))
    engine.cancel("gone", FinishReason.CANCELLED, 0.0)
    record.fold(engine.step(0.0))
    peers.answer_all()
    drain(engine, record)
    engine.check_consistency()
    assert [event.reason for event in record.of(Finished)] == [FinishReason.CANCELLED]


def test_what_does_not_come_is_computed_and_not_asked_for_again():
    engine, runner, peers, record = scene()
    runner.breaks = lambda move: move.source_tier is Tier.PEER and move.source != 0
    assert ask(engine, record, "a", STORY) == 4
    assert [(event.blocks, event.failed) for event in record.of(Pulled)] == [(1, 3)]
    assert len(peers.asked) == 1
    assert len(engine.scheduler.pool.lower._peers.tier) == 1, "what is lost is forgotten"


def test_a_restarted_server_that_lost_its_cache_pulls_it_again_without_asking():
    engine, _, peers, record = scene()
    ask(engine, record, "a", STORY)
    engine.scheduler.pool.reset(lower=False)
    engine.scheduler.pool.lower.host.reset()
    assert ask(engine, record, "b", STORY) == 16
    assert len(peers.asked) == 1


def test_more_answers_than_the_tier_has_room_for():
    engine, _, peers, record = scene(num_blocks=64, max_model_len=128, host_blocks=40)
    long = tuple(range(500, 500 + 4 * PEER_BLOCKS + 9))
    peers.hold(long, 4)
    assert ask(engine, record, "a", long) == 4 * PEER_BLOCKS


def test_a_named_peer_is_the_only_one_that_is_asked():
    engine, _, peers, record = scene()
    ask(engine, record, "a", STORY, peer="10.0.0.1:14579")
    assert [inquiry.peer for inquiry in peers.asked] == ["10.0.0.1:14579"]


def follow(engine: Engine, peers: HashingPeers, record: Record, grow, steps: int = 40, **fields) -> None:
    """A request follows its peer, which computes a block of `STORY` every ``grow`` steps."""
    engine.submit(request("a", STORY, max_tokens=3, peer="there", follows=True, **fields), 0.0)
    for step in range(steps):
        if step % grow == 0:
            peers.hold(STORY[: 4 * (step // grow)], 4)
        record.fold(engine.step(step * ASK_SECONDS))
        engine.check_consistency()


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("disk_steps", [0, 3])
def test_blocks_are_pulled_while_the_peer_computes(overlap, disk_steps):
    engine, runner, peers, record = scene(overlap=overlap, held=())
    runner.disk_steps = disk_steps
    follow(engine, peers, record, grow=5)
    drain(engine, record, 40 * ASK_SECONDS)
    assert record.tokens["a"] == expected_tokens(STORY, 0, 3, frozenset())
    assert runner.computed_tokens == len(STORY) - 16 + 2
    fetched = [event for event in record.of(Moved) if event.reason is MoveReason.FETCHED]
    assert [event.blocks for event in fetched] == [1, 1, 1, 1]
    assert sum(event.asked_tokens for event in record.of(PeersAnswered)) == 16, "each token counts once"


def test_a_peer_that_computes_no_further_is_not_waited_for_longer():
    engine, _, peers, record = scene(held=STORY[:8])
    engine.submit(request("a", STORY, max_tokens=3, peer="there", follows=True), 0.0)
    now, steps = 0.0, 0
    while now < RESTORE_SECONDS:
        record.fold(engine.step(now))
        due, steps = engine.wake_at(now), steps + 1
        assert due is not None
        now = max(due, now + 0.0001)
    assert not record.of(Admitted)
    drain(engine, record, now + 0.1)
    assert record.tokens["a"] == expected_tokens(STORY, 0, 3, frozenset())
    assert [event.cached_tokens for event in record.of(Admitted)] == [8]
    assert len(peers.asked) < 100, "it is asked less and less often"
    assert steps < 200, "and the engine sleeps until then"


def test_a_lost_peer_is_not_followed():
    engine, _, peers, record = scene(held=STORY[:8])
    engine.submit(request("a", STORY, max_tokens=3, peer="there", follows=True), 0.0)
    for step in range(20):
        peers.lost = step >= 10
        record.fold(engine.step(step * ASK_SECONDS))
    assert [event.cached_tokens for event in record.of(Admitted)] == [8], "what had come before"
    drain(engine, record, 1.0)
    assert record.tokens["a"] == expected_tokens(STORY, 0, 3, frozenset())


def test_other_requests_do_not_lose_the_blocks_that_a_follower_has_pulled():
    """A host of few blocks: those that have come are pinned while the peer is asked for more."""
    engine, _, peers, record = scene(held=STORY[:8], host_blocks=4)
    peers.hold(OTHER, 4)
    engine.submit(request("a", STORY, max_tokens=3, peer="there", follows=True), 0.0)
    for step in range(20):
        record.fold(engine.step(step * ASK_SECONDS))
    engine.submit(request("b", OTHER, max_tokens=3), 20 * ASK_SECONDS)
    for step in range(20, 60):
        record.fold(engine.step(step * ASK_SECONDS))
    peers.hold(STORY, 4)
    drain(engine, record, 60 * ASK_SECONDS)
    engine.check_consistency()
    assert {event.request_id: event.cached_tokens for event in record.of(Admitted)}["a"] == 16
    for name, tokens in (("a", STORY), ("b", OTHER)):
        assert record.tokens[name] == expected_tokens(tokens, 0, 3, frozenset())
