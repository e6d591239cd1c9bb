from __future__ import annotations

from itertools import product

import pytest

from headrace.core.events import (
    Admitted,
    Checkpointed,
    Chunked,
    ChunkReason,
    DraftingFailed,
    Evicted,
    Moved,
    MoveReason,
    Preempted,
    Recomputed,
    RecomputeReason,
    RestoreDeclined,
    Skipped,
    SkipReason,
    TransferFailed,
    Verified,
)
from headrace.core.peers import PeersAnswered, Pulled
from headrace.core.request import FinishReason
from tests.property.random_runs import Chat, check_drafts_change_nothing, run

CORNERS = 300
"""Lives whose events are counted: so many reach every corner. It is the number of lives if none is given."""

first_and_all = pytest.mark.parametrize(
    "some", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["some", "all"]
)
"""A third of the lives in the fast tests, which then reach most corners, and all in the slow ones."""


def lives(config: pytest.Config, some: bool) -> int:
    count: int = config.getoption("--lives")
    return count // 3 if some and count == CORNERS else count


def test_drafts_change_no_life(pytestconfig):
    count = pytestconfig.getoption("--lives") // 10
    accepted = 0
    for seed in range(count):
        try:
            accepted += check_drafts_change_nothing(seed)
        except Exception as error:
            error.add_note(f"in the life of seed {seed}")
            raise
    assert accepted > count


@first_and_all
def test_every_law_holds_with_recurrent_states(pytestconfig, some):
    checkpoints, recomputed, hits, accepted, restored = 0, set(), 0, 0, 0
    for seed in range(lives(pytestconfig, some) // 2):
        try:
            record = run(seed, states=True)
        except Exception as error:
            error.add_note(f"in the life of seed {seed}")
            raise
        checkpoints += len(record.of(Checkpointed))
        recomputed |= {event.reason for event in record.of(Recomputed)}
        hits += sum(event.cached_tokens > 0 for event in record.of(Admitted))
        accepted += sum(event.accepted for event in record.of(Verified))
        restored += sum(event.reason is MoveReason.RESTORED for event in record.of(Moved))
    assert checkpoints > hits > 10
    assert accepted > hits
    assert some or restored
    assert some or recomputed == set(RecomputeReason)


@pytest.mark.slow
def test_requests_start_from_checkpoints_at_every_residue_of_a_chunk(pytestconfig):
    """Mostly in the first life of a chunk; those with one or two checkpoints lose many before the next turn."""
    sizes = (1, 2, 4, 8) if pytestconfig.getoption("--lives") > CORNERS else (1,)
    for block_size, chunk in product(sizes, range(1, 49)):
        left = None
        for seed in range(100 * chunk, 100 * chunk + 20):
            try:
                record = run(seed, states=True, hits=(block_size, chunk))
            except Exception as error:
                error.add_note(
                    f"in the life of seed {seed}, blocks of {block_size} and chunks of {chunk} tokens"
                )
                raise
            missed = Chat(seed, block_size, chunk).left(record)
            left = missed if left is None else left & missed
            if not left:
                break
        assert not left, f"no request started at {left} of chunks of {chunk} tokens"


def test_every_law_holds_with_groups_of_window_layers(pytestconfig):
    hits = accepted = preempted = cut = 0
    for seed in range(pytestconfig.getoption("--lives") // 4):
        try:
            record = run(seed, windows=True)
        except Exception as error:
            error.add_note(f"in the life of seed {seed}")
            raise
        hits += sum(event.cached_tokens > 0 for event in record.of(Admitted))
        accepted += sum(event.accepted for event in record.of(Verified))
        preempted += len(record.of(Preempted))
        cut += sum(event.reason is ChunkReason.NO_BLOCKS for event in record.of(Chunked))
    assert accepted > hits > preempted > cut > 0


@first_and_all
def test_every_law_holds_with_images(pytestconfig, some):
    """Equal texts with different images, and placeholders without one, over all tiers, with peers and drafts."""
    hits, restored, preempted, pulled = 0, 0, 0, 0
    for seed in range(lives(pytestconfig, some) // 2):
        try:
            record = run(seed, images=True, states=seed % 4 == 0)
        except Exception as error:
            error.add_note(f"in the life of seed {seed}")
            raise
        hits += sum(event.cached_tokens > 0 for event in record.of(Admitted))
        restored += sum(event.reason is MoveReason.RESTORED for event in record.of(Moved))
        preempted += len(record.of(Preempted))
        pulled += len(record.of(Pulled))
    assert min(hits, restored, preempted, pulled) > 10


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(
            10292, id="a prompt is preempted for a row that catches up, and starts again in the same step"
        ),
        pytest.param(11414, id="an answer's checkpoint is evicted, and saved again at the same place"),
        pytest.param(515155, id="a row that catches up is cut, and its newest token has no block yet"),
    ],
)
def test_lives_with_states_that_failed_once(seed: int) -> None:
    run(seed, states=True)


@pytest.mark.timeout(3600)  # a release runs many
@first_and_all
def test_every_law_holds_in_random_lives_and_they_reach_every_corner(pytestconfig, some):
    events = []
    for seed in range(lives(pytestconfig, some)):
        try:
            made = run(seed).events
        except Exception as error:
            error.add_note(f"in the life of seed {seed}")
            raise
        events += made if seed < CORNERS else ()
    reported = {type(event) for event in events}
    assert reported >= {Admitted, Chunked, Evicted, Preempted, RestoreDeclined, Skipped, TransferFailed}
    assert reported >= {DraftingFailed, Verified, PeersAnswered, Pulled}
    assert {bool(event.failed) for event in events if isinstance(event, Pulled)} == {True, False}
    verified = [event for event in events if isinstance(event, Verified)]
    assert {event.drafted - event.accepted for event in verified} >= set(range(4)), "drafts of one kind only"
    if some:
        return
    reasons = {event.reason for event in events if hasattr(event, "reason")}
    assert reasons >= set(FinishReason)
    elsewhere = {SkipReason.KV_LIMIT, SkipReason.ADAPTER_LOADING, SkipReason.NO_ADAPTER_PLACE}
    assert reasons >= set(SkipReason) - elsewhere  # only with bounds or adapters, see their tests
    assert reasons >= set(MoveReason) - {MoveReason.SAVED}
