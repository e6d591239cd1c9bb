"""Reads calls that are JSON objects with a name and arguments (one, a list of them, or several in a row), and calls
with one element per argument, as Qwen3-Coder, GLM, MiniMax and Seed-OSS write them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Mapping
from typing import Any

from headrace.text.parsing.formats import Elements
from headrace.text.parsing.reader import (
    ARGUMENT_KEYS,
    MAX_HEADER,
    Balance,
    Head,
    Reader,
    held_from,
    read_head,
)

# Converts arguments in plain text to JSON, by the types in the tool's schema.

Schemas = Mapping[str, Mapping[str, Any]]
"""Schemas of arguments, by function and by argument."""


def argument_types(schema: object) -> frozenset[str]:
    """The JSON types that a schema allows; empty if it does not specify any."""
    if not isinstance(schema, Mapping):
        return frozenset()
    declared = schema.get("type")
    types = {declared} if isinstance(declared, str) else set()
    if isinstance(declared, list):
        types |= {each for each in declared if isinstance(each, str)}
    for union in ("anyOf", "oneOf"):
        for choice in schema.get(union) or ():
            types |= argument_types(choice)
    values = schema.get("enum")
    if not types and isinstance(values, list):
        types |= {_TYPE_OF[type(value)] for value in values if type(value) in _TYPE_OF}
    return frozenset(types)


_TYPE_OF = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}


def is_plain(types: frozenset[str]) -> bool:
    """Whether a value of these types is always a string."""
    return not types or types == {"string"}


def typed_json(text: str, types: frozenset[str]) -> str:
    """The JSON of the value in ``text``; a string if it fits no other of ``types``."""
    bare = text.strip()
    if "null" in types and bare in ("null", "None"):
        return "null"
    if "boolean" in types and bare.lower() in ("true", "false"):
        return bare.lower()
    try:
        value = json.loads(bare)
    except (ValueError, RecursionError):
        return write_json(text)
    if isinstance(value, float) and not math.isfinite(value):
        return write_json(text)
    if isinstance(value, float) and "number" not in types and "integer" in types and value.is_integer():
        return str(int(value))
    kind = (
        "object" if isinstance(value, dict) else "array" if isinstance(value, list) else _TYPE_OF[type(value)]
    )
    if kind in types or (kind == "integer" and "number" in types):
        return write_json(value)
    return write_json(text)


class JsonCalls(Reader):
    """Reports a call as soon as its name and its arguments' bracket have arrived, then its arguments as they arrive.

    An object in another order is reported once it is complete. With ``known``, objects with other names or in another
    order are no calls. ``key`` is that of a call's name.
    """

    def __init__(self, known: Collection[str] | None = None, key: str = "name") -> None:
        super().__init__(known)
        self._key = key
        self._step_now = self._start
        self._in_list = False
        self._balance = Balance()
        self._read = 0  # characters after `_at` that the balance has read

    def _step(self, final: bool) -> bool:
        return self._step_now(final)

    def _start(self, final: bool) -> bool:
        at = self._next()
        self._in_list = self._text[at : at + 1] == "["
        if self._in_list:
            at = self._next(at + 1)
        if at >= len(self._text):
            return False
        return self._head(at) if self._text[at] == "{" else self._end()

    def _head(self, at: int) -> bool:
        head = read_head(self._text, at, self._known, self._key)
        if isinstance(head, Head):
            self._begin_call(head.name)
            self._at = head.arguments
            self._balance, self._read = Balance(), 0
            self._step_now = self._stream
            return True
        if head:
            return False
        if self._known is not None:
            return self._end()
        self._balance, self._read = Balance(), at - self._at
        self._step_now = self._whole
        return True

    def _stream(self, final: bool) -> bool:
        """Pass on the arguments up to their last bracket."""
        end = self._balance.read(self._text, self._at)
        self._arguments(self._text[self._at : end])
        if end is None:
            self._at = len(self._text)
            return False
        self._at = end
        self.closed += 1
        self._balance, self._read = Balance(1), 0
        self._step_now = self._tail
        return True

    def _tail(self, final: bool) -> bool:
        """Read the end of the call's object after the arguments: its bracket, perhaps after ignored members."""
        first = self._next()
        if first >= len(self._text):
            if final:
                self._at = first
            return False
        follows = self._text[first]
        if follows == "," and (member := self._next(first + 1)) < len(self._text):
            follows = "}" if self._text[member] == '"' else ""
        if follows == "," and not final:
            return False
        if follows not in ("}", ","):
            return self._end()  # the bracket is missing
        end = self._balance.read(self._text, self._at + self._read)
        if end is None:
            self._read = len(self._text) - self._at
            if final:
                self._at = len(self._text)
            return False
        self._at = end
        self._step_now = self._between
        return True

    def _whole(self, final: bool) -> bool:
        """Read an object whose order does not allow reporting it before it is complete."""
        end = self._balance.read(self._text, self._at + self._read)
        if end is None:
            self._read = len(self._text) - self._at
            return False
        call = read_call(self._text[self._text.index("{", self._at) : end], self._key)
        if call is None:
            return self._end()
        self._begin_call(call[0])
        self._arguments(call[1])
        self.closed += 1
        self._at = end
        self._step_now = self._between
        return True

    def _between(self, final: bool) -> bool:
        at = self._next()
        if at >= len(self._text):
            return False
        mark = self._text[at]
        if self._in_list and mark == "]":
            self._at = at + 1
            return self._end()
        if mark == "{":
            return self._head(at)
        if mark not in ",;":
            return self._end()
        brace = self._next(at + 1)
        if brace >= len(self._text):
            return False
        return self._head(brace) if self._text[brace] == "{" else self._end()


def read_call(text: str, key: str) -> tuple[str, str] | None:
    """Name and arguments of a complete call, whose name is the value of ``key``; None if it is no call."""
    try:
        call = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        call = call["function"]
    name = call.get(key) if isinstance(call, dict) else None
    if not isinstance(name, str) or not name or not _is_text(name):
        return None
    arguments = next((call[key] for key in ARGUMENT_KEYS if key in call), None)
    if isinstance(arguments, str):
        try:
            return (name, arguments) if isinstance(json.loads(arguments), dict) else None
        except (ValueError, RecursionError):
            return None
    if arguments is None:
        arguments = {}
    return (name, write_json(arguments)) if isinstance(arguments, dict) else None


def write_json(value: Any) -> str:
    """JSON text that can be encoded as UTF-8, even if the model wrote lone surrogates."""
    text = json.dumps(value, ensure_ascii=False)
    return text if _is_text(text) else json.dumps(value)


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class XmlCall(Reader):
    """One call.

    Args:
        header: matches the beginning of the call, with its name.
        elements: how its arguments are written.
        schemas: the schemas of the arguments of each function.
        known: the only functions whose calls are read; None: all.
    """

    def __init__(
        self,
        header: re.Pattern[str],
        elements: Elements,
        schemas: Schemas,
        known: Collection[str] | None = None,
    ) -> None:
        super().__init__(known)
        self._header = header
        self._elements = elements
        self._schemas = schemas
        self._name = ""
        self._arguments_seen = 0
        self._types: frozenset[str] = frozenset()
        self._in_value = False

    def _step(self, final: bool) -> bool:
        if not self.calls:
            return self._open()
        return self._value(final) if self._in_value else self._between(final)

    def _open(self) -> bool:
        found = self._called(self._header)
        if found is None:
            return False
        at = self._next(found.end())
        begin, close = self._elements.begin, self._elements.close
        if not self._text.startswith((begin, close), at):
            follows = self._text[at : at + max(len(begin), len(close))]
            return False if begin.startswith(follows) or close.startswith(follows) else self._end()
        self._name = found["name"]
        self._begin_call(self._name)
        self._arguments("{")
        self._at = at
        return True

    def _between(self, final: bool) -> bool:
        at = self._next()
        parts = self._elements
        if self._text.startswith(parts.close, at):
            self._at = at + len(parts.close)
            return self._finish()
        found = parts.argument.match(self._text, at, at + MAX_HEADER)
        if found is None:
            follows = self._text[at : at + MAX_HEADER]
            if len(follows) == MAX_HEADER or "\n" in follows.partition(parts.named)[0]:
                return self._finish()
            if not (parts.begin.startswith(follows[: len(parts.begin)]) or parts.close.startswith(follows)):
                return self._finish()
            if final:  # truncated: the arguments stay incomplete
                self._at = len(self._text)
            return False
        if parts.lines and found.end() == len(self._text) and not found[0].endswith("\n") and not final:
            return False  # a line break may follow, which is not part of the value
        self._types = argument_types(self._schemas.get(self._name, {}).get(found[1]))
        before = ", " if self._arguments_seen else ""
        self._arguments_seen += 1
        self._arguments(before + json.dumps(found[1], ensure_ascii=False) + ": ")
        if is_plain(self._types):
            self._arguments('"')
        self._at = found.end()
        self._in_value = True
        return True

    def _finish(self) -> bool:
        self._arguments("}")
        self.closed = 1
        return self._end()

    def _value(self, final: bool) -> bool:
        plain, parts = is_plain(self._types), self._elements
        end = self._text.find(parts.end, self._at)
        if end < 0:
            if plain:
                self._pass_on(len(self._text) if final else self._sure())
            elif final:
                self._arguments(self._text[self._at :])
                self._at = len(self._text)
            return False
        broken = parts.lines and self._text[end - 1 : end] == "\n" and end > self._at
        stop = end - 1 if broken else end
        if plain:
            self._pass_on(stop)
            self._arguments('"')
        else:
            self._arguments(typed_json(self._text[self._at : stop], self._types))
        self._at = end + len(parts.end)
        self._in_value = False
        return True

    def _sure(self) -> int:
        """The index up to which the text certainly belongs to the value, without a possible beginning of its end."""
        end = self._elements.end
        sure = held_from(self._text, (end, "\n" + end) if self._elements.lines else (end,))
        return max(sure, self._at)

    def _pass_on(self, end: int) -> None:
        """Pass on the text of a string up to ``end``."""
        self._arguments(json.dumps(self._text[self._at : end], ensure_ascii=False)[1:-1])
        self._at = max(self._at, end)
