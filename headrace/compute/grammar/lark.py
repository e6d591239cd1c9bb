"""Grammars in Lark's notation, without the marks that llguidance does not know and that allow the same texts.

``?rule`` and ``!rule`` change the parse tree. Priorities (``rule.2``, ``NAME.1``) choose between several parses of one
text: with Lark's default parser they allow the same texts. There is no tree here, so all of them are removed.
"""

from __future__ import annotations

import re

from llguidance.gbnf_to_lark import any_to_lark

from headrace.core.constraint import UnusableConstraint

_PART = re.compile(
    r"""
    (?P<literal> //[^\n]* | "(?:\\.|[^"\\\n])*" | /(?!/)(?:\\.|[^/\\\n])*/ )
  | ^(?P<space>[ \t]*) (?P<marks>[?!]*) [ \t]*
    (?P<name>[A-Za-z_][A-Za-z0-9_]*) (?P<rest>(?:\{[^}\n]*\}|\[[^\]\n]*\])*)
    (?P<priority>\.[+-]?[0-9]+)? (?P<colon>[ \t]*:(?!:))
    """,
    re.MULTILINE | re.VERBOSE,
)
"""A comment or a literal, in which nothing is a rule; or the beginning of a rule."""

_MARKS = ("", "?", "!", "?!", "!?")


def as_lark(source: str) -> str:
    """A grammar in Lark or GBNF as llguidance takes it.

    Raises:
        UnusableConstraint: it is neither, or a rule has marks that Lark does not have.
    """
    rules = 0

    def plain(found: re.Match[str]) -> str:
        nonlocal rules
        if found["literal"] is not None:
            return found[0]
        rules += 1
        name, marks = found["name"], found["marks"]
        if marks not in _MARKS or (marks and name.lstrip("_")[:1].isupper()):
            kind = "terminal" if name.lstrip("_")[:1].isupper() else "rule"
            raise UnusableConstraint(f"the {kind} {name!r} cannot begin with {marks!r}")
        return found["space"] + name + found["rest"] + found["colon"]

    made = _PART.sub(plain, source)
    if rules:
        return made
    try:
        return any_to_lark(source)
    except Exception as error:  # the converter raises what its parser does
        first = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise UnusableConstraint(f"the grammar is neither Lark nor GBNF: {first}") from None
