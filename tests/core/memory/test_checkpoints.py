from __future__ import annotations

import pytest

from headrace.core.events import CheckpointDropped, DropReason, Event, RecomputeReason
from headrace.core.memory.checkpoints import REMEMBERED, Checkpoints
from headrace.core.memory.eviction import LeastRecentlyUsed

A, B, C, D = b"a", b"b", b"c", b"d"


def filled(*keys: bytes, cells: int = 2) -> Checkpoints:
    checkpoints = Checkpoints(cells, 0, LeastRecentlyUsed(), lambda event: None)
    for chain, key in enumerate(keys, 1):
        make(checkpoints, key, chain)
    return checkpoints


def make(checkpoints: Checkpoints, key: bytes, chain: int = 1) -> int:
    cell = checkpoints.take()
    assert cell is not None
    checkpoints.publish(cell, key, chain, wanted=False)
    return cell


def check(checkpoints: Checkpoints, held: list[int] | None = None) -> None:
    checkpoints.check((A, B, C, D).__contains__, frozenset[bytes]().__contains__, held or [], [])


def test_the_last_checkpoint_of_a_chain_is_found() -> None:
    checkpoints = filled(A, C, cells=3)
    assert [checkpoints.find([A, B, C, D][:count])[0] for count in range(5)] == [0, 1, 1, 3, 3]
    assert checkpoints.find([B]) == (0, -1)
    check(checkpoints)


def test_the_least_recently_used_one_is_evicted_and_its_key_remembered() -> None:
    checkpoints = filled(A, B)
    checkpoints.used(A)
    make(checkpoints, C)
    assert A in checkpoints
    assert B not in checkpoints
    assert checkpoints.why_missing([B, D], 1) is RecomputeReason.EVICTED
    assert checkpoints.why_missing([D], 1) is RecomputeReason.BEYOND
    assert checkpoints.why_missing([D], 0) is RecomputeReason.NO_CHECKPOINT
    check(checkpoints)


def test_evicted_keys_are_remembered_within_a_bound() -> None:
    checkpoints = filled(A, B)
    for number in range(2 * REMEMBERED + 2):
        make(checkpoints, bytes([number]) * 2)
    assert checkpoints.why_missing([A], 0) is RecomputeReason.NO_CHECKPOINT


def test_what_a_lookup_found_is_not_evicted_before_it_is_used() -> None:
    checkpoints = filled(A, B)
    _, cell = checkpoints.find([A])
    assert make(checkpoints, C) != cell
    assert A in checkpoints
    alone = filled(A, cells=1)
    alone.find([A])
    assert alone.take() is None
    alone.used(A)
    assert alone.take() == 0
    check(alone, [0])


def test_a_forgotten_block_frees_its_cell() -> None:
    checkpoints = filled(A, B)
    checkpoints.forget(B)
    checkpoints.forget(D)
    assert len(checkpoints) == 1
    check(checkpoints)
    make(checkpoints, C)
    assert A in checkpoints


def test_a_superseded_checkpoint_stays_if_it_was_used_or_is_wanted() -> None:
    checkpoints = filled(A, B, C, cells=3)
    checkpoints.used(A)
    checkpoints.mark([B], wanted=True)
    for key in (A, B, C, D):
        checkpoints.supersede(key)
    assert (A in checkpoints, B in checkpoints, C in checkpoints) == (True, True, False)


def test_retention_goes_before_age() -> None:
    from headrace.core.memory.eviction import CostAwareEviction

    checkpoints = Checkpoints(2, 0, CostAwareEviction(2), lambda event: None)
    make(checkpoints, A)
    make(checkpoints, B)
    checkpoints.keep(A, 90, None)
    make(checkpoints, C)
    assert A in checkpoints
    checkpoints.retain([A], 0)
    make(checkpoints, D)
    assert A not in checkpoints


def test_announcements_are_counted() -> None:
    checkpoints = filled()
    checkpoints.announce(A)
    checkpoints.announce(A)
    checkpoints.withdraw(A)
    assert checkpoints.is_announced(A)
    assert checkpoints.reach([B, A, C]) == 2
    checkpoints.withdraw(A)
    assert not checkpoints.is_announced(A)
    assert checkpoints.reach([B, A, C]) == 0


def test_a_lost_cell_is_noticed() -> None:
    checkpoints = filled(A)
    checkpoints.take()
    with pytest.raises(AssertionError, match="a cell is lost"):
        check(checkpoints)


def test_each_eviction_takes_the_oldest() -> None:
    checkpoints = filled(A, B, C, cells=3)
    for new in (b"1", b"2", b"3"):
        make(checkpoints, new)
    assert [key in checkpoints for key in (A, B, C, b"1", b"2", b"3")] == [False] * 3 + [True] * 3


def test_the_end_of_a_prompt_is_evicted_before_older_answers() -> None:
    checkpoints = filled(A, B, C, cells=3)
    checkpoints.answered(B, C)
    make(checkpoints, D)
    assert B not in checkpoints
    make(checkpoints, b"e")
    assert A not in checkpoints


@pytest.mark.parametrize("evicted", [False, True])
def test_answers_are_evicted_first_where_turns_continue_at_the_ends_of_prompts(evicted: bool) -> None:
    checkpoints = filled(A, B, cells=2)
    checkpoints.answered(A, B)
    if evicted:
        make(checkpoints, C)
        assert A not in checkpoints
    for _ in range(40):
        checkpoints.learn([A])  # the answer behind it was changed
    make(checkpoints, D)
    make(checkpoints, b"e")
    checkpoints.answered(D, b"e")
    make(checkpoints, b"f")
    assert D in checkpoints
    assert b"e" not in checkpoints


@pytest.mark.parametrize(("chain", "kept"), [(3, C), (100, B)])
def test_the_end_of_a_turn_whose_loss_costs_fewer_tokens_is_evicted_first(chain: int, kept: bytes) -> None:
    """One of ten starts is an equal prompt: 0.1 of the prompt against 0.9 of an answer of five blocks."""
    checkpoints = filled(A, cells=3)
    make(checkpoints, B, chain)
    make(checkpoints, C, chain + 5)
    checkpoints.answered(B, C)
    for number in range(200):
        checkpoints.learn([B] if number % 10 == 0 else [B, C])
    checkpoints.made_again(B)
    checkpoints.made_again(C)
    checkpoints.answered(B, C)
    make(checkpoints, D)
    assert [key for key in (A, B, C) if key in checkpoints] == [A, kept]


def test_a_prompt_that_is_sent_again_keeps_its_end_and_gives_up_its_earlier_answer() -> None:
    checkpoints = filled(A, B, C, cells=3)
    checkpoints.answered(B, C)
    checkpoints.used(B, equal=True)
    make(checkpoints, D)
    assert (A in checkpoints, B in checkpoints, C in checkpoints) == (True, True, False)
    checkpoints.used(B)  # the next turn, from before the answer
    make(checkpoints, b"e")
    assert (A in checkpoints, B in checkpoints) == (True, False)


def test_a_turn_that_continues_the_answer_gives_up_the_end_of_its_prompt_before_ends_worth_less() -> None:
    checkpoints = filled(A, B, C, D, cells=4)
    checkpoints.answered(A, B)  # less worth: A
    checkpoints.answered(C, D)
    checkpoints.used(D)
    make(checkpoints, b"e")
    make(checkpoints, b"f")
    assert [key in checkpoints for key in (A, B, C, D)] == [True, True, False, False]


def test_an_end_that_had_to_be_computed_again_has_been_continued() -> None:
    checkpoints = filled(A, B, cells=2)
    checkpoints.answered(A, B)
    make(checkpoints, C)
    make(checkpoints, D)
    make(
        checkpoints, B
    )  # evicted before; the turn that continues there makes it again, and then its own ends
    make(checkpoints, b"e")
    assert (B in checkpoints, D in checkpoints) == (False, True)


def test_turns_that_continue_their_answers_teach_that_again() -> None:
    checkpoints = filled(A, B, cells=2)
    checkpoints.answered(A, B)
    for _ in range(40):
        checkpoints.learn([A])
    for _ in range(80):
        checkpoints.learn([A, B, D])
    checkpoints.answered(A, B)
    make(checkpoints, C)
    assert B in checkpoints


def test_an_end_that_was_continued_once_is_evicted_first_and_one_continued_twice_is_a_hit() -> None:
    checkpoints = filled(A, B, C, D, cells=4)
    checkpoints.answered(A, B)
    checkpoints.answered(A, D)
    checkpoints.used(D)
    make(checkpoints, b"e")
    make(checkpoints, b"f")
    assert (A in checkpoints, D in checkpoints) == (False, False)
    checkpoints.used(B)
    checkpoints.used(B)
    make(checkpoints, b"g")
    assert B in checkpoints
    assert C not in checkpoints


@pytest.mark.parametrize("evicted", [False, True])
def test_an_answer_is_evicted_first_once_a_turn_has_started_before_it(evicted: bool) -> None:
    checkpoints = filled(A, B, C, cells=3)
    checkpoints.answered(B, C)
    if evicted:
        make(checkpoints, D)
        assert B not in checkpoints
        make(checkpoints, B)  # a turn that continues at the end of the prompt had to compute it again
        assert A not in checkpoints
    else:
        checkpoints.used(B)
    make(checkpoints, b"e")
    make(checkpoints, b"f")
    assert (B in checkpoints, C in checkpoints) == (False, False)


def test_an_answer_that_is_made_again_is_as_new() -> None:
    checkpoints = filled(A, B, C, cells=3)
    checkpoints.answered(B, C)
    checkpoints.used(B)
    checkpoints.made_again(C)
    make(checkpoints, b"e")
    make(checkpoints, b"f")
    assert (A in checkpoints, B in checkpoints, C in checkpoints) == (False, False, True)
    checkpoints.made_again(D)  # no such checkpoint


def test_every_drop_has_an_event_with_its_reason() -> None:
    events: list[Event] = []
    checkpoints = Checkpoints(2, 0, LeastRecentlyUsed(), events.append)
    for key in (A, B, C):
        make(checkpoints, key)
    checkpoints.supersede(B)
    checkpoints.forget(C)
    checkpoints.forget(D)
    assert events == [
        CheckpointDropped(DropReason.EVICTED),
        CheckpointDropped(DropReason.SUPERSEDED),
        CheckpointDropped(DropReason.BLOCK),
    ]
