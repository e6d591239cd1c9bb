"""The client of one peer: its connections, and a pause after failures."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

from headrace.core.peers import NO_OFFER, Inquiry, Offer
from headrace.fleet.kv_transfer import wire
from headrace.fleet.kv_transfer.exporter import FIND, HANDSHAKE_SECONDS, READ
from headrace.fleet.kv_transfer.shared_memory import CannotAttach, KVTransfer, View

logger = logging.getLogger(__name__)

T = TypeVar("T")

REST_SECONDS = 5.0
"""Time without requests to a peer after it failed."""


class PeerLost(Exception):
    """A peer failed, or is not used because it failed recently."""


class Link:
    """Two connections to the peer at ``host`` and ``port``, opened when needed; one thread may use each.

    ``identity`` must be equal on both servers. ``timeout`` (seconds) applies to every response; opening the connection
    for blocks has a longer one, because it registers memory.
    """

    def __init__(
        self,
        host: str,
        port: int,
        transfer: KVTransfer,
        identity: Mapping[str, Any],
        secret: bytes,
        *,
        block_bytes: int,
        timeout: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = f"{host}:{port}"
        self._address = (host, port)
        self._transfer = transfer
        self._identity = identity
        self._secret = secret
        self._block_bytes = block_bytes
        self._timeout = timeout
        self._clock = clock
        self._rests_until = 0.0
        self._problem = ""  # the last logged problem
        self._sockets: dict[str, socket.socket] = {}
        self._view: View | None = None
        self._slots = 0
        self._closed = False

    @property
    def resting(self) -> bool:
        """Whether it failed recently."""
        return self._clock() < self._rests_until

    def find(self, keys: Sequence[bytes]) -> int:
        """The number of leading keys that the peer holds. Raises PeerLost."""
        return self._guarded(FIND, lambda link: self._find(link, keys))

    def read(self, keys: Sequence[bytes], targets: Sequence[memoryview]) -> list[bool]:
        """Fill each target with the block of its key; returns for each whether it arrived. A failure ends the rest."""
        there: list[bool] = []
        with suppress(PeerLost):
            while len(there) < len(keys):
                at = len(there)
                there += self._guarded(READ, partial(self._read, keys=keys[at:], targets=targets[at:]))
        return there + [False] * (len(keys) - len(there))

    def prepare(self) -> None:
        """Open the connection for blocks before it is needed."""
        with suppress(PeerLost):
            self._guarded(READ, lambda link: None)

    def close(self) -> None:
        """Close the connections; pending requests fail."""
        self._closed = True
        for link in self._sockets.values():
            with suppress(OSError):
                link.shutdown(socket.SHUT_RDWR)

    def _guarded(self, purpose: str, work: Callable[[socket.socket], T]) -> T:
        if self.resting or self._closed:
            raise PeerLost(f"{self.name} is not asked")
        try:
            link = self._sockets.get(purpose) or self._connect(purpose)
            return work(link)
        except (OSError, wire.PeerRefused, CannotAttach, KeyError, TypeError, ValueError) as error:
            self._drop(purpose, str(error) or type(error).__name__)
            raise PeerLost(f"{self.name}: {error}") from error

    def _connect(self, purpose: str) -> socket.socket:
        patience = self._timeout if purpose == FIND else max(self._timeout, HANDSHAKE_SECONDS)
        link = socket.create_connection(self._address, timeout=patience)
        self._sockets[purpose] = link
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        facts = wire.introduce(link, self._secret, self._identity, purpose)
        if purpose == READ:
            self._view = self._transfer.attach(facts["area"], self._block_bytes)
            self._slots = int(facts["slots"])
            link.settimeout(self._timeout)
        if self._problem:
            logger.info("peer %s of the KV transfer is used again", self.name)
            self._problem = ""
        return link

    def _find(self, link: socket.socket, keys: Sequence[bytes]) -> int:
        wire.send(link, {}, b"".join(keys))
        answer, _ = wire.receive(link, 0)
        return max(0, min(int(answer["held"]), len(keys)))

    def _read(self, link: socket.socket, keys: Sequence[bytes], targets: Sequence[memoryview]) -> list[bool]:
        """Read the first blocks, as many as there are slots."""
        some = keys[: self._slots]
        wire.send(link, {}, b"".join(some))
        _, found = wire.receive(link, len(some))
        if len(found) != len(some) or self._view is None:
            raise ConnectionError("a message is damaged")
        slots = [i for i, each in enumerate(found) if each]
        self._view.read(slots, [targets[i] for i in slots])
        return [bool(each) for each in found]

    def _drop(self, purpose: str, problem: str) -> None:
        self._rests_until = self._clock() + REST_SECONDS
        link = self._sockets.pop(purpose, None)
        if link is not None:
            link.close()
        if purpose == READ and self._view is not None:
            self._view.close()
            self._view = None
        if problem != self._problem and not self._closed:
            logger.warning("peer %s of the KV transfer is not used: %s", self.name, problem)
            self._problem = problem


# The importer: looks up and pulls blocks from peers, on two threads for each peer.


class _Place(NamedTuple):
    """Where a block of the tier is."""

    peer: str
    key: bytes


class _Page(NamedTuple):
    """A block to pull: its index in the request, and its target."""

    number: int
    key: bytes
    target: memoryview


class _Question:
    """A pending inquiry until all its peers have answered; the peer with the most blocks is the answer."""

    def __init__(self, inquiry: Inquiry, peers: int, deadline: float, began: float) -> None:
        self.inquiry = inquiry
        self.deadline = deadline
        self._began = began
        self._left = peers
        self._best = NO_OFFER
        self._lock = threading.Lock()

    def answered(self, peer: str, blocks: int, now: float, *, lost: bool) -> None:
        with self._lock:
            if blocks > self._best.blocks or (self.inquiry.peer and not lost):
                self._best = Offer(peer, blocks)
            self._left -= 1
            if not self._left:
                self.inquiry.answer = self._best._replace(seconds=now - self._began)


class Importer:
    """`core.peers.Peers` and `compute.mover.PeerReader` over ``links``.

    An inquiry that cannot be sent within ``timeout`` seconds is dropped.
    """

    def __init__(self, links: Sequence[Link], timeout: float) -> None:
        self._links: Mapping[str, Link] = {link.name: link for link in links}
        self._timeout = timeout
        self._places: dict[int, _Place] = {}
        self._finders = {name: ThreadPoolExecutor(1, f"headrace-kv-find-{name}") for name in self._links}
        self._readers = {name: ThreadPoolExecutor(1, f"headrace-kv-read-{name}") for name in self._links}
        for name, link in self._links.items():
            self._finders[name].submit(self._greet, link)  # reports an incompatible peer at once

    @property
    def peers(self) -> tuple[str, ...]:
        """The names of the peers: their addresses."""
        return tuple(self._links)

    def ask(self, inquiry: Inquiry) -> None:
        now = time.monotonic()
        asked = [
            link
            for name, link in self._links.items()
            if not link.resting and (not inquiry.peer or name == inquiry.peer)
        ]
        if not asked:
            inquiry.answer = NO_OFFER
        question = _Question(inquiry, len(asked), now + self._timeout, now)
        for link in asked:
            self._finders[link.name].submit(self._find, link, question)

    def assign(self, block: int, peer: str, key: bytes) -> None:
        self._places[block] = _Place(peer, key)

    def pull(
        self,
        blocks: Sequence[int],
        targets: Sequence[memoryview],
        ready: Callable[[], None],
        ended: Callable[[int, bool, float], None],
    ) -> None:
        by_peer: dict[str, list[_Page]] = {}
        for i, (block, target) in enumerate(zip(blocks, targets, strict=True)):
            peer, key = self._places[block]
            by_peer.setdefault(peer, []).append(_Page(i, key, target))
        for peer, pages in by_peer.items():
            self._readers[peer].submit(self._read, self._links[peer], pages, ready, ended)

    def close(self) -> None:
        """End the connections and the threads; pending transfers fail."""
        for link in self._links.values():
            link.close()
        for pool in (*self._finders.values(), *self._readers.values()):
            pool.shutdown()

    def _read(
        self,
        link: Link,
        pages: Sequence[_Page],
        ready: Callable[[], None],
        ended: Callable[[int, bool, float], None],
    ) -> None:
        there, began = [False] * len(pages), time.monotonic()
        try:
            ready()
            there = link.read([page.key for page in pages], [page.target for page in pages])
        finally:
            each = (time.monotonic() - began) / len(pages)
            for page, ok in zip(pages, there, strict=True):
                ended(page.number, ok, each)

    def _find(self, link: Link, question: _Question) -> None:
        held, lost = 0, False
        try:
            if time.monotonic() < question.deadline:
                held = link.find(question.inquiry.keys)
        except PeerLost:
            lost = True
        finally:
            question.answered(link.name, held, time.monotonic(), lost=lost)

    def _greet(self, link: Link) -> None:
        """Open the connections ahead of the first request."""
        with suppress(PeerLost):
            link.find(())
            self._readers[link.name].submit(link.prepare)
