"""Changes of the prefix cache, their format, and their publisher over ZeroMQ."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
import zmq


class Stored(NamedTuple):
    """A block was added: its key, its tokens, and the key of the block before it (None: a sequence begins here)."""

    parent: bytes | None
    key: bytes
    tokens: tuple[int, ...]


class Removed(NamedTuple):
    """A block lost its content."""

    key: bytes


class Cleared(NamedTuple):
    """All blocks lost their content, or a reader must assume so."""


Change = Stored | Removed | Cleared


class Changes:
    """A `core.memory.content.ContentListener` that remembers at most ``limit`` changes until `take`.

    Changes beyond the limit are dropped and counted in ``lost``, and the next `take` begins with `Cleared`. A reader
    then misses blocks, but never assumes blocks that the cache does not hold.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._changes: deque[Change] = deque()
        self.lost = 0

    def stored(self, parent: bytes | None, key: bytes, tokens: Sequence[int], block: int) -> None:
        if min(tokens) >= 0:  # readers know blocks by their tokens, which say nothing of an image
            self._add(Stored(parent, key, tuple(tokens)))

    def removed(self, key: bytes) -> None:
        self._add(Removed(key))

    def cleared(self) -> None:
        self._add(Cleared())

    def _add(self, change: Change) -> None:
        if len(self._changes) >= self._limit:
            self.lost += len(self._changes)
            self._changes.clear()
            self._changes.append(Cleared())
        self._changes.append(change)

    def take(self) -> list[Change]:
        """The changes since the last call, in order; for one other thread."""
        taken: list[Change] = []
        for _ in range(len(self._changes)):
            try:
                change = self._changes.popleft()
            except IndexError:  # the other thread has just cleared it
                break
            if isinstance(change, Cleared):
                taken.clear()
            taken.append(change)
        return taken


# Changes of the prefix cache as bytes, in the format of vLLM's KV events.

MEDIUM = "GPU"
"""The medium that vLLM reports for device memory; readers compare it, so it is the same on every device."""

RANK = 0

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
"""The sequence number that ends a replay."""

_encode = msgspec.msgpack.Encoder().encode


def sequence_frame(number: int) -> bytes:
    """A sequence number as a frame."""
    return number.to_bytes(8, "big")


def batch_frame(changes: Sequence[Change], block_size: int, now: float) -> bytes:
    """A batch of changes as a frame; ``now`` is the wall clock in seconds."""
    return _encode([now, list(_events(changes, block_size)), RANK])


def block_hash(key: bytes) -> int:
    """The published hash of a block."""
    return int.from_bytes(key[-8:], "big")


def _events(changes: Iterable[Change], block_size: int) -> Iterable[list[Any]]:
    """The events of changes; consecutive stored blocks share an event, as do consecutive removed blocks."""
    event: list[Any] = []
    last: bytes | None = None  # the key of the block that `event` ends with, if it may grow
    for change in changes:
        if isinstance(change, Stored):
            if last is not None and change.parent == last:
                event[1].append(block_hash(change.key))
                event[3].extend(change.tokens)
            else:
                if event:
                    yield event
                parent = None if change.parent is None else block_hash(change.parent)
                event = [
                    *("BlockStored", [block_hash(change.key)], parent),
                    *(list(change.tokens), block_size, None, MEDIUM),
                ]
            last = change.key
            continue
        last = None
        if isinstance(change, Removed) and event and event[0] == "BlockRemoved":
            event[1].append(block_hash(change.key))
            continue
        if event:
            yield event
        event = (
            ["AllBlocksCleared"]
            if isinstance(change, Cleared)
            else ["BlockRemoved", [block_hash(change.key)], MEDIUM]
        )
    if event:
        yield event


# Publishes changes of the prefix cache over ZeroMQ, in order and numbered, and answers requests for past batches.

logger = logging.getLogger("headrace.kv_events")

BATCH_SECONDS = 0.01
"""Interval between two batches; a shorter one costs the engine more time, and routers do not need it."""

POLL_MILLISECONDS = 200
"""Interval at which the replay thread checks whether it should end."""

LINGER_MILLISECONDS = 500
"""How long `close` waits for messages to be sent."""


class AddressFailed(Exception):
    """A ZeroMQ address cannot be used; the text names it."""


class Publisher:
    """Sends ``changes`` to ``endpoint`` until `close`.

    It binds an endpoint without a host (``*``, ``::``, ``ipc`` or ``inproc``) and connects to others. At most
    ``waiting`` messages are queued per subscriber. The last ``kept`` batches are resent on request at
    ``replay_endpoint``.

    Raises:
        AddressFailed: an address cannot be bound or connected to.
    """

    def __init__(
        self,
        changes: Changes,
        *,
        block_size: int,
        endpoint: str,
        replay_endpoint: str | None = None,
        topic: str = "",
        waiting: int = 100_000,
        kept: int = 10_000,
        host: str = "*",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._changes = changes
        self._block_size = block_size
        self._topic = topic.encode()
        self._clock = clock
        self._number = 0
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=kept)
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._lost = 0
        self._context = zmq.Context()
        self._host = host
        try:
            self._socket = self._open(zmq.PUB, endpoint, waiting)
            self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
            replay = None
            if replay_endpoint is not None:
                replay = self._open(zmq.ROUTER, replay_endpoint, waiting, bind=True)
            self.replay_endpoint = replay and replay.getsockopt_string(zmq.LAST_ENDPOINT)
        except AddressFailed:
            self._context.destroy(linger=0)
            raise
        self._threads = [threading.Thread(target=self._publish, name="headrace-kv-events", daemon=True)]
        if replay is not None:
            self._threads.append(
                threading.Thread(
                    target=self._replay, args=(replay,), name="headrace-kv-events-replay", daemon=True
                )
            )
        for thread in self._threads:
            thread.start()

    def _open(self, kind: int, endpoint: str, waiting: int, *, bind: bool | None = None) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.set_hwm(waiting)
        socket.setsockopt(zmq.LINGER, LINGER_MILLISECONDS)
        if bind is None:
            bind = "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))
        try:
            if bind and ":" in self._host:
                socket.setsockopt(zmq.IPV6, 1)
            (socket.bind if bind else socket.connect)(
                endpoint.replace("*", self._host, 1) if bind else endpoint
            )
        except zmq.ZMQError as error:
            raise AddressFailed(f"{endpoint} cannot be {'bound' if bind else 'used'}: {error}") from error
        return socket

    def close(self) -> None:
        """Send the remaining changes, then close the sockets."""
        self._ended.set()
        for thread in self._threads:
            thread.join()
        self._context.term()

    def _publish(self) -> None:
        while not self._ended.wait(BATCH_SECONDS):
            self._send()
        self._send()
        self._socket.close()

    def _send(self) -> None:
        taken = self._changes.take()
        if self._changes.lost > self._lost:
            logger.warning(
                "%d events of the prefix cache were lost: more than max_queue_size at once; "
                "subscribers receive AllBlocksCleared",
                self._changes.lost - self._lost,
            )
            self._lost = self._changes.lost
        if taken:
            frame = batch_frame(taken, self._block_size, self._clock())
            with self._lock:
                self._kept.append((self._number, frame))
            self._socket.send_multipart((self._topic, sequence_frame(self._number), frame))
            self._number += 1

    def _replay(self, socket: zmq.Socket[bytes]) -> None:
        while not self._ended.is_set():
            if socket.poll(POLL_MILLISECONDS):
                self._answer(socket, socket.recv_multipart())
        socket.close()

    def _answer(self, socket: zmq.Socket[bytes], asked: list[bytes]) -> None:
        """Send all stored batches from the requested number on."""
        if len(asked) != 3 or len(asked[2]) != len(END_OF_REPLAY):
            logger.warning(
                "a replay request of %d frames is ignored: expected the sender, an empty one and a number of 8 bytes",
                len(asked),
            )
            return
        first = int.from_bytes(asked[2], "big")
        with self._lock:
            kept = [each for each in self._kept if each[0] >= first]
        for number, frame in kept:
            socket.send_multipart((asked[0], b"", sequence_frame(number), frame))
        socket.send_multipart((asked[0], b"", END_OF_REPLAY, b""))
