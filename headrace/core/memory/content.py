"""The port through which others hear what the prefix cache of the device holds, such as routers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class ContentListener(Protocol):
    """Hears of every full block that is added to the prefix cache of the device, and of every one that it loses.

    It is called on the engine's thread within a step, so every method must return at once.
    """

    def stored(self, parent: bytes | None, key: bytes, tokens: Sequence[int]) -> None:
        """A block was added: its key and tokens, and the key of the block before it; None if a sequence begins here."""
        ...

    def removed(self, key: bytes) -> None:
        """A block lost its content."""
        ...

    def cleared(self) -> None:
        """All blocks lost their content."""
        ...
