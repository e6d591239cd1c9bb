"""The exporter: serves blocks to peers, on a thread for each connection."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from headrace.fleet.kv_transfer import wire
from headrace.fleet.kv_transfer.shared_memory import Area, KVTransfer

# The blocks that peers can read: the full blocks in the prefix cache of the device, by key.
#
# The engine's thread adds and removes entries; the exporter's threads read them. A block is removed before a step that
# may overwrite it is launched. So if a block has the same entry before and after a copy, the copy is valid.


class _Entry(NamedTuple):
    block: int


class Published:
    """A `core.memory.content.ContentListener`; ``copy(block, target)`` copies the bytes of a block of the device."""

    def __init__(self, copy: Callable[[int, memoryview], None]) -> None:
        self._copy = copy
        self._entries: dict[bytes, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def stored(self, parent: bytes | None, key: bytes, tokens: Sequence[int], block: int) -> None:
        self._entries[key] = _Entry(block)

    def removed(self, key: bytes) -> None:
        self._entries.pop(key, None)

    def cleared(self) -> None:
        self._entries.clear()

    def leading(self, keys: Sequence[bytes]) -> int:
        """The number of leading keys that can be read now."""
        return next((i for i, key in enumerate(keys) if key not in self._entries), len(keys))

    def read(self, key: bytes, target: memoryview) -> bool:
        """Copy the block of a key; returns whether the copy is valid."""
        entry = self._entries.get(key)
        if entry is None:
            return False
        self._copy(entry.block, target)
        return self._entries.get(key) is entry  # see docs/decisions/fleet.md#blocks-of-peers


logger = logging.getLogger(__name__)

HANDSHAKE_SECONDS = 5.0
"""Timeout for a client's proof of the secret."""

CLOSE_SECONDS = 2.0
"""Timeout for closing a connection."""

MOST_CONNECTIONS = 256

KEY_BYTES = 32

FIND, READ = "find", "read"
"""Purposes of a connection: looking up leading keys, or reading their blocks."""


class Exporter:
    """Listens at ``host`` and ``port`` (0: any that is free) until `close`.

    Each connection that reads blocks has an area of ``slots`` slots of ``slot_bytes``.

    Raises:
        OSError: the address cannot be used.
    """

    def __init__(
        self,
        transfer: KVTransfer,
        published: Published,
        identity: Mapping[str, Any],
        secret: bytes,
        *,
        host: str,
        port: int,
        slots: int,
        slot_bytes: int,
    ) -> None:
        self._transfer = transfer
        self._published = published
        self._identity = identity
        self._secret = secret
        self._slots = slots
        self._slot_bytes = slot_bytes
        self._open: dict[socket.socket, threading.Thread] = {}
        self._lock = threading.Lock()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listening = socket.create_server((host, port), family=family)
        self.port: int = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, name="headrace-kv-exporter", daemon=True).start()

    def close(self) -> None:
        """Close all connections; no block is read afterwards."""
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        with self._lock:
            for link in self._open:
                with suppress(OSError):
                    link.shutdown(socket.SHUT_RDWR)
            threads = list(self._open.values())
        for thread in threads:
            thread.join(CLOSE_SECONDS)

    def _accept(self) -> None:
        while True:
            try:
                link, _ = self._listening.accept()
            except OSError:
                return
            with self._lock:
                if len(self._open) >= MOST_CONNECTIONS:
                    link.close()
                    continue
                thread = threading.Thread(
                    target=self._serve, args=(link,), name="headrace-kv-peer", daemon=True
                )
                self._open[link] = thread
                thread.start()

    def _serve(self, link: socket.socket) -> None:
        area = None
        try:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            link.settimeout(HANDSHAKE_SECONDS)
            said = wire.accept(link, self._secret, self._identity)
            if said.get("purpose") == READ:
                area = self._transfer.register(self._slots, self._slot_bytes)
            facts = {"slots": self._slots, "area": area.describe() if area else None}
            wire.welcome(link, self._secret, said["nonces"], self._identity, facts)
            link.settimeout(None)
            while True:
                self._answer(link, area)
        except wire.PeerRefused as refused:
            logger.warning("a client of the KV transfer was rejected: %s", refused)
        except OSError as error:
            logger.debug("a connection of the KV transfer ended: %s", error)
        finally:
            if area is not None:
                area.close()
            with self._lock:
                del self._open[link]
            link.close()

    def _answer(self, link: socket.socket, area: Area | None) -> None:
        _, body = wire.receive(link)
        keys = [body[at : at + KEY_BYTES] for at in range(0, len(body), KEY_BYTES)]
        if area is None:
            wire.send(link, {"held": self._published.leading(keys)})
            return
        if len(keys) > area.slots:
            raise ConnectionError(f"{len(keys)} blocks were requested, but the area has {area.slots} slots")
        there = bytes(self._published.read(key, area.slot(i)) for i, key in enumerate(keys))
        wire.send(link, {}, there)
