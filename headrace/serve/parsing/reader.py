"""The ground of all readers of calls: text in by pieces, parts out, and what was not used back to the machine."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection

from headrace.serve.parsing.parts import Kind, Part, Progress

_SPACE = re.compile(r"\s*")


class Reader(ABC):
    """Reads what follows an opening.

    ``_text[:_at]`` has been reported, or has no meaning of its own. What follows is either unread, or read and not
    reported yet: where the reader ends or fails, it is text again.
    """

    def __init__(self, known: Collection[str] | None = None) -> None:
        self.progress = Progress.OPEN
        self.calls = self.closed = 0  # calls that have begun, and those whose arguments are whole
        self._known = known
        self._text = ""
        self._at = 0
        self._parts: list[Part] = []

    @property
    def rest(self) -> str:
        """What the reader took and did not use."""
        return self._text[self._at :]

    def push(self, text: str, final: bool = False) -> list[Part]:
        """Take more of the answer, of which nothing follows if ``final``; what it adds."""
        self._text = self._text[self._at :] + text
        self._at = 0
        self._parts = []
        while self.progress is Progress.OPEN and self._step(final):
            pass
        if final and self.progress is Progress.OPEN:
            self.progress = Progress.DONE if self.calls else Progress.FAILED
        return self._parts

    @abstractmethod
    def _step(self, final: bool) -> bool:
        """Go on by one step; False if there is nothing to do before more text comes."""

    def _begin_call(self, name: str) -> None:
        self.calls += 1
        self._parts.append(Part(Kind.NAME, name))

    def _arguments(self, text: str) -> None:
        if text:
            self._parts.append(Part(Kind.ARGUMENTS, text))

    def _end(self) -> bool:
        """Nothing more here is a call."""
        self.progress = Progress.DONE if self.calls else Progress.FAILED
        return False

    def _next(self, at: int | None = None) -> int:
        """Where the first character that is not white space stands, from ``at`` on."""
        found = _SPACE.match(self._text, self._at if at is None else at)
        assert found is not None
        return found.end()


class Either(Reader):
    """Leaves the reading to ``objects`` where a bracket comes first, else to ``named``."""

    def __init__(self, objects: Reader, named: Reader) -> None:
        super().__init__()
        self._objects, self._named = objects, named
        self._chosen: Reader | None = None

    @property
    def rest(self) -> str:
        return super().rest if self._chosen is None else self._chosen.rest

    def _step(self, final: bool) -> bool:
        if self._chosen is None:
            at = self._next()
            if at >= len(self._text):
                return False
            self._chosen = self._objects if self._text[at] in "[{" else self._named
        self._parts += self._chosen.push(self._text[self._at :], final)
        self.closed = self._chosen.closed
        self._at, self.progress = len(self._text), self._chosen.progress
        return False
