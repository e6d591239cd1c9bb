"""Inquiries to peers: other servers with the same weights and block layout, which may hold a prefix.

```
 lookup ──keys that are missing──> Peers.ask ──another thread──> Inquiry.answer ──> blocks of the tier PEER
```
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple, Protocol


class Offer(NamedTuple):
    """The answer to an inquiry: ``peer`` holds the first ``blocks`` of its keys. It took ``seconds``.

    ``peer`` is empty if none holds any, unless one was named by the inquiry and has answered.
    """

    peer: str
    blocks: int
    seconds: float = 0.0


NO_OFFER = Offer("", 0)


class Inquiry:
    """An inquiry which of the ``keys`` of a chain peers hold. If ``peer`` is set, only that one is asked.

    ``parent`` is the key before the first one, ``tokens`` are those of all keys. Another thread sets ``answer``, once.
    """

    __slots__ = ("answer", "keys", "parent", "peer", "taken", "tokens")

    def __init__(self, peer: str, parent: bytes, keys: Sequence[bytes], tokens: Sequence[int]) -> None:
        self.peer = peer
        self.parent = parent
        self.keys = tuple(keys)
        self.tokens = tuple(tokens)
        self.answer: Offer | None = None
        self.taken = False


class Peers(Protocol):
    """The connection to other servers. Both methods return at once, and are called on the engine's thread."""

    def ask(self, inquiry: Inquiry) -> None:
        """Start an inquiry. ``answer`` is set within a bounded time, even if peers do not respond."""
        ...

    def assign(self, block: int, peer: str, key: bytes) -> None:
        """From now on, a move from this block of the tier means ``key`` at ``peer``."""
        ...


class AskReason(StrEnum):
    """Why peers were asked."""

    MISSING = "missing"


class PeersAnswered(NamedTuple):
    """Peers were asked for tokens of a request that are missing here; ``peer`` has the first ``held_tokens``."""

    request_id: str
    peer: str
    asked_tokens: int
    held_tokens: int
    seconds: float


class Pulled(NamedTuple):
    """Copies of blocks from peers have ended, ``failed`` of them without content. They took ``seconds`` in all."""

    blocks: int
    failed: int
    bytes: int
    seconds: float
