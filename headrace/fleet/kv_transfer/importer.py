"""The importer: looks up and pulls blocks from peers, on two threads for each peer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

from headrace.core.peers import NO_OFFER, Inquiry, Offer
from headrace.fleet.kv_transfer.link import Link, PeerLost


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

    def __init__(
        self, links: Sequence[Link], timeout: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._links: Mapping[str, Link] = {link.name: link for link in links}
        self._timeout = timeout
        self._clock = clock
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
        now = self._clock()
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
        there, began = [False] * len(pages), self._clock()
        try:
            ready()
            there = link.read([page.key for page in pages], [page.target for page in pages])
        finally:
            each = (self._clock() - began) / len(pages)
            for page, ok in zip(pages, there, strict=True):
                ended(page.number, ok, each)

    def _find(self, link: Link, question: _Question) -> None:
        held, lost = 0, False
        try:
            if self._clock() < question.deadline:
                held = link.find(question.inquiry.keys)
        except PeerLost:
            lost = True
        finally:
            question.answered(link.name, held, self._clock(), lost=lost)

    def _greet(self, link: Link) -> None:
        """Open the connections ahead of the first request."""
        with suppress(PeerLost):
            link.find(())
            self._readers[link.name].submit(link.prepare)
