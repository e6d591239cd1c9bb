"""Finds stop strings in a growing text, and holds back text that may become one.

It handles only characters; `text.stream` handles tokens and their texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Match(NamedTuple):
    """A stop string was found: the text before it (including it, if requested), and which one it was."""

    text: str
    stop: str


class StopMatcher:
    """Searches a text for stop strings, however the text is split into parts.

    The stop string that is complete first wins; of two that end at the same character, the longer one. So the result
    does not depend on how the model split its text into tokens.

    Args:
        stops: non-empty strings.
        include: keep the stop string in the text.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""

    @property
    def held(self) -> int:
        """Number of characters held back."""
        return len(self._held)

    def push(self, text: str) -> str | Match:
        """The text that may be shown now, or the match that ends it."""
        if not self._stops:
            return text
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            end, start, stop = min(found)
            self._held = ""
            return Match(text[: end if self._include else start], stop)
        cut = self._held_from(text)
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """Return the text held back, when it can no longer become a stop string."""
        text, self._held = self._held, ""
        return text

    def _held_from(self, text: str) -> int:
        """Start of the longest suffix that is the beginning of a stop string."""
        first = len(text)
        for stop in self._stops:
            at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while 0 <= at < first and not stop.startswith(text[at:]):
                at = text.find(stop[0], at + 1)
            if 0 <= at < first:
                first = at
        return first
