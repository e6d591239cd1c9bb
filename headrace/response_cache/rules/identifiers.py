"""Codes, addresses, names of files, options of commands and symbols in a text, which mean what they are letter by
letter.

A symbol that stands at a word or between two words is code or arithmetic, other plain symbols are punctuation. Pure
text in, values out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

_SYMBOL = re.compile(r"[^\w\s]")
_BETWEEN = re.compile(r"(?:\d\w?|\)|\b[^\W\d_])\s*([-*/]+)\s*(?=[\d(.$\u20ac\u00a3-]|[^\W\d_]\b)")
_SIGN = re.compile(r"(?<![\w)])-(?=[$\u20ac\u00a3]?\.?\d)")
"""Between two numbers or single letters, or before a number, a plain symbol is arithmetic."""
_CODE = re.compile(r"(?<!\w)(?=\w*\d)(?=\w*[^\W\d_])[\w.-]*\w|[^\W\d_][+#]+")
"""Letters with digits (M604n, iphone-6s), and C++ or C#. Only the first letter of a word is a beginning: from every
letter of a long word, the search would take quadratic time."""
_ADDRESS = re.compile(r"\bhttps?://\S+|\bwww\.\S+|\b\w+_\w+\b|(?<![\w/])/\w+(?:/[\w.-]+)+")
"""Addresses, paths and identifiers with underscores, whose words mean nothing alone."""
_FILE = re.compile(r"(?<![\w./-])\w[\w-]+(?:\.[\w-]+)*\.[a-z][a-z0-9]{0,4}(?![\w/])", re.IGNORECASE)
"""Names of files and hosts, each of which is one name."""
_PREFIXED = re.compile(r"(?<![^\s\"'(`\u2018\u201c])(?:--?|!|\*|\.{0,2}/|\\|~/)[^\W\d_]\w*(?![\w*])")
"""Options (-v and -V differ), operators (!x, *x) and paths (./run, /run) with their word, as they are written."""
_BRACKETED = re.compile(r"\w\[[^\s\]]*\]")
_PARSED = re.compile(r"\w+|[^\w\s]")
_OPENING, _CLOSING = frozenset("([{"), frozenset(")]}")
_TERMS = frozenset(
    (
        "+",
        "*",
        "/",
        "^",
        "|",
        "&",
        "=",
        "<",
        ">",
        "!",
        ",",
        "and",
        "or",
        "not",
        "plus",
        "minus",
        "times",
        "off",
        "%",
        *_OPENING,
        *_CLOSING,
    )
)
"""Symbols and words of terms: brackets with one inside or at them count."""
_PLAIN_SYMBOLS = frozenset(".,;:!?'\"()[]{}-_/\\`*\u2019\u2018\u201c\u201d\u2013\u2014\u2026")


def identifiers(text: str) -> Counter[str]:
    """Codes, addresses, names of files, symbols of arithmetic and others that are not punctuation."""
    found: list[str] = _BETWEEN.findall(text) + _SIGN.findall(text)
    found += [token for token in _SYMBOL.findall(text) if token not in _PLAIN_SYMBOLS]
    for form in (_CODE, _ADDRESS, _FILE):
        found += map(str.lower, form.findall(text))
    for form in (_PREFIXED, _BRACKETED):
        found += form.findall(text)
    if not _OPENING.isdisjoint(text):
        found += _brackets(text)
    return Counter(found)


def _brackets(text: str) -> Iterator[str]:
    """The brackets of terms, of code and of logic, each with the word or symbol inside of it next to it."""
    tokens = list(_PARSED.finditer(text))
    open_at: list[int] = []
    for place, token in enumerate(tokens):
        if token[0] in _OPENING:
            open_at.append(place)
        elif token[0] in _CLOSING and open_at:
            start = open_at.pop()
            inside = [each[0].lower() for each in tokens[start + 1 : place]]
            beside = {
                each[0] for each in (*tokens[max(0, start - 1) : start], *tokens[place + 1 : place + 2])
            }
            attached = start > 0 and tokens[start - 1].end() == tokens[start].start() and len(inside) != 1
            subtracts = "-" in (*inside, *beside) and any(each[0].isdigit() for each in inside)
            if attached or token[0] != ")" or not _TERMS.isdisjoint((*inside, *beside)) or subtracts:
                yield f"{tokens[start][0]}{(inside or [''])[0]}"
                yield f"{(inside or [''])[-1]}{token[0]}"
