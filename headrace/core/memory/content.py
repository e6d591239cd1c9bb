"""The port for listeners to changes of the device's prefix cache, such as KV events for routers and KV transfer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol


class ContentListener(Protocol):
    """Notified of every full block that the prefix cache of the device gains or loses.

    It is called on the engine's thread within a step, so every method must return at once.
    """

    def stored(self, parent: bytes | None, key: bytes, tokens: Sequence[int], block: int) -> None:
        """A block was added, and its content can be read: its key, its tokens and its id, and the key of the block
        before it; None if a sequence begins here.
        """
        ...

    def removed(self, key: bytes) -> None:
        """A block lost its content: from now on, a step may write to it."""
        ...

    def cleared(self) -> None:
        """All blocks lost their content."""
        ...


class _Stored(NamedTuple):
    parent: bytes | None
    key: bytes
    tokens: Sequence[int]
    block: int


class ContentNotifier:
    """Notifies the listeners of a pool. Restored blocks are reported when they have arrived."""

    def __init__(self) -> None:
        self.listeners: list[ContentListener] = []
        self._restoring = False
        self._restored_later: dict[int, _Stored] = {}

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """Blocks stored within this context are reported later by `restored`, after the planned moves have run."""
        self._restoring = True
        try:
            yield
        finally:
            self._restoring = False

    def restored(self, blocks: Iterable[int]) -> None:
        """These blocks have been filled by moves."""
        for block in blocks:
            if (news := self._restored_later.pop(block, None)) is not None:
                self._notify(news)

    def stored(self, parent: bytes | None, key: bytes, tokens: Sequence[int], block: int) -> None:
        if not self.listeners:
            return
        news = _Stored(parent, key, tokens, block)
        if self._restoring:
            self._restored_later[block] = news
        else:
            self._notify(news)

    def removed(self, key: bytes, block: int) -> None:
        if self._restored_later.pop(block, None) is None:
            for listener in self.listeners:
                listener.removed(key)

    def cleared(self) -> None:
        self._restored_later.clear()
        for listener in self.listeners:
            listener.cleared()

    def _notify(self, news: _Stored) -> None:
        for listener in self.listeners:
            listener.stored(*news)
