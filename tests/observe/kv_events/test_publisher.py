"""The publisher against real ZeroMQ sockets on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

import msgspec
import pytest
import zmq

from headrace.observe.kv_events.changes import Changes
from headrace.observe.kv_events.publisher import AddressFailed, Publisher
from headrace.observe.kv_events.wire import END_OF_REPLAY

PATIENCE_MILLISECONDS = 60_000
A, B = b"a" * 32, b"b" * 32
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
