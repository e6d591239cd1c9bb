"""The regular expressions with which a tokenizer splits text: whether one may take long for a short text.

A backtracking engine tries every way in which repetitions can share a text before it gives up, so ``(a+)+$`` takes a
second for thirty letters. `may_take_long` reads an expression without running it and bounds the number of ways. What it
does not understand may take long. Published tokenizers have expressions of which each position of a text is tried in
one way, or in as many as the text has characters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import tokenizers

MAX_OPTIONS = 6
"""Optional parts of one sequence; each may double the number of ways."""

FEW = 8
"""A part that may be repeated more often than this is as bad as one without a limit."""

_QUANTIFIER = re.compile(r"(?:([*+?])|\{(\d*)(,?)(\d*)\})[?+]?")
_GROUP = re.compile(r"\((?:\?(?:[:=!>|]|<[=!]|<\w+>|[imsx-]+:?))?")
_FLAGS = re.compile(r"\(\?[imsx-]+\)")
_ESCAPE = re.compile(
    r"\\(?:[pP]\{\^?[\w=]+\}|[pP]\w|x\{[0-9a-fA-F]+\}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[^\dkgxupP])", re.DOTALL
)
"""All but references to groups."""


def may_take_long(backend: tokenizers.Tokenizer) -> bool:
    """Whether one of the tokenizer's regular expressions may take long for a short text."""
    return any(map(is_slow, expressions(backend)))


def expressions(backend: tokenizers.Tokenizer) -> Iterator[str]:
    """The regular expressions of a tokenizer's normalizer and pre-tokenizer."""
    for part in (backend.normalizer, backend.pre_tokenizer):
        if part is not None:
            yield from _within(json.loads(part.__getstate__()))


def _within(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, each in value.items():
            if key == "Regex":
                yield str(each)
            else:
                yield from _within(each)
    elif isinstance(value, list):
        for each in value:
            yield from _within(each)


def is_slow(expression: str) -> bool:
    """Whether an expression may try more ways at one position of a text than the text has characters."""
    try:
        ways, end = _alternatives(expression, 0)
    except (_NotBounded, RecursionError):
        return True
    return end < len(expression) or ways.fallible > 1


class _NotBounded(Exception):
    """The number of ways is not bounded, or the expression is not understood."""


class _Ways(NamedTuple):
    """How a part may match. ``loops`` are its repetitions without a limit, ``fallible`` those after which it may still
    fail, so that every length of them is tried; ``varies``: it may match the same place in more than one way.
    """

    loops: int = 0
    fallible: int = 0
    varies: bool = False


def _alternatives(text: str, at: int) -> tuple[_Ways, int]:
    """The ways of alternatives from ``at`` on, and where they end: at a closing bracket or the end of ``text``."""
    found: list[_Ways] = []
    while True:
        ways, at = _sequence(text, at)
        found.append(ways)
        if text[at : at + 1] != "|":
            break
        at += 1
    most = _Ways(max(each.loops for each in found), max(each.fallible for each in found))
    return most._replace(varies=len(found) > 1 or any(each.varies for each in found)), at


def _sequence(text: str, at: int) -> tuple[_Ways, int]:
    loops = fallible = options = 0
    varies = False
    while at < len(text) and text[at] not in "|)":
        part, at = _part(text, at)
        least, most, at = _repetition(text, at)
        repeated = most is None or most > FEW
        if (most is None or most > 1) and (part.loops or part.varies):
            raise _NotBounded
        if least:  # it may fail, and then every length of the loops before it is tried
            fallible = max(fallible, loops + part.fallible)
        else:
            fallible = max(fallible, part.fallible)
            options += not repeated
        loops += part.loops + repeated
        varies = varies or part.varies or most is None or most != least
    if options > MAX_OPTIONS:
        raise _NotBounded
    return _Ways(loops, fallible, varies), at


def _part(text: str, at: int) -> tuple[_Ways, int]:
    """The ways of a character, class, escape or group at ``at``, and where it ends."""
    character = text[at]
    if character == "[":
        return _Ways(), _class_end(text, at)
    if character == "\\":
        escape = _ESCAPE.match(text, at)
        if escape is None:
            raise _NotBounded
        return _Ways(), escape.end()
    if character != "(":
        return _Ways(), at + 1
    flags = _FLAGS.match(text, at)
    if flags is not None:
        return _Ways(), flags.end()
    opened = _GROUP.match(text, at)
    assert opened is not None
    if opened[0] == "(" and text[at + 1 : at + 2] == "?":
        raise _NotBounded
    ways, end = _alternatives(text, opened.end())
    if text[end : end + 1] != ")":
        raise _NotBounded
    return ways, end + 1


def _class_end(text: str, at: int) -> int:
    """Where the class that opens at ``at`` ends; a class may contain classes."""
    depth, start = 0, at
    while at < len(text):
        if text[at] == "\\":
            at += 1
        elif text[at] == "[":
            depth, start = depth + 1, at
            at += text[at + 1 : at + 2] == "^"
        elif text[at] == "]" and at > start + 1 and text[start + 1 : at] != "^":
            depth -= 1
            start = -1
            if not depth:
                return at + 1
        at += 1
    raise _NotBounded


def _repetition(text: str, at: int) -> tuple[int, int | None, int]:
    """How often the part before ``at`` is repeated: at least, at most (None: without a limit); and where this ends."""
    found = _QUANTIFIER.match(text, at)
    if found is None or found[0] == "{}":
        return 1, 1, at
    sign, low, comma, high = found.groups()
    if text[found.end() : found.end() + 1] in ("*", "+", "?") or (not sign and found[0][-1] == "+"):
        raise _NotBounded  # a repetition of a repetition
    if sign:
        return int(sign == "+"), 1 if sign == "?" else None, found.end()
    if not low and not high:  # plain characters
        return 1, 1, at
    least = int(low or 0)
    most = (int(high) if high else None) if comma else least
    return least, most, found.end()
