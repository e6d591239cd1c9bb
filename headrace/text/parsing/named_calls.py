"""Reads a call whose name comes before its arguments, which are JSON or a `Literal`."""

from __future__ import annotations

import re
from collections.abc import Collection

from headrace.text.parsing.literals import Literal
from headrace.text.parsing.parts import Progress
from headrace.text.parsing.reader import Reader
from headrace.text.parsing.scan import Balance

MAX_HEADER = 512
"""Maximum characters between an opening and the arguments."""


class NamedCall(Reader):
    """One call: a header with the name, then an object.

    Args:
        header: matches up to the object's bracket, which must follow.
        quotes: marks around strings of a literal; empty if the arguments are JSON.
        known: the only functions whose calls are read; None: all.
    """

    def __init__(
        self, header: re.Pattern[str], quotes: tuple[str, ...] = (), known: Collection[str] | None = None
    ) -> None:
        super().__init__(known)
        self._header = header
        self._balance = Balance()
        self._literal = Literal("}", quotes) if quotes else None

    def _step(self, final: bool) -> bool:
        if not self.calls:
            return self._open()
        return self._stream() if self._literal is None else self._rewrite(self._literal, final)

    def _open(self) -> bool:
        window = self._text[:MAX_HEADER]
        found = self._header.match(window)
        if found is None:
            return self._end() if len(window) == MAX_HEADER else False
        if self._known is not None and found["name"] not in self._known:
            return self._end()
        self._begin_call(found["name"])
        self._at = found.end()
        if self._literal is not None:
            self._at += 1
            self._arguments("{")
        return True

    def _stream(self) -> bool:
        end = self._balance.read(self._text, self._at)
        self._arguments(self._text[self._at : end])
        if end is None:
            self._at = len(self._text)
            return False
        self._at = end
        self.closed = 1
        return self._end()

    def _rewrite(self, literal: Literal, final: bool) -> bool:
        text, self._at = literal.read(self._text, self._at, final)
        self._arguments(text)
        self.closed = int(literal.progress is Progress.DONE)
        return False if literal.progress is Progress.OPEN else self._end()
