""""""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count, pairwise

import pytest

from headrace.core.block_keys import root_key
from headrace.core.engine import Engine
from headrace.core.events import (
    Admitted,
    Finished,
    Moved,
    MoveReason,
    RestoreDeclined,
    Skipped,
    SkipReason,
    TransferFailed,
)
from headrace.core.memory.block_table import ASK_SECONDS, LOOK_UP_SECONDS, RESTORE_SECONDS
from headrace.core.memory.lower_tier import Held, Saved
from headrace.core.memory.restore import AlwaysRestore
from headrace.core.memory.tiers import MAX_TRANSFERS, WRITE_SHARE
from headrace.core.peers import PeersAnswered, Pulled
from headrace.core.plan import Move, Tier
from headrace.core.request import FinishReason
from headrace.testing.engines import PEER_BLOCKS, Record, drain, hashing_engine
from headrace.testing.hashing_runner import HashingPeers, HashingRunner, expected_tokens
from tests.core.memory.tiered import DEVICE, DISK, HOST, ROOT, SIZE, Scene
from tests.doubles.scenes import request

# -- down to the host and up again ---------------------------------------------------------------------


def test_what_is_evicted_goes_down_and_comes_up_when_it_is_asked_for():
    scene = Scene(device=2, host=4)
    assert scene.run(1, 1, 2, 2) == []
    down = scene.run(3, 3, 4, 4)
    assert [move[2:] for move in down] == [(DEVICE, HOST)] * 2
    hit = scene.match(1, 1, 2, 2)
    assert (hit.blocks, hit.full, hit.tokens(SIZE)) == ((), 2, 4)
    moves = scene.run(1, 1, 2, 2)
    assert [move[2:] for move in moves] == [(DEVICE, HOST)] * 2 + [(HOST, DEVICE)] * 2
    up = moves[2:]
    assert [move.source for move in up] == [move.target for move in reversed(down)]
    assert Moved(HOST, DEVICE, 2, 200, MoveReason.RESTORED, "r") in scene.events


def test_what_still_lies_below_does_not_go_down_again():
    scene = Scene(device=1, host=4)
    for tokens in ((1, 1), (2, 2), (1, 1), (2, 2), (1, 1)):
        scene.run(*tokens)
    assert scene.moved(MoveReason.EVICTED) == 2
    assert scene.moved(MoveReason.RESTORED) == 3


def test_the_head_on_the_device_and_the_tail_below():
    scene = Scene(device=3, host=4)
    scene.run(1, 1, 2, 2, 3, 3)
    scene.run(9, 9)
    hit = scene.match(1, 1, 2, 2, 3, 3)
    assert (len(hit.blocks), len(hit.below)) == (2, 1)
    assert scene.match(1, 1, 2, 2, 3, 3, 4, 4).full == 3


def test_partly_filled_blocks_are_not_kept_below():
    scene = Scene(device=1, host=4)
    (block,) = scene.pool.allocate(1)
    scene.pool.register(block, ROOT, (1,))
    scene.pool.release([block])
    assert scene.run(2, 2) == []


def test_room_is_made_on_the_device_without_losing_what_is_about_to_come_up():
    """The host holds one block only: going down would otherwise push out the very block that is to come up."""
    scene = Scene(device=1, host=1)
    scene.run(1, 1)
    scene.run(2, 2)
    assert [move[2:] for move in scene.run(1, 1)] == [(HOST, DEVICE)]


@pytest.mark.parametrize("other", [root_key("b", ""), root_key("a", "x")])
def test_other_salts_and_adapters_find_nothing_in_any_tier(other):
    scene = Scene(device=1, host=4, disk=4, root=root_key("a", ""))
    for tokens in ((1, 1), (1, 1), (2, 2)):
        scene.land(scene.run(*tokens))
    assert scene.match(1, 1).full == 1
    assert scene.moved(MoveReason.KEPT) == 1
    mine, scene.root = scene.root, other
    assert scene.match(1, 1).full == 0
    scene.root = mine
    assert scene.match(1, 1).full == 1


def test_an_equal_key_with_other_tokens_is_no_hit():
    scene = Scene(device=1, host=4)
    scene.run(1, 1)
    scene.run(2, 2)
    (block,) = scene.lower.host
    block.tokens = (1, 7)
    assert scene.match(1, 1).full == 0


def test_the_host_keeps_what_is_wanted_and_what_was_asked_to_be_kept():
    scene = Scene(device=1, host=2)
    scene.run(1, 1)
    scene.pool.want(scene.keys((2, 2)))
    for i in range(2, 6):
        scene.run(i, i)
    assert scene.match(2, 2).full == 1, "a waiting request asks for it"
    assert scene.match(1, 1).full == 0
    scene.pool.unwant(scene.keys((2, 2)))
    scene.run(6, 6)
    scene.run(7, 7)
    assert scene.match(2, 2).full == 0


def test_a_retention_goes_on_below_and_ends_there():
    scene = Scene(device=1, host=2)
    scene.pool.advance(10.0)
    (block,) = scene.pool.allocate(1)
    scene.pool.register(block, ROOT, (1, 1))
    scene.pool.keep(block, 90, 5.0)
    scene.pool.release([block])
    scene.pool.advance(13.0)
    for i in range(2, 6):
        scene.run(i, i)
    assert scene.match(1, 1).full == 1
    scene.pool.advance(15.0)
    for i in range(6, 9):
        scene.run(i, i)
    assert scene.match(1, 1).full == 0, "five seconds after its last use, not after it went down"


def test_reset_forgets_every_tier():
    scene = Scene(device=1, host=2, disk=2)
    for tokens in ((1, 1), (1, 1), (2, 2), (3, 3)):
        scene.land(scene.run(*tokens))
    scene.pool.reset()
    scene.pool.check()
    assert all(scene.match(i, i).full == 0 for i in (1, 2, 3))


class Nothing:
    def choose(self, start: int, tiers: Sequence[Tier]) -> int:
        return 0

    def pays(self, tier: Tier, blocks: int) -> bool:
        return True

    def observe(self, tier: Tier, seconds: float) -> None:
        pass


class First:
    def choose(self, start: int, tiers: Sequence[Tier]) -> int:
        assert start == 0
        return 1

    def pays(self, tier: Tier, blocks: int) -> bool:
        return True

    def observe(self, tier: Tier, seconds: float) -> None:
        pass


def test_blocks_that_are_faster_to_compute_are_computed_and_reported():
    scene = Scene(device=2, host=4, restore=Nothing())
    scene.run(1, 1, 2, 2)
    scene.run(3, 3, 4, 4)
    assert (scene.match(1, 1, 2, 2).full, scene.match(1, 1, 2, 2).declined) == (0, 2)
    scene.run(1, 1, 2, 2)
    assert RestoreDeclined("r", 4) in scene.events
    assert not scene.moved(MoveReason.RESTORED)


def test_a_part_may_be_fetched_and_the_rest_computed():
    scene = Scene(device=2, host=4, restore=First())
    scene.run(1, 1, 2, 2)
    scene.run(3, 3, 4, 4)
    scene.run(1, 1, 2, 2)
    assert scene.moved(MoveReason.RESTORED) == 1
    assert RestoreDeclined("r", 2) in scene.events


# -- the disk ------------------------------------------------------------------------------------------


def used_twice(**sizes: int) -> tuple[Scene, list[Move]]:
    """A scene in which block (1, 1) was found again and has just gone down, and its moves."""
    scene = Scene(device=1, **sizes)
    scene.run(1, 1)
    scene.run(1, 1)
    return scene, scene.run(2, 2)


def test_what_goes_down_goes_on_to_the_disk():
    _, moves = used_twice(host=4, disk=4)
    assert [move[2:] for move in moves] == [(DEVICE, HOST), (HOST, DISK)]
    assert moves[0].target == moves[1].source


def leave(scene: Scene, *tokens: int, retention: int) -> None:
    """Compute one block with a wish for its retention."""
    (block,) = scene.pool.allocate(1)
    scene.pool.register(block, ROOT, tokens)
    scene.pool.keep(block, retention, None)
    scene.pool.release([block])
    scene.lower.take_moves()


def test_blocks_of_low_retention_are_not_demoted():
    scene = Scene(device=1, host=4, disk=4)
    leave(scene, 1, 1, retention=34)
    assert scene.run(2, 2) == []


def test_a_busy_disk_takes_only_what_was_found_again_or_was_asked_to_be_kept():
    def writing(scene: Scene) -> int:
        return sum(move[2:] == (HOST, DISK) for move in scene.run(*range(1000, 1160)))

    once, again = Scene(device=80, host=80, disk=80), Scene(device=80, host=80, disk=80)
    for scene in (once, again, again):
        scene.run(*range(160))
    assert writing(once) == 80 // WRITE_SHARE
    assert writing(again) == 2 * 80 // WRITE_SHARE
    kept = Scene(device=1, host=80, disk=80)
    for i in range(80):
        leave(kept, i, i, retention=36)
    assert kept.moved(MoveReason.KEPT) == 2 * 80 // WRITE_SHARE


class Costly(AlwaysRestore):
    """Everything is fetched that is there, but from one tier it would not pay."""

    def __init__(self, tier: Tier) -> None:
        self._tier = tier

    def pays(self, tier: Tier, blocks: int) -> bool:
        assert blocks == 2, "a chain is fetched as a whole"
        return tier is not self._tier


@pytest.mark.parametrize(
    ("tier", "ways"), [(HOST, []), (DISK, [(DEVICE, HOST)] * 2), (DEVICE, [(DEVICE, HOST), (HOST, DISK)] * 2)]
)
def test_what_would_not_be_fetched_from_a_tier_does_not_go_there(tier, ways):
    scene = Scene(device=2, host=8, disk=4, restore=Costly(tier))
    scene.run(1, 1, 2, 2)
    assert [move[2:] for move in scene.run(3, 3, 4, 4)] == ways


def test_the_disk_outlives_the_host_and_its_blocks_come_up_by_way_of_it():
    scene, moves = used_twice(host=1, disk=4)
    scene.land(moves)
    scene.land(scene.run(3, 3))
    scene.land(scene.run(4, 4))
    (held,) = scene.match(1, 1).below
    assert held == Held(DISK, moves[1].target, ready=True)
    assert not scene.match(1, 1).is_ready
    assert scene.match(1, 1, may_wait=False).full == 0
    assert scene.lower.fetch([held])
    (fetch,) = scene.lower.take_moves()
    assert fetch[2:] == (DISK, HOST)
    assert scene.match(1, 1).below == (Held(HOST, fetch.target, ready=False),)
    assert scene.match(1, 1, may_wait=False).full == 0, "it is not there yet"
    assert scene.lower.fetch(scene.match(1, 1).below), "it is on its way"
    assert not scene.lower.take_moves(), "and is not asked for twice"
    scene.land([fetch])
    assert scene.match(1, 1).is_ready
    assert [move[2:] for move in scene.run(1, 1)][-1] == (HOST, DEVICE)


def test_until_it_is_written_a_block_stays_in_the_host_and_is_not_on_disk():
    scene, moves = used_twice(host=1, disk=4)
    assert scene.run(3, 3) == [], "the only block of the host is being copied"
    assert scene.match(1, 1).below[0].tier is HOST
    scene.land(moves)
    assert scene.run(4, 4)[0][2:] == (DEVICE, HOST)


def test_what_could_not_be_read_is_a_miss_and_forgotten():
    scene, moves = used_twice(host=1, disk=4)
    scene.land(moves)
    scene.land(scene.run(3, 3))
    scene.land(scene.run(4, 4))
    scene.lower.fetch(scene.match(1, 1).below)
    scene.land(scene.lower.take_moves(), ok=False)
    assert scene.match(1, 1).full == 0
    assert not scene.lower.fetch(scene.match(1, 1).below)
    assert TransferFailed(DISK, HOST) in scene.events
    assert scene.lower._writable


def test_a_disk_that_cannot_be_written_is_not_asked_again_and_costs_nothing_else():
    scene, moves = used_twice(host=4, disk=4)
    scene.land(moves, ok=False)
    assert TransferFailed(HOST, DISK) in scene.events
    assert len(scene.lower.disk) == 0
    scene.run(1, 1), scene.run(3, 3)
    assert scene.moved(MoveReason.KEPT) == 1
    assert scene.match(1, 1).full == 1, "the host still has it"


def test_reset_while_copies_are_under_way_leaves_nothing_behind():
    scene, writing = used_twice(host=2, disk=2)
    scene.pool.reset()
    scene.pool.check()
    scene.land(writing)
    assert scene.match(1, 1).full == 0
    assert len(scene.lower.host._blank) == len(scene.lower.host.blocks) == 1
    assert len(scene.lower.disk._blank) == len(scene.lower.disk.blocks) == 1


def test_no_more_is_under_way_than_is_allowed():
    scene = Scene(device=MAX_TRANSFERS, host=2 * MAX_TRANSFERS, disk=MAX_TRANSFERS)
    for _ in range(2):
        scene.run(*range(2 * MAX_TRANSFERS))
    moves = scene.run(*range(5000, 5000 + 2 * MAX_TRANSFERS))
    assert sum(move[2:] == (HOST, DISK) for move in moves) == 2 * MAX_TRANSFERS // WRITE_SHARE


def test_no_more_is_found_below_than_the_host_could_hold():
    scene = Scene(device=4, host=2, disk=8)
    for _ in range(2):
        scene.land(scene.run(1, 1, 2, 2, 3, 3, 4, 4))
    scene.lower.adopt(
        Saved(i, parent, key, (i + 5, i + 5))
        for i, (parent, key) in enumerate(
            zip([ROOT, *scene.keys((5, 5, 6, 6))], scene.keys((5, 5, 6, 6, 7, 7)), strict=True)
        )
    )
    assert scene.match(5, 5, 6, 6, 7, 7).full == 2


# -- the end and the next start ------------------------------------------------------------------------


def on_disk(*prompts: Sequence[int], host: int) -> Scene:
    """All blocks of the prompts on the disk alone."""
    scene, number = Scene(device=4, host=host, disk=16), count()
    for tokens in prompts:
        chain = pairwise([scene.root, *scene.keys(tokens)])
        contents = zip(tokens[::2], tokens[1::2], strict=True)
        scene.lower.adopt(
            [Saved(next(number), *link, each) for link, each in zip(chain, contents, strict=True)]
        )
    return scene


def ask(scene: Scene, now: float, *prompts: Sequence[int]) -> list[bool]:
    """One step in which each prompt is looked up in its turn: whether it could start."""
    scene.pool.advance(now)
    ready = []
    for tokens in prompts:
        hit = scene.match(*tokens)
        ready.append(hit.full == len(tokens) // SIZE and hit.is_ready)
        scene.lower.fetch(hit.below, claim=scene.lower.claims.make(hit.below, None))
    scene.land(scene.lower.take_moves())
    return ready


def test_what_is_fetched_does_not_push_out_the_beginning_of_its_own_chain():
    chain, kept = (1, 1, 2, 2), (9, 9)
    scene = on_disk(chain, kept, host=2)
    ask(scene, 0.0, chain[:2], kept)
    (block,) = (each for each in scene.lower.host if each.tokens == kept)
    block.retention = 80
    scene.lower.host.touch(block)
    assert any(ask(scene, step, chain)[0] for step in (1, 2, 3))


def test_what_the_first_has_fetched_is_not_pushed_out_by_those_behind_it():
    first, second = (1, 1, 2, 2), (3, 3, 4, 4)
    scene = on_disk(first, second, host=3)
    assert [ask(scene, step, first, second)[0] for step in range(8)] == [False] + [True] * 7


def test_a_claim_that_is_not_renewed_lapses():
    scene = on_disk((1, 1, 2, 2), (3, 3, 4, 4), host=2)
    assert [ask(scene, step, (1, 1, 2, 2))[0] for step in (0, 1)] == [False, True]
    assert [ask(scene, step, (3, 3, 4, 4))[0] for step in (2, 3, 4)] == [False, False, True]


def save(scene: Scene) -> list[Saved]:
    for moves in scene.lower.save(scene.pool.full_blocks()):
        scene.land(moves)
    return scene.lower.saved()


def test_all_that_device_and_host_hold_is_saved_and_found_by_the_next_life():
    scene = Scene(device=2, host=2, disk=8)
    scene.run(1, 1, 2, 2)
    scene.land(scene.run(3, 3, 4, 4), ok=False)
    scene.lower._writable = True  # the disk that failed is well again: nothing is on it yet
    saved = save(scene)
    assert scene.moved(MoveReason.SAVED) == 4
    following = Scene(device=2, host=2, disk=8)
    following.lower.adopt(saved)
    following.pool.check()
    for tokens in ((1, 1, 2, 2), (3, 3, 4, 4)):
        hit = following.match(*tokens)
        assert [held.tier for held in hit.below] == [DISK, DISK]
        assert [saved[i].key for i in range(4) if saved[i].block == hit.below[0].block] == [
            following.keys(tokens)[0]
        ]


def test_what_was_adopted_is_not_written_over_before_the_rest_of_the_disk():
    scene = Scene(device=1, host=4, disk=3)
    scene.lower.adopt([Saved(1, ROOT, scene.keys((5, 5))[0], (5, 5))])
    for i in (1, 2, 3, 4):
        scene.land(scene.run(i, i))
    writes = [e for e in scene.events if isinstance(e, Moved) and e.reason is MoveReason.KEPT]
    assert len(writes) == 3
    assert sorted(scene.lower.disk.blocks) == [0, 1, 2]
    assert scene.match(5, 5).full == 0, "the third one had to go somewhere"


def test_what_is_on_disk_already_is_not_written_again():
    scene, moves = used_twice(host=4, disk=4)
    scene.land(moves)
    save(scene)
    assert scene.moved(MoveReason.SAVED) == 1, "only (2, 2)"


def test_what_device_and_host_both_hold_is_saved_once():
    scene = Scene(device=2, host=2, disk=4)
    scene.lower._writable = False
    scene.run(1, 1), scene.run(2, 2), scene.run(3, 3), scene.run(1, 1)
    assert {block.tokens for block in scene.lower.host} & {b.tokens for b in scene.pool.full_blocks()}
    scene.lower._writable = True
    assert len(save(scene)) == scene.moved(MoveReason.SAVED) == 3


def test_a_small_disk_keeps_what_is_worth_most():
    scene = Scene(device=3, host=2, disk=1)
    scene.run(1, 1), scene.run(2, 2), scene.run(1, 1), scene.run(3, 3)
    (saved,) = save(scene)
    assert saved.tokens == (1, 1), "it was found again"


def test_many_are_saved_a_few_at_a_time():
    count = MAX_TRANSFERS + 20
    scene = Scene(device=count, host=2, disk=count)
    scene.run(*range(2 * count))
    batches = []
    for moves in scene.lower.save(scene.pool.full_blocks()):
        batches.append(len(moves))
        scene.land(moves)
    assert sum(batches) == count
    assert max(batches) <= MAX_TRANSFERS


def test_saving_ends_when_the_disk_fails():
    scene = Scene(device=2 * MAX_TRANSFERS, host=2, disk=2 * MAX_TRANSFERS)
    scene.run(*range(4 * MAX_TRANSFERS))
    for moves in scene.lower.save(scene.pool.full_blocks()):
        scene.land(moves, ok=False)
    assert scene.moved(MoveReason.SAVED) == MAX_TRANSFERS
    assert scene.lower.saved() == []


def test_without_a_disk_nothing_is_saved():
    scene = Scene(device=2, host=2)
    scene.run(1, 1, 2, 2)
    assert save(scene) == []


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


def ask_peers(engine: Engine, record: Record, name: str, tokens: Sequence[int], **fields) -> int:
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
    assert ask_peers(engine, record, "a", STORY) == 16
    assert runner.computed_tokens == len(STORY) - 16 + 2
    assert record.of(PeersAnswered) == [PeersAnswered("a", "peer", 16, 16, 0.0)]
    assert Moved(Tier.PEER, Tier.HOST, 4, 4000, MoveReason.FETCHED, "a") in record.events
    assert sum(event.blocks for event in record.of(Pulled)) == 4
    reasons = [event.reason for event in record.of(Skipped)]
    assert SkipReason.RESTORING in reasons


def test_only_what_is_missing_is_asked_for():
    engine, _, peers, record = scene()
    ask_peers(engine, record, "half", STORY[:9])
    assert len(peers.asked.pop().keys) == 2
    assert ask_peers(engine, record, "whole", (*STORY, 1, 2, 3, 4)) == 16
    assert len(peers.asked.pop().keys) == 3
    assert ask_peers(engine, record, "again", STORY) == 16
    assert not peers.asked, "nothing is missing"


def test_a_request_of_another_salt_gets_nothing_of_it():
    engine, _, peers, record = scene()
    peers.hold(OTHER, 4, "tenant")
    assert ask_peers(engine, record, "a", STORY, salt="tenant") == 0
    assert ask_peers(engine, record, "b", OTHER) == 0
    assert ask_peers(engine, record, "c", OTHER, salt="tenant") == 16


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
    assert ask_peers(engine, record, "a", STORY) == 4
    assert [(event.blocks, event.failed) for event in record.of(Pulled)] == [(1, 3)]
    assert len(peers.asked) == 1
    assert len(engine.scheduler.pool.lower._peers.tier) == 1, "what is lost is forgotten"


def test_a_restarted_server_that_lost_its_cache_pulls_it_again_without_asking():
    engine, _, peers, record = scene()
    ask_peers(engine, record, "a", STORY)
    engine.scheduler.pool.reset(lower=False)
    engine.scheduler.pool.lower.host.reset()
    assert ask_peers(engine, record, "b", STORY) == 16
    assert len(peers.asked) == 1


def test_more_answers_than_the_tier_has_room_for():
    engine, _, peers, record = scene(num_blocks=64, max_model_len=128, host_blocks=40)
    long = tuple(range(500, 500 + 4 * PEER_BLOCKS + 9))
    peers.hold(long, 4)
    assert ask_peers(engine, record, "a", long) == 4 * PEER_BLOCKS


def test_a_named_peer_is_the_only_one_that_is_asked():
    engine, _, peers, record = scene()
    ask_peers(engine, record, "a", STORY, peer="10.0.0.1:14579")
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
