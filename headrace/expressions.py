"""How long a backtracking engine may search with a regular expression, without running it.

It tries every way in which an expression can match before it gives up, so ``(a+)+$`` takes a second for thirty letters.
`ways` bounds the number of ways: alternatives add theirs, the parts of a sequence multiply theirs, and repetitions
without a limit count apart.
"""

from __future__ import annotations

import re
from typing import NamedTuple

MAX_WAYS = 128
"""Ways of one expression, and of all expressions of a tokenizer, beside the repetitions without a limit."""

_TOO_MANY = 1 << 20
"""More ways than any caller allows: they are not counted further."""

FEW = 8
"""A part that may be repeated more often than this is as bad as one without a limit."""

_QUANTIFIER = re.compile(r"(?:([*+?])|\{(\d*)(,?)(\d*)\})[?+]?")
_GROUP = re.compile(r"\((?:\?(?:[:=!>|]|<[=!]|<\w+>|[ims-]+:?))?")
_FLAGS = re.compile(r"\(\?[ims-]+\)")
_ESCAPE = re.compile(
    r"\\(?:[pP]\{\^?[\w=]+\}|[pP]\w|x\{[0-9a-fA-F]+\}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[nrtfvaesSdDwWhHbBAzZG]|\W)",
    re.DOTALL,
)
"""Characters, classes and places; not references to groups, nor escapes that take the next character with them."""


def is_slow(expression: str, loops: int = 1, count: int = MAX_WAYS) -> bool:
    """Whether an expression may try more ways at one position of a text than ``count`` times the length of the text to
    the power of ``loops``.
    """
    found = ways(expression)
    return found is None or found.fallible > loops or found.choices > count


def ways(expression: str) -> Ways | None:
    """The ways of an expression; None if their number is not bounded."""
    try:
        found, end = _alternatives(expression, 0)
    except (_NotBounded, RecursionError):
        return None
    return found if end == len(expression) else None


class _NotBounded(Exception):
    """The number of ways is not bounded, or the expression is not understood."""


class Ways(NamedTuple):
    """How a part may match. ``loops`` are its repetitions without a limit, ``fallible`` those after which it may still
    fail, so that every length of them is tried; ``choices`` is the most ways in which it matches at one place for one
    length of each of them.
    """

    loops: int = 0
    fallible: int = 0
    choices: int = 1


def _alternatives(text: str, at: int) -> tuple[Ways, int]:
    """The ways of alternatives from ``at`` on, and where they end: at a closing bracket or the end of ``text``."""
    found: list[Ways] = []
    while True:
        each, at = _sequence(text, at)
        found.append(each)
        if text[at : at + 1] != "|":
            break
        at += 1
    most = max(each.loops for each in found), max(each.fallible for each in found)
    return Ways(*most, _checked(sum(each.choices for each in found))), at


def _sequence(text: str, at: int) -> tuple[Ways, int]:
    loops = fallible = 0
    count = 1
    while at < len(text) and text[at] not in "|)":
        part, at = _part(text, at)
        least, most, at = _repetition(text, at)
        repeated = most is None or most > FEW
        if (most is None or most > 1) and (part.loops or part.choices > 1):
            raise _NotBounded
        # If it may fail, every length of the loops before it is tried.
        fallible = max(fallible, part.fallible + (loops if least else 0))
        loops += part.loops + repeated
        if (
            not repeated and most is not None
        ):  # once in any way or not at all, or from `least` to `most` times
            count = _checked(count * (part.choices + (not least) if most <= 1 else most - least + 1))
    return Ways(loops, fallible, count), at


def _checked(count: int) -> int:
    if count > _TOO_MANY:
        raise _NotBounded
    return count


def _part(text: str, at: int) -> tuple[Ways, int]:
    """The ways of a character, class, escape or group at ``at``, and where it ends."""
    character = text[at]
    if character == "[":
        return Ways(), _class_end(text, at)
    if character == "\\":
        escape = _ESCAPE.match(text, at)
        if escape is None:
            raise _NotBounded
        return Ways(), escape.end()
    if character != "(":
        return Ways(), at + 1
    flags = _FLAGS.match(text, at)
    if flags is not None:
        return Ways(), flags.end()
    opened = _GROUP.match(text, at)
    assert opened is not None
    if opened[0] == "(" and text[at + 1 : at + 2] == "?":
        raise _NotBounded
    found, end = _alternatives(text, opened.end())
    if text[end : end + 1] != ")":
        raise _NotBounded
    return found, end + 1


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
    if not comma and found[0][-1] == "?":  # optional in some syntaxes
        raise _NotBounded
    least = int(low or 0)
    most = (int(high) if high else None) if comma else least
    return least, most, found.end()
