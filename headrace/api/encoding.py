"""JSON of answers, written in short calls of the encoder.

One call of Python's encoder holds the interpreter's lock until it returns, on any thread: a thousand tokens with 20
log-probabilities each take 100 ms. `pieces` writes a limited number of values in each call, so that other threads run
in between.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from json.encoder import encode_basestring
from typing import Any

encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode

_LINE_BREAKS = str.maketrans({"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})

PIECE_VALUES = 4096
"""Maximum values, keys included, that one call of the encoder writes: about a millisecond."""

VALUE_CHARACTERS = 64
"""Characters of a text that count as one value."""


def encode_text(text: str) -> str:
    """A JSON string without characters that some clients treat as a line break."""
    shown = encode_basestring(text)
    return shown if shown.isascii() else shown.translate(_LINE_BREAKS)


def encode_lines(value: Any) -> str:
    """JSON of any value, without those characters."""
    return "".join([piece.translate(_LINE_BREAKS) for piece in pieces(value)])


def written(value: Any) -> bytes:
    """JSON of any value."""
    return b"".join([piece.encode() for piece in pieces(value)])


def pieces(value: Any) -> Iterator[str]:
    """The parts of a value's JSON. The encoder writes at most `PIECE_VALUES` values in each call."""
    if not is_long(value):
        yield encode(value)
    elif isinstance(value, dict):
        before = "{"
        for name, each in value.items():
            yield f"{before}{encode(name)}:"
            yield from pieces(each)
            before = ","
        yield "}"
    elif isinstance(value, (list, tuple)):
        yield "["
        yield from _entries(value)
        yield "]"
    else:
        yield '"'
        for at in range(0, len(value), PIECE_VALUES * VALUE_CHARACTERS // 2):
            yield encode(value[at : at + PIECE_VALUES * VALUE_CHARACTERS // 2])[1:-1]
        yield '"'


def _entries(values: Sequence[Any]) -> Iterator[str]:
    """The entries of a list that is not empty, without its brackets; long lists are halved."""
    if len(values) == 1:
        yield from pieces(values[0])
    elif not is_long(values):
        yield encode(values)[1:-1]
    else:
        half = len(values) // 2
        yield from _entries(values[:half])
        yield ","
        yield from _entries(values[half:])


def is_long(value: Any) -> bool:
    """Whether a value has more than `PIECE_VALUES` values."""
    room = PIECE_VALUES
    waiting = [value]
    while waiting:
        item = waiting.pop()
        room -= 1
        if isinstance(item, str):
            room -= len(item) // VALUE_CHARACTERS
        elif isinstance(item, (dict, list, tuple)):
            if len(item) > room:
                return True
            if isinstance(item, dict):
                room -= len(item)
                waiting += item.values()
            else:
                waiting += item
        if room < 0:
            return True
    return False
