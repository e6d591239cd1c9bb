from __future__ import annotations

from headrace.observe.kv_events.changes import Changes, Cleared, Removed, Stored

A, B = b"a" * 32, b"b" * 32


def test_changes_are_taken_once_and_in_order() -> None:
    changes = Changes(10)
    changes.stored(None, A, [1, 2], 0)
    changes.removed(A)
    assert changes.take() == [Stored(None, A, (1, 2)), Removed(A)]
    assert changes.take() == []


def test_events_before_a_reset_are_not_published() -> None:
    changes = Changes(10)
    changes.stored(None, A, [1], 0)
    changes.cleared()
    changes.stored(None, B, [2], 0)
    assert changes.take() == [Cleared(), Stored(None, B, (2,))]


def test_beyond_the_limit_lost_changes_become_a_cleared_event() -> None:
    changes = Changes(3)
    for number in range(4):
        changes.stored(None, bytes([number]), [number], 0)
    assert changes.take() == [Cleared(), Stored(None, b"\x03", (3,))]
    assert changes.lost == 3
