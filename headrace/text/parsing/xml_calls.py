"""Reads a call with one element per argument, as Qwen3-Coder, GLM, MiniMax and Seed-OSS write it.

    <function=get_weather>
    <parameter=city>
    Paris
    </parameter>
    </function>

The type of a value is not in its text, but in the tool's schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from headrace.text.parsing.formats import Elements
from headrace.text.parsing.json_calls import Schemas, argument_types, is_plain, typed_json
from headrace.text.parsing.reader import Reader, held_from

MAX_HEADER = 512


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
        window = self._text[:MAX_HEADER]
        found = self._header.match(window)
        if found is None:
            return self._end() if len(window) == MAX_HEADER else False
        if self._known is not None and found["name"] not in self._known:
            return self._end()
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
