"""Finds where a JSON value ends and what a call's object begins with, without parsing the value.

A value may arrive in pieces and may be broken, so only strings and brackets are looked at: time is linear in the text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from typing import NamedTuple

MAX_HEAD = 1024
"""Characters in which a call's object must have come to its arguments to be reported while it grows."""

_OUTSIDE = re.compile(r'["{}\[\]<`]')
_INSIDE = re.compile(r'["\\]')


class Balance:
    """Reads a JSON object or array until the bracket that closes it.

    A broken value ends before a ``<`` or a backtick outside of its strings: JSON has none there, and markers begin so.

    Args:
        depth: brackets that are open already.
    """

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_string = False
        self._escaped = False

    def read(self, text: str, start: int = 0) -> int | None:
        """Read on in ``text`` from ``start``; where the value ends, None if it goes on.

        Each call continues where the last one ended: the text before ``start`` has been read.
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
    """The beginning of a call's object: the function's name, and where its arguments' bracket stands."""

    name: str
    arguments: int


_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*"')
_OPEN_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*\\?\Z')
NAME_KEYS = ("name",)
ARGUMENT_KEYS = ("arguments", "parameters")


def read_head(text: str, start: int, known: Collection[str] | None = None) -> Head | bool:
    """The head of the call whose object begins at ``start``.

    True: it may become one. False: it will not, for its arguments come before its name, are no object, are missing, or
    belong to a function that is not ``known``.
    """
    window = text[start : start + MAX_HEAD]
    head = _read_head(window, known)
    if isinstance(head, Head):
        return Head(head.name, start + head.arguments)
    return head and len(window) < MAX_HEAD


def _read_head(text: str, known: Collection[str] | None) -> Head | bool:
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
        if key[0][1:-1] in NAME_KEYS:
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
    """Where the longest end of ``text`` begins that begins one of ``markers``."""
    first = len(text)
    for marker in markers:
        at = text.find(marker[0], max(0, len(text) - len(marker) + 1))
        while 0 <= at < first and not marker.startswith(text[at:]):
            at = text.find(marker[0], at + 1)
        if 0 <= at < first:
            first = at
    return first
