"""Reads Python calls with keyword arguments: ``[f(a=1), g()]``, or one per line."""

from __future__ import annotations

import re
from collections.abc import Collection

from headrace.text.parsing.literals import Literal
from headrace.text.parsing.parts import Progress
from headrace.text.parsing.reader import Reader

QUOTES = ('"""', "'''", '"', "'")
MAX_NAME = 160

_NAME = re.compile(r"([\w-][\w.-]*)\s*(\()?")
_NO_NAME = re.compile(r"(?:[\w-][\w.-]*)?\s*\Z")


class PythonCalls(Reader):
    """Reports a call once its first argument's name, or its end, has been read.

    Args:
        known: the only functions whose calls are read; None: all.
        listed: whether the calls must be in a list.
    """

    def __init__(self, known: Collection[str] | None = None, listed: bool = False) -> None:
        super().__init__(known)
        self._listed = listed
        self._in_list = False
        self._name = ""
        self._begun = False
        self._literal = Literal(")", QUOTES)
        self._read = 0  # characters after `_at` that the literal has read
        self._held = ""

    def _step(self, final: bool) -> bool:
        if self._name:
            return self._rewrite(final)
        at = self._next()
        if at >= len(self._text):
            return False
        if not self.calls:
            self._in_list = self._text[at] == "["
            if self._listed and not self._in_list:
                return self._end()
            at = self._next(at + 1) if self._in_list else at
        elif self._in_list and self._text[at] == "]":
            self._at = at + 1
            return self._end()
        elif self._text[at] in ",;":
            at = self._next(at + 1)
        return self._open(at) if at < len(self._text) else False

    def _open(self, at: int) -> bool:
        window = self._text[at : at + MAX_NAME]
        found = _NAME.match(window)
        if found is None or not found[2]:
            return False if len(window) < MAX_NAME and _NO_NAME.match(window) else self._end()
        if self._known is not None and found[1] not in self._known:
            return self._end()
        self._name, self._begun = found[1], False
        self._literal, self._held = Literal(")", QUOTES), "{"
        self._read = at + found.end() - self._at
        return True

    def _rewrite(self, final: bool) -> bool:
        literal = self._literal
        text, end = literal.read(self._text, self._at + self._read, final)
        self._held += text
        if literal.begun:
            if not self._begun:
                self._begun = True
                self._begin_call(self._name)
            self._arguments(self._held)
            self._held = ""
            self._at, self._read = end, 0
        else:
            self._read = end - self._at
        if literal.progress is Progress.OPEN:
            return False
        if literal.progress is Progress.FAILED:
            return self._end()
        self._name = ""
        self.closed += 1
        return True
