"""Codes, addresses, names of files, options of commands and symbols in a text, which mean what they are letter by
letter.

A symbol that stands at a word or between two words is code or arithmetic, other plain symbols are punctuation. Pure
text in, values out.
"""

from __future__ import annotations

import re
from collections import Counter

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
_PLAIN_SYMBOLS = frozenset(".,;:!?'\"()[]{}-_/\\`*\u2019\u2018\u201c\u201d\u2013\u2014\u2026")


def identifiers(text: str) -> Counter[str]:
    """Codes, addresses, names of files, symbols of arithmetic and others that are not punctuation."""
    found = Counter(_BETWEEN.findall(text) + _SIGN.findall(text))
    found.update(token for token in _SYMBOL.findall(text) if token not in _PLAIN_SYMBOLS)
    for form in (_CODE, _ADDRESS, _FILE):
        found.update(name.lower() for name in form.findall(text))
    for form in (_PREFIXED, _BRACKETED):
        found.update(form.findall(text))
    return found
