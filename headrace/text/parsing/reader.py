"""The base class of all readers of calls: takes text in pieces, returns parts, and gives unused text back."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection

from headrace.text.parsing.parts import Kind, Part, Progress

_SPACE = re.compile(r"\s*")


class Reader(ABC):
    """Reads the calls after an opening.

    ``_text[:_at]`` has been reported or is ignored. The rest has not been reported: if the reader ends or fails, it is
    text again.
    """

    def __init__(self, known: Collection[str] | None = None) -> None:
        self.progress = Progress.OPEN
        self.calls = self.closed = 0  # calls that have begun, and those whose arguments are complete
        self._known = known
        self._text = ""
        self._at = 0
        self._parts: list[Part] = []

    @property
    def rest(self) -> str:
        """The text that the reader did not use."""
        return self._text[self._at :]

    def push(self, text: str, final: bool = False) -> list[Part]:
        """Read more of the output (``final``: the last of it); return the new parts."""
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
        """Advance by one step; False if more text is needed first."""

    def _begin_call(self, name: str) -> None:
        self.calls += 1
        self._parts.append(Part(Kind.NAME, name))

    def _arguments(self, text: str) -> None:
        if text:
            self._parts.append(Part(Kind.ARGUMENTS, text))

    def _end(self) -> bool:
        """End: no further call follows."""
        self.progress = Progress.DONE if self.calls else Progress.FAILED
        return False

    def _next(self, at: int | None = None) -> int:
        """The index of the first character from ``at`` on that is not white space."""
        found = _SPACE.match(self._text, self._at if at is None else at)
        assert found is not None
        return found.end()


class Either(Reader):
    """Delegates to ``objects`` if a bracket comes first, otherwise to ``named``."""

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
