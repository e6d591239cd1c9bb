from __future__ import annotations

from collections.abc import Sequence
from itertools import count, pairwise

import pytest

from headrace.core.block_keys import root_key
from headrace.core.events import Moved, MoveReason, RestoreDeclined, TransferFailed
from headrace.core.memory.lower_tier import Held, Saved
from headrace.core.memory.restore import AlwaysRestore
from headrace.core.memory.tiers import MAX_TRANSFERS, WRITE_SHARE
from headrace.core.plan import Move, Tier
from tests.core.memory.tiered import DEVICE, DISK, HOST, ROOT, SIZE, Scene

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
