"""The base class of all readers of calls: takes text in pieces, returns parts, and gives unused text back."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Collection
from enum import Enum, auto
from typing import NamedTuple

# The parts that the parser returns, and the progress of a reader of calls.


class Kind(Enum):
    """The kind of a part of an output."""

    CONTENT = auto()
    REASONING = auto()
    NAME = auto()  # begins a call
    ARGUMENTS = auto()  # a piece of the JSON text of the latest call's arguments


class Part(NamedTuple):
    """A part of an output. ``text`` is never empty."""

    kind: Kind
    text: str


class Progress(Enum):
    """Whether a reader of calls continues."""

    OPEN = auto()
    DONE = auto()  # the calls have ended
    FAILED = auto()  # the text that was not reported is no call


# Finds the end of a JSON value and the beginning of a call's object, without parsing the value.
#
# A value may arrive in pieces and may be invalid, so only strings and brackets are examined, in linear time.

MAX_HEAD = 1024
"""A call is reported while it grows only if its arguments begin within this number of characters of its object."""

_OUTSIDE = re.compile(r'["{}\[\]<`]')
_INSIDE = re.compile(r'["\\]')


class Balance:
    """Reads a JSON object or array until the bracket that closes it.

    An invalid value ends before a ``<`` or a backtick outside its strings: markers begin with these, and valid JSON has
    none there.

    Args:
        depth: brackets that are open already.
    """

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_string = False
        self._escaped = False

    def read(self, text: str, start: int = 0) -> int | None:
        """Continue to read ``text`` from ``start``; return the index where the value ends, None if it continues.

        The text before ``start`` must have been read by earlier calls.
        """
        at, end = start, len(text)
        while at < end:
            if self._escaped:
                self._escaped = False
                at += 1
            elif (found := (_INSIDE if self._in_string else _OUTSIDE).search(text, at)) is None:
                break
            else:
                at = found.end()
                match found[0]:
                    case '"':
                        self._in_string = not self._in_string
                    case "\\":
                        self._escaped = True
                    case "{" | "[":
                        self._depth += 1
                    case "<" | "`":
                        return found.start()
                    case _:
                        self._depth -= 1
                        if self._depth <= 0:
                            return at
        return None


class Head(NamedTuple):
    """The beginning of a call's object: the function's name, and the index of its arguments' bracket."""

    name: str
    arguments: int


_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*"')
_OPEN_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*\\?\Z')
ARGUMENT_KEYS = ("arguments", "parameters")


def read_head(text: str, start: int, known: Collection[str] | None, key: str) -> Head | bool:
    """The head of the call whose object begins at ``start``; its name is the value of ``key``.

    True: more text is needed. False: there is none, because the arguments come before the name, are no object, are
    missing, or belong to a function that is not ``known``.
    """
    window = text[start : start + MAX_HEAD]
    head = _read_head(window, known, key)
    if isinstance(head, Head):
        return Head(head.name, start + head.arguments)
    return head and len(window) < MAX_HEAD


def _read_head(text: str, known: Collection[str] | None, name_key: str) -> Head | bool:
    at, name = _after_space(text, 1), ""
    while at < len(text):
        key = _STRING.match(text, at)
        if key is None:
            return _OPEN_STRING.match(text, at) is not None
        at = _after_space(text, key.end())
        if text[at : at + 1] not in ("", ":"):
            return False
        at = _after_space(text, at + 1)
        if key[0][1:-1] in ARGUMENT_KEYS:
            if not name or text[at : at + 1] not in ("", "{"):
                return False
            return Head(name, at) if at < len(text) else True
        if at >= len(text):
            break
        value = _STRING.match(text, at)
        if value is None:
            return _OPEN_STRING.match(text, at) is not None
        if key[0][1:-1] == name_key:
            name = _text(value[0])
            if not name or (known is not None and name not in known):
                return False
        at = _after_space(text, value.end())
        if text[at : at + 1] not in ("", ","):
            return False
        at = _after_space(text, at + 1)
    return True


def _after_space(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _text(quoted: str) -> str:
    try:
        text: str = json.loads(quoted)
        text.encode()
    except ValueError:  # a wrong escape, or half a character
        return ""
    return text


def held_from(text: str, markers: Collection[str]) -> int:
    """The start of the longest suffix of ``text`` that is the beginning of one of ``markers``."""
    first = len(text)
    for marker in markers:
        at = text.find(marker[0], max(0, len(text) - len(marker) + 1))
        while 0 <= at < first and not marker.startswith(text[at:]):
            at = text.find(marker[0], at + 1)
        if 0 <= at < first:
            first = at
    return first


_SPACE = re.compile(r"\s*")

MAX_HEADER = 512
"""Maximum characters between an opening and the arguments."""


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

    def _called(self, header: re.Pattern[str]) -> re.Match[str] | None:
        """The header with which the text begins, with the call's ``name``; None if it is not there (yet)."""
        window = self._text[:MAX_HEADER]
        found = header.match(window)
        if found is None:
            if len(window) == MAX_HEADER:
                self._end()
            return None
        if self._known is not None and found["name"] not in self._known:
            self._end()
            return None
        return found

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
