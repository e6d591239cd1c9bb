from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

msgspec = pytest.importorskip("msgspec")
zmq = pytest.importorskip("zmq")

from headrace.core.images import ImageSpan, contents  # noqa: E402
from headrace.observe.kv_events import (  # noqa: E402 (it needs the extra)
    END_OF_REPLAY,
    AddressFailed,
    Changes,
    Cleared,
    Publisher,
    Removed,
    Stored,
    batch_frame,
    block_hash,
)

A, B = b"a" * 32, b"b" * 32


def test_changes_are_taken_once_and_in_order() -> None:
    changes = Changes(10)
    changes.stored(None, A, [1, 2], 0)
    changes.removed(A)
    assert changes.take() == [Stored(None, A, (1, 2)), Removed(A)]
    assert changes.take() == []


def test_blocks_with_images_are_not_published() -> None:
    changes = Changes(10)
    changes.stored(None, A, contents([1, 2], (ImageSpan(1, 1, bytes(32)),)), 0)
    assert not changes.take()


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


class Event(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    pass


class BlockStored(Event):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None


class BlockRemoved(Event):
    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(Event):
    pass


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


FIRST_KEY, SECOND_KEY, C = (bytes([number]) * 32 for number in (1, 2, 255))


def decoded(*changes: Stored | Removed | Cleared) -> list[Event]:
    batch = msgspec.msgpack.decode(batch_frame(changes, 2, 12.5), type=Batch)
    assert (batch.ts, batch.data_parallel_rank) == (12.5, 0)
    return list(batch.events)


def test_blocks_of_one_chain_are_one_event() -> None:
    assert decoded(
        Stored(None, FIRST_KEY, (1, 2)), Stored(FIRST_KEY, SECOND_KEY, (3, 4)), Stored(FIRST_KEY, C, (5, 6))
    ) == [
        BlockStored([block_hash(FIRST_KEY), block_hash(SECOND_KEY)], None, [1, 2, 3, 4], 2, None, "GPU"),
        BlockStored([block_hash(C)], block_hash(FIRST_KEY), [5, 6], 2, None, "GPU"),
    ]


def test_removals_in_a_row_are_one_event_and_the_order_is_kept() -> None:
    assert decoded(
        Removed(FIRST_KEY),
        Removed(SECOND_KEY),
        Stored(None, FIRST_KEY, (1, 2)),
        Removed(C),
        Cleared(),
        Removed(FIRST_KEY),
    ) == [
        BlockRemoved([block_hash(FIRST_KEY), block_hash(SECOND_KEY)], "GPU"),
        BlockStored([block_hash(FIRST_KEY)], None, [1, 2], 2, None, "GPU"),
        BlockRemoved([block_hash(C)], "GPU"),
        AllBlocksCleared(),
        BlockRemoved([block_hash(FIRST_KEY)], "GPU"),
    ]


def test_a_chain_does_not_go_on_behind_another_event() -> None:
    assert (
        len(decoded(Stored(None, FIRST_KEY, (1, 2)), Removed(C), Stored(FIRST_KEY, SECOND_KEY, (3, 4)))) == 3
    )


def test_a_hash_is_an_unsigned_number_of_64_bits() -> None:
    assert block_hash(C) == (1 << 64) - 1


PATIENCE_MILLISECONDS = 60_000

ANY_PORT = "tcp://127.0.0.1:*"


@contextmanager
def published(changes: Changes, **more: object) -> Iterator[Publisher]:
    given = {"endpoint": ANY_PORT, "replay_endpoint": ANY_PORT, "block_size": 2} | more
    with closing(Publisher(changes, **given)) as publisher:
        yield publisher


@contextmanager
def connected(kind: int, address: str | None) -> Iterator[zmq.Socket[bytes]]:
    assert address
    with zmq.Context() as context, context.socket(kind) as socket:
        socket.setsockopt(zmq.RCVTIMEO, PATIENCE_MILLISECONDS)
        socket.setsockopt(zmq.LINGER, 0)
        if kind == zmq.SUB:
            socket.setsockopt(zmq.SUBSCRIBE, b"")
        socket.connect(address)
        yield socket


def replayed(publisher: Publisher, first: int) -> list[tuple[int, list[list[object]]]]:
    """The numbers and events of the batches that a replay sends."""
    with connected(zmq.DEALER, publisher.replay_endpoint) as socket:
        socket.send_multipart((b"", first.to_bytes(8, "big")))
        batches = []
        while True:
            _, number, frame = socket.recv_multipart()
            if number == END_OF_REPLAY:
                assert frame == b""
                return batches
            batches.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(frame)[1]))


def wait_for_batches(publisher: Publisher, count: int) -> None:
    while len(replayed(publisher, 0)) < count:
        pass


def test_a_subscriber_receives_numbered_batches() -> None:
    changes = Changes(100)
    with (
        published(changes, topic="kv@pod@model") as publisher,
        connected(zmq.SUB, publisher.endpoint) as socket,
    ):
        socket.setsockopt(zmq.RCVTIMEO, 20)
        received = []
        while len(received) < 2:  # until the subscription has arrived, nothing is received
            changes.stored(None, A, [1, 2], 0)
            try:
                received.append(socket.recv_multipart())
            except zmq.Again:
                continue
    for topic, _, frame in received:
        assert topic == b"kv@pod@model"
        assert {event[0] for event in msgspec.msgpack.decode(frame)[1]} == {"BlockStored"}
    first, second = (int.from_bytes(number, "big") for _, number, _ in received)
    assert second == first + 1


def test_batches_are_sent_again_from_a_number_on() -> None:
    changes = Changes(100)
    with published(changes) as publisher:
        changes.stored(None, A, [1, 2], 0)
        wait_for_batches(publisher, 1)
        changes.removed(A)
        wait_for_batches(publisher, 2)
        assert [number for number, _ in replayed(publisher, 0)] == [0, 1]
        ((number, events),) = replayed(publisher, 1)
        assert number == 1
        assert events[0][0] == "BlockRemoved"
        assert replayed(publisher, 2) == []


def test_only_the_last_batches_are_kept() -> None:
    changes = Changes(100)
    with published(changes, kept=1) as publisher:
        changes.stored(None, A, [1, 2], 0)
        wait_for_batches(publisher, 1)
        changes.stored(A, B, [3, 4], 0)
        while (number := replayed(publisher, 0)[0][0]) == 0:
            pass
        assert number == 1


def test_a_malformed_request_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    changes = Changes(100)
    with published(changes) as publisher, connected(zmq.DEALER, publisher.replay_endpoint) as socket:
        socket.send_multipart((b"", b"x"))
        socket.send_multipart((b"", bytes(8)))
        assert socket.recv_multipart() == [b"", END_OF_REPLAY, b""]
    assert "a replay request of 3 frames is ignored" in caplog.text


def test_losses_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    changes = Changes(2)
    for number in range(5):
        changes.stored(None, bytes([number]), [number], 0)
    with published(changes) as publisher:
        wait_for_batches(publisher, 1)
    assert "events of the prefix cache were lost" in caplog.text


def test_an_address_in_use_is_named() -> None:
    with published(Changes(10)) as publisher, pytest.raises(AddressFailed, match=r"tcp://127\.0\.0\.1:\d+"):
        Publisher(Changes(10), block_size=2, endpoint=ANY_PORT, replay_endpoint=publisher.replay_endpoint)
