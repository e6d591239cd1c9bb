"""Reads Python calls with keyword arguments: ``[f(a=1), g()]``, or one per line."""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from enum import Enum, auto

from headrace.text.parsing.reader import Balance, Progress, Reader

# Rewrites values in other notations into JSON, character by character.
#
# One grammar covers two notations: Python's keyword arguments (``city='Paris', days=[1, 2], deep=True``), and objects
# with bare keys and special marks around strings (``city:<|"|>Paris<|"|>,days:[1,2]``).

MAX_DEPTH = 100
MAX_WORD = 400
"""Maximum characters of a number or a bare word."""

CONSTANTS = {
    "True": "true",
    "False": "false",
    "None": "null",
    "true": "true",
    "false": "false",
    "null": "null",
}

_WORD = re.compile(r"[\w.+-]*")
_KEY = re.compile(r"[A-Za-z_][\w.-]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_FLOAT = re.compile(r"([+-]?)(\d+)\.?(\d*)([eE][+-]?\d+)?|([+-]?)()\.(\d+)([eE][+-]?\d+)?")
_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|[^ux])", re.DOTALL)
_OPEN_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3}|x[0-9a-fA-F]?)?\Z")
_SIMPLE = {
    "n": "\\n",
    "t": "\\t",
    "r": "\\r",
    "b": "\\b",
    "f": "\\f",
    '"': '\\"',
    "\\": "\\\\",
    "/": "/",
    "\n": "",
}


class _Want(Enum):
    """What may follow."""

    KEY_OR_END = auto()
    COLON = auto()
    VALUE_OR_END = auto()
    VALUE = auto()
    COMMA_OR_END = auto()


class Literal:
    """Rewrites the members of one object, whose opening bracket has been read.

    Args:
        close: the bracket that ends it.
        quotes: marks around strings, the longest first; a string between quotation marks may hold escapes.

    Attributes:
        begun: whether the first key and its colon or equals sign, or the end, have been read.
    """

    def __init__(self, close: str, quotes: tuple[str, ...]) -> None:
        self.progress = Progress.OPEN
        self.begun = False
        self._quotes = quotes
        self._stack = [close]
        self._want = _Want.KEY_OR_END
        self._quote = ""
        self._is_key = False
        self._first = True

    def read(self, text: str, at: int, final: bool = False) -> tuple[str, int]:
        """The JSON of ``text`` from ``at`` on, as far as it is certain, and the index up to which it was read."""
        out: list[str] = []
        while at < len(text) and self.progress is Progress.OPEN:
            end = self._string(text, at, final, out) if self._quote else self._token(text, at, final, out)
            if end is None:
                break
            at = end
        return "".join(out), at

    def _token(self, text: str, at: int, final: bool, out: list[str]) -> int | None:
        char = text[at]
        if char.isspace():
            return at + 1
        for quote in self._quotes:
            if text.startswith(quote, at):
                return self._open_string(quote, at, out)
            if not final and len(text) - at < len(quote) and quote.startswith(text[at:]):
                return None
        if char == self._stack[-1] and self._want in _MAY_END:
            return self._close(at, out)
        if char == "," and self._want is _Want.COMMA_OR_END:
            self._want = _Want.KEY_OR_END if self._in_object() else _Want.VALUE_OR_END
            return at + 1
        if char in ":=" and self._want is _Want.COLON and (char == ":" or len(self._stack) == 1):
            self._want, self.begun = _Want.VALUE, True
            out.append(": ")
            return at + 1
        if char in "[({" and self._want in _MAY_BE_VALUE:
            return self._open(char, at, out)
        return self._word(text, at, final, out)

    def _open_string(self, quote: str, at: int, out: list[str]) -> int | None:
        if self._want not in _MAY_BE_VALUE and self._want is not _Want.KEY_OR_END:
            return self._fail()
        self._is_key = self._want is _Want.KEY_OR_END
        self._quote = quote
        self._before(out)
        out.append('"')
        return at + len(quote)

    def _string(self, text: str, at: int, final: bool, out: list[str]) -> int | None:
        quote = self._quote
        if text.startswith(quote, at):
            self._quote = ""
            out.append('"')
            self._want = _Want.COLON if self._is_key else _Want.COMMA_OR_END
            return at + len(quote)
        escapes = quote[0] in "'\""
        if text[at] == "\\" and escapes:
            return len(text) if final and _OPEN_ESCAPE.match(text, at) else self._escape(text, at, out)
        if len(text) - at < len(quote) and quote.startswith(text[at:]):
            return len(text) if final else None  # truncated inside the mark
        stop = at + 1
        while stop < len(text) and text[stop] != quote[0] and not (escapes and text[stop] == "\\"):
            stop += 1
        out.append(json.dumps(text[at:stop], ensure_ascii=False)[1:-1])
        return stop

    def _escape(self, text: str, at: int, out: list[str]) -> int | None:
        if _OPEN_ESCAPE.match(text, at):
            return None
        found = _ESCAPE.match(text, at)
        if found is None:
            return self._fail()
        code = found[0][1:]
        if code[0] in "ux" and len(code) > 1:
            out.append(f"\\u{int(code[1:], 16):04x}")
        elif code in _SIMPLE:
            out.append(_SIMPLE[code])
        else:
            out.append(code if code == "'" else json.dumps("\\" + code, ensure_ascii=False)[1:-1])
        return found.end()

    def _word(self, text: str, at: int, final: bool, out: list[str]) -> int | None:
        """A bare key, a number or a constant; it is complete once something else follows."""
        found = _WORD.match(text, at)
        assert found is not None
        word = found[0]
        if not word or len(word) > MAX_WORD:
            return self._fail()
        if found.end() == len(text) and not final:
            return None
        value = _constant(word)
        if found.end() == len(text) and (value is None or self._want is _Want.KEY_OR_END):
            return found.end()  # truncated inside a key or a constant
        if self._want is _Want.KEY_OR_END and _KEY.fullmatch(word):
            self._before(out)
            out.append(json.dumps(word, ensure_ascii=False))
            self._want = _Want.COLON
            return found.end()
        if value is None or self._want not in _MAY_BE_VALUE:
            return self._fail()
        self._before(out)
        out.append(value)
        self._want = _Want.COMMA_OR_END
        return found.end()

    def _open(self, char: str, at: int, out: list[str]) -> int | None:
        if len(self._stack) >= MAX_DEPTH:
            return self._fail()
        self._before(out)
        self._stack.append({"[": "]", "(": ")", "{": "}"}[char])
        self._first = True
        self._want = _Want.KEY_OR_END if char == "{" else _Want.VALUE_OR_END
        out.append("{" if char == "{" else "[")
        return at + 1

    def _before(self, out: list[str]) -> None:
        """The comma before a member or an item that is not the first."""
        if self._want is not _Want.VALUE and not self._first:
            out.append(", ")
        self._first = False

    def _close(self, at: int, out: list[str]) -> int:
        outermost = len(self._stack) == 1
        out.append("}" if self._in_object() else "]")
        self._stack.pop()
        self._first = False
        self._want = _Want.COMMA_OR_END
        if outermost:
            self.begun = True
            self.progress = Progress.DONE
        return at + 1

    def _in_object(self) -> bool:
        return len(self._stack) == 1 or self._stack[-1] == "}"

    def _fail(self) -> int | None:
        self.progress = Progress.FAILED
        return None


_MAY_END = (_Want.KEY_OR_END, _Want.VALUE_OR_END, _Want.COMMA_OR_END)
_MAY_BE_VALUE = (_Want.VALUE, _Want.VALUE_OR_END)


def _constant(word: str) -> str | None:
    """The JSON of a bare word; None if it is no constant and no number."""
    if word in CONSTANTS:
        return CONSTANTS[word]
    if _NUMBER.fullmatch(word):
        return word
    found = _FLOAT.fullmatch(word)  # 1., .5, +3 and 007, which JSON does not allow
    if found is None:
        return None
    sign, whole, fraction, exponent = (
        (found[1], found[2], found[3], found[4]) if found[2] else found.groups()[4:]
    )
    number = (whole or "").lstrip("0") or "0"
    return ("-" if sign == "-" else "") + number + (f".{fraction}" if fraction else "") + (exponent or "")


# Reads a call whose name comes before its arguments, which are JSON or a `Literal`.


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
        found = self._called(self._header)
        if found is None:
            return False
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
