"""The client of one peer: its connections, and a pause after failures."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from headrace.fleet.kv_transfer import wire
from headrace.fleet.kv_transfer.exporter import FIND, HANDSHAKE_SECONDS, READ
from headrace.fleet.kv_transfer.port import CannotAttach, KVTransfer, View

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
