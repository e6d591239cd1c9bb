"""Terminals of Lark for JSON strings: how characters are written, texts, lengths, patterns and formats.

A character has exactly one spelling: itself, or the escape that JSON demands for it. What a schema says about decoded
strings is therefore said about their texts: a pattern is rewritten character by character, and intersections and
complements stay exact.

```
 schema    ^[^b]$      one character, not b
 terminal  "(?:[^b"\\…]|\\"|\\\\|\\n|…)"   the same, as it is written
```
ECMA-262 and Python differ in some classes (``\\s``, ``\\w``, ``.``, the end of a text). What is generated satisfies
both: a pattern that must match is read narrowly, one that must not match is read widely.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from headrace.core.constraint import UnusableConstraint

ESCAPED = (*range(0x20), 0x22, 0x5C, 0x7F)
"""Characters that are written as escapes."""

_SHORT = {0x22: '"', 0x5C: "\\", 8: "b", 9: "t", 10: "n", 12: "f", 13: "r"}
_RAW = r"[^\x00-\x1f\x22\x5c\x7f]"
CHARACTER = rf"(?:{_RAW}|\\[\x22\x5cbfnrt]|\\u00(?:0[0-7be]|0f|1[0-9a-f]|7f))"
"""One character of a JSON string."""

ANY_STRING = f'/"{CHARACTER}*"/'

_QUANTIFIERS = {"*": (0, None), "+": (1, None), "?": (0, 1)}
MAX_REPEAT = 100_000

_YEAR = r"(?:[0-9]{3}[1-9]|[0-9]{2}[1-9][0-9]|[0-9][1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    rf"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    rf"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
)
_CLOCK = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+\-]{_CLOCK})"
_SECONDS = r"[0-9]+S"
_MINUTES = rf"[0-9]+M(?:{_SECONDS})?"
_CLOCK_SPAN = rf"T(?:[0-9]+H(?:{_MINUTES})?|{_MINUTES}|{_SECONDS})"
_MONTHS = r"[0-9]+M(?:[0-9]+D)?"
_LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9\-]{0,61}[a-zA-Z0-9])?"
_BYTE = r"(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_GROUP = r"[0-9a-fA-F]{1,4}"
_ATOM = r"[a-zA-Z0-9!#$%&'*+\-\/=?\^_`{|}~]+"
_URI = r"(?:[a-zA-Z0-9\-._~!$&'()*+,;=:@]|%[0-9a-fA-F]{2})"
_USER = r"(?:[a-zA-Z0-9\-._~!$&'()*+,;=:]|%[0-9a-fA-F]{2})"
_NAME = r"(?:[a-zA-Z0-9\-._~!$&'()*+,;=]|%[0-9a-fA-F]{2})"
_IPV6 = (
    "(?:"
    + "|".join(
        [rf"(?:{_GROUP}:){{7}}{_GROUP}", r"::"]
        + [
            rf"(?:{_GROUP}:){{0,{before}}}{_GROUP}::(?:{_GROUP}(?::{_GROUP}){{0,{5 - before}}})?"
            for before in range(6)
        ]
        + [rf"::{_GROUP}(?::{_GROUP}){{0,6}}", rf"(?:{_GROUP}:){{6}}{_GROUP}::"]
    )
    + ")"
)
FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": rf"P(?:(?:[0-9]+Y(?:{_MONTHS})?|{_MONTHS}|[0-9]+D)(?:{_CLOCK_SPAN})?|{_CLOCK_SPAN}|[0-9]+W)",
    "email": rf"{_ATOM}(?:\.{_ATOM})*@{_LABEL}(?:\.{_LABEL})*",
    "hostname": rf"{_LABEL}(?:\.{_LABEL})*",
    "ipv4": rf"(?:{_BYTE}\.){{3}}{_BYTE}",
    "ipv6": _IPV6,
    "uuid": r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "uri": (
        rf"[a-zA-Z][a-zA-Z0-9+\-.]*:(?:\/\/(?:{_USER}*@)?(?:\[{_IPV6}\]|{_NAME}*)(?::[0-9]*)?(?:\/{_URI}*)*"
        rf"|\/(?:{_URI}+(?:\/{_URI}*)*)?|{_URI}+(?:\/{_URI}*)*)?(?:\?(?:{_URI}|[\/?])*)?(?:#(?:{_URI}|[\/?])*)?"
    ),
    "unknown": "",
}
"""Formats as patterns of decoded strings; none has a character that is escaped. ``unknown`` demands nothing."""

_BYTES = {"hostname": 253, "email": 254}


def format_terminals(name: str) -> list[str]:
    """Terminals of the strings of a format, all of which must match."""
    if name == "unknown":
        return []
    limit = [f'/"{CHARACTER}{{0,{_BYTES[name]}}}"/'] if name in _BYTES else []
    return [f'/"(?:{FORMATS[name]})"/', *limit]


def literal(text: str) -> str:
    """A decoded string as it is written in JSON, with its quotes."""
    return '"' + "".join(_spelled(ord(each)) or each for each in text) + '"'


def literals(texts: Iterable[str]) -> str:
    """The terminal of some decoded strings."""
    return " | ".join(json.dumps(literal(text), ensure_ascii=False) for text in texts)


def lengths(least: int, most: int | None) -> str:
    """The terminal of strings of ``least`` to ``most`` characters."""
    return f'/"{CHARACTER}{{{least},{"" if most is None else most}}}"/'


def pattern_terminal(pattern: str, *, wide: bool = False) -> str:
    """The terminal of the strings in which ``pattern`` matches; ``wide``: in any of the dialects, otherwise in all.

    Raises:
        UnusableConstraint: the pattern is wrong, or has a part that no regular expression without context has.
    """
    tree = _Reader(pattern, wide).read()
    ending = r"(?:\\n)?" if wide else ""
    parts = [
        ("" if begins else f"{CHARACTER}*") + inner + (ending if ends else f"{CHARACTER}*")
        for begins, inner, ends in _anchored(tree)
    ]
    return f'/"(?:{"|".join(parts)})"/'


def _spelled(code: int) -> str:
    """The escape of a character; empty if it is written as itself."""
    if code in _SHORT:
        return "\\" + _SHORT[code]
    return f"\\u{code:04x}" if code in ESCAPED else ""


def _safe(code: int) -> str:
    """A character inside a regular expression of Lark."""
    return chr(code) if chr(code).isalnum() and code < 128 else f"\\x{{{code:x}}}"


# -- characters ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Set:
    """A set of characters: ``inner`` of a class of Rust, and which of `ESCAPED` are in it."""

    inner: str = ""
    escaped: set[int] = field(default_factory=set)

    def add(self, other: _Set) -> None:
        self.inner += other.inner
        self.escaped |= other.escaped

    def text(self, negated: bool) -> str:
        escaped = set(ESCAPED) - self.escaped if negated else self.escaped
        parts = ["".join(f"\\x{{{ord(each):x}}}" for each in _spelled(code)) for code in sorted(escaped)]
        if negated and not self.inner:
            parts.insert(0, _RAW)
        elif self.inner:
            parts.insert(0, f"[[{'^' if negated else ''}{self.inner}]&&{_RAW}]")
        return f"(?:{'|'.join(parts)})" if parts else r"[a&&b]"


def _between(low: int, high: int) -> _Set:
    raw = low if low == high else None
    inner = "" if raw in ESCAPED else _safe(low) if low == high else f"{_safe(low)}-{_safe(high)}"
    return _Set(inner, {code for code in ESCAPED if low <= code <= high})


_BLANK = r"\t\n\x0b\x0c\r \x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}"
_BLANKS = {9, 10, 11, 12, 13}
_WORD = "0-9A-Za-z_"


def _class(letter: str, wide: bool) -> _Set:
    """``\\d``, ``\\w`` and ``\\s``: the characters that all dialects mean, or with ``wide`` any of them."""
    if letter == "d":
        return _Set(r"\p{Nd}" if wide else "0-9")
    if letter == "w":
        return _Set(r"\w\p{L}\p{N}" if wide else _WORD)
    if wide:
        return _Set(_BLANK + r"\x{feff}\x{85}\x{1c}-\x{1f}", _BLANKS | {28, 29, 30, 31})
    return _Set(_BLANK, set(_BLANKS))


def _without(letter: str, wide: bool) -> _Set:
    """``\\D``, ``\\W`` and ``\\S``."""
    taken = _class(letter.lower(), not wide)
    return _Set(f"[^{taken.inner}]", set(ESCAPED) - taken.escaped)


def _property(name: str, negated: bool, wide: bool) -> _Set:
    """A Unicode property; ``name`` as between the braces."""
    value = name.rpartition("=")[2]
    if value in (
        "L",
        "Lu",
        "Ll",
        "Lt",
        "Lm",
        "Lo",
        "N",
        "Nd",
        "Nl",
        "No",
        "M",
        "S",
        "Z",
        "P",
        "C",
        "Cc",
        "Po",
    ):
        inside = {code for code in ESCAPED if unicodedata.category(chr(code)).startswith(value)}
        escaped = set(ESCAPED) - inside if negated else inside
    else:
        escaped = set(ESCAPED) if wide else set()
    return _Set(rf"\{'P' if negated else 'p'}{{{name}}}", escaped)


# -- patterns --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Text:
    """A part without anchors, as a regular expression."""

    value: str


@dataclass(frozen=True, slots=True)
class _Mark:
    """``^`` or ``$``."""

    end: bool


@dataclass(frozen=True, slots=True)
class _Any:
    """One of several sequences, at least one of which has an anchor."""

    options: tuple[tuple[_Part, ...], ...]


_Part = _Text | _Mark | _Any
_Anchored = tuple[bool, str, bool]


def _anchored(options: Sequence[Sequence[_Part]]) -> list[_Anchored]:
    """The alternatives of a pattern: whether each begins at the text's beginning, what it is, whether it ends there."""
    return [each for sequence in options for each in _sequence(list(sequence))]


def _sequence(parts: list[_Part]) -> list[_Anchored]:
    begins = ends = False
    while parts and isinstance(parts[0], _Mark) and not parts[0].end:
        begins, parts = True, parts[1:]
    while parts and isinstance(parts[-1], _Mark) and parts[-1].end:
        ends, parts = True, parts[:-1]
    heads: list[_Anchored] = [(begins, "", False)]
    tails: list[_Anchored] = [(False, "", ends)]
    if parts and isinstance(parts[0], _Any):
        heads = [(begins or b, text, e) for b, text, e in _anchored(parts[0].options)]
        parts = parts[1:]
    if parts and isinstance(parts[-1], _Any):
        tails = [(b, text, ends or e) for b, text, e in _anchored(parts[-1].options)]
        parts = parts[:-1]
    middle = ""
    for part in parts:
        if not isinstance(part, _Text):
            raise UnusableConstraint("an anchor inside the pattern is not supported")
        middle += part.value
    made = []
    for b, head, e in heads:
        for b2, tail, e2 in tails:
            if (e and (middle or tail or b2)) or (b2 and (middle or head)):
                raise UnusableConstraint("an anchor inside the pattern is not supported")
            made.append((b or b2, head + middle + tail, e or e2))
    return made


class _Reader:
    """Reads a pattern of ECMA-262."""

    def __init__(self, pattern: str, wide: bool) -> None:
        self._text, self._at, self._wide, self._depth = pattern, 0, wide, 0

    def read(self) -> list[list[_Part]]:
        options = self._options()
        if self._at < len(self._text):
            raise UnusableConstraint(f"unopened group at character {self._at}")
        return options

    def _peek(self, text: str) -> bool:
        return self._text.startswith(text, self._at)

    def _next(self) -> str:
        if self._at >= len(self._text):
            raise UnusableConstraint("the pattern ends too early")
        self._at += 1
        return self._text[self._at - 1]

    def _take(self, text: str) -> bool:
        found = self._peek(text)
        self._at += len(text) if found else 0
        return found

    def _options(self) -> list[list[_Part]]:
        options: list[list[_Part]] = [[]]
        while self._at < len(self._text) and not self._peek(")"):
            if self._take("|"):
                options.append([])
            else:
                options[-1].append(self._repeated(self._atom()))
        return options

    def _repeated(self, part: _Part) -> _Part:
        bounds = self._quantifier()
        if bounds is None:
            return part
        least, most = bounds
        if not isinstance(part, _Text):
            raise UnusableConstraint("an anchor that is repeated is not supported")
        if self._quantifier() is not None:
            raise UnusableConstraint(f"multiple repeat at character {self._at}")
        return _Text(f"(?:{part.value}){{{least},{'' if most is None else most}}}")

    def _quantifier(self) -> tuple[int, int | None] | None:
        for sign, bounds in _QUANTIFIERS.items():
            if self._take(sign):
                self._take("?")
                return bounds
        if not self._peek("{"):
            return None
        inner, closed, _ = self._text[self._at + 1 :].partition("}")
        least, comma, most = inner.partition(",")
        digits = least + most
        if not closed or not least or not (digits.isascii() and digits.isdigit()):
            return None
        self._at += len(inner) + 2
        self._take("?")
        top = None if comma and not most else int(most or least)
        if int(least) > MAX_REPEAT or (top or 0) > MAX_REPEAT:
            raise UnusableConstraint(f"more than {MAX_REPEAT} repeats are not supported")
        if top is not None and top < int(least):
            raise UnusableConstraint(f"the repeat {{{inner}}} is out of order")
        return int(least), top

    def _atom(self) -> _Part:
        letter = self._next()
        match letter:
            case "^" | "$":
                return _Mark(letter == "$")
            case "(":
                return self._group()
            case "[":
                return _Text(self._set())
            case ".":
                ends = _Set(
                    r"\n" if self._wide else r"\n\r\x{2028}\x{2029}", {10} if self._wide else {10, 13}
                )
                return _Text(ends.text(negated=True))
            case "\\":
                return _Text(self._escape(in_set=False, wide=self._wide).text(negated=False))
            case "*" | "+" | "?":
                raise UnusableConstraint(f"nothing to repeat at character {self._at - 1}")
        return _Text(_between(ord(letter), ord(letter)).text(negated=False))

    def _group(self) -> _Part:
        if self._take("?"):
            behind = self._peek("<=") or self._peek("<!")
            if not behind and (self._take("<") or self._take("P<")):
                self._named()
            elif not self._take(":"):
                sign = self._text[self._at : self._at + 1]
                what = "look-around is" if behind or sign in ("=", "!") else "flags are"
                raise UnusableConstraint(f"{what} not supported")
        self._depth += 1
        if self._depth > 32:
            raise UnusableConstraint("groups are nested more than 32 levels deep")
        options = self._options()
        self._depth -= 1
        if not self._take(")"):
            raise UnusableConstraint("unclosed group")
        if all(isinstance(part, _Text) for each in options for part in each):
            texts = ["".join(part.value for part in each if isinstance(part, _Text)) for each in options]
            return _Text(f"(?:{'|'.join(texts)})")
        return _Any(tuple(tuple(each) for each in options))

    def _named(self) -> None:
        while self._next() != ">":
            pass

    def _set(self) -> str:
        negated = self._take("^")
        wide = self._wide != negated
        made, first = _Set(), True
        while first or not self._peek("]"):
            if first and self._peek("]"):
                raise UnusableConstraint("an empty class is not supported")
            first = False
            start = self._member(wide)
            if self._peek("-") and not self._text.startswith("-]", self._at) and isinstance(start, int):
                self._next()
                stop = self._member(wide)
                if not isinstance(stop, int) or stop < start:
                    raise UnusableConstraint("a class has a wrong range")
                made.add(_between(start, stop))
            else:
                made.add(_between(start, start) if isinstance(start, int) else start)
        self._next()
        return made.text(negated)

    def _member(self, wide: bool) -> int | _Set:
        letter = self._next()
        if letter == "[" and self._peek(":"):
            raise UnusableConstraint("classes of POSIX are not supported")
        if letter != "\\":
            return ord(letter)
        found = self._escape(in_set=True, wide=wide)
        codes = sorted(found.escaped)
        if len(codes) == 1 and not found.inner:
            return codes[0]
        if found.inner.startswith(r"\x{") and found.inner.count("\\") == 1:
            return int(found.inner[3:-1], 16)
        return ord(found.inner) if len(found.inner) == 1 else found

    def _escape(self, *, in_set: bool, wide: bool) -> _Set:
        letter = self._next()
        if letter in "dws":
            return _class(letter, wide)
        if letter in "DWS":
            return _without(letter, wide)
        if letter in "pP":
            if not self._take("{"):
                raise UnusableConstraint(f"the escape \\{letter} is not supported")
            name, closed, _ = self._text[self._at :].partition("}")
            self._at += len(name) + 1
            if not closed or not name.replace("_", "").replace("=", "").isalnum():
                raise UnusableConstraint(f"the escape \\{letter} is not supported")
            return _property(name, letter == "P", wide)
        code = self._code(letter, in_set)
        if 0xD800 <= code < 0xE000 or code > 0x10FFFF:
            raise UnusableConstraint("an escape is no character")
        return _between(code, code)

    def _code(self, letter: str, in_set: bool) -> int:
        named = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}
        if letter == "b" and in_set:
            return 8
        if letter in named:
            return named[letter]
        if letter == "x":
            return self._hex(2)
        if letter == "u":
            if self._take("{"):
                inner, closed, _ = self._text[self._at :].partition("}")
                self._at += len(inner) + 1
                return self._parsed(inner if closed else "")
            code = self._hex(4)
            if 0xD800 <= code < 0xDC00 and self._take("\\u"):
                code = 0x10000 + ((code - 0xD800) << 10) + (self._hex(4) - 0xDC00)
            return code
        if letter.isalnum() and letter.isascii():
            raise UnusableConstraint(f"the escape \\{letter} is not supported")
        return ord(letter)

    def _hex(self, digits: int) -> int:
        text = self._text[self._at : self._at + digits]
        self._at += digits
        return self._parsed(text if len(text) == digits else "")

    def _parsed(self, text: str) -> int:
        try:
            return int(text, 16)
        except ValueError:
            raise UnusableConstraint("an escape has wrong hexadecimal digits") from None
