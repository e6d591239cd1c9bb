"""Constraints of structured output, as frozen values: a JSON schema, a regular expression, a choice or a grammar.

The core only uses a constraint's kind, source text and hash. `compute.grammar` compiles the source; `api`
converts fields of the API to constraints.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, dataclass, replace
from decimal import Decimal
from enum import StrEnum
from typing import Any

MAX_SOURCE_CHARACTERS = 262_144
"""The longest source of a constraint. Compiling takes time by its length: here well under a second."""

MAX_WHITESPACE_CHARACTERS = 256
"""The longest ``whitespace_pattern``."""

MAX_CHOICES = 10_000
"""Maximum number of strings of a choice; beyond that, the time to compile them grows faster than their number."""

FAILED_PREFIX = "structured output failed: "
"""Begins the message of a request that its constraint has ended, which its client may read."""


class ConstraintKind(StrEnum):
    """What the source of a constraint is, with the names of vLLM's ``structured_outputs``; `TEXT` is any text."""

    TEXT = "text"
    JSON = "json"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"
    STRUCTURAL_TAG = "structural_tag"


class UnusableConstraint(ValueError):
    """A constraint that cannot be enforced; the message says which part of it and why.

    ``server`` is set where the cause is not the constraint: no grammar engine, or a tokenizer that it cannot read.
    ``path`` is the field of the request with that part, where it is not the one that asks for the constraint.
    """

    def __init__(self, message: str, *, server: bool = False, path: str = "") -> None:
        super().__init__(message)
        self.server = server
        self.path = path


@dataclass(frozen=True, slots=True)
class ReasoningLimit:
    """The reasoning budget of an answer: after ``tokens`` tokens of reasoning, its end marker is forced.

    ``begin`` and ``end`` are the markers around reasoning, of which the first of ``end`` is forced. ``opened`` says
    that the prompt has begun the reasoning, ``first`` that reasoning can only be the beginning of an answer. Tokens
    of several reasoning sections count together, from behind their begin markers.
    """

    tokens: int
    begin: tuple[str, ...]
    end: tuple[str, ...]
    opened: bool = False
    first: bool = True


@dataclass(frozen=True, slots=True)
class Constraint:
    """A constraint on the text of an answer.

    ``source`` is a JSON schema as JSON text, a regular expression, a JSON list of strings (`CHOICE`), a grammar in Lark
    or GBNF, or a structural tag as JSON text. The order of a schema's properties is the order in which they are
    generated, so it is part of the value. ``whitespace`` is the regular expression of what may stand between the tokens
    of JSON; None: a blank, or a line break and an indentation. ``after`` is a text up to which the answer is free, for
    example the end of a reasoning; empty: the constraint holds from the first token on. ``reasoning`` limits the
    reasoning of the answer.

    Raises:
        UnusableConstraint: the source is longer than `MAX_SOURCE_CHARACTERS`, or the whitespace than its limit.
    """

    kind: ConstraintKind
    source: str
    whitespace: str | None = None
    after: str = ""
    reasoning: ReasoningLimit | None = None

    def __post_init__(self) -> None:
        if len(self.source) > MAX_SOURCE_CHARACTERS:
            raise UnusableConstraint(
                f"{self.kind} is {len(self.source)} characters long; at most {MAX_SOURCE_CHARACTERS} are allowed"
            )
        if self.whitespace is not None and len(self.whitespace) > MAX_WHITESPACE_CHARACTERS:
            raise UnusableConstraint(
                f"whitespace_pattern is longer than {MAX_WHITESPACE_CHARACTERS} characters"
            )

    @property
    def digest(self) -> bytes:
        """32 bytes that name the constraint."""
        parts: list[object] = [self.kind, self.source, self.whitespace, self.after]
        if self.reasoning is not None:
            parts.append(astuple(self.reasoning))
        return hashlib.sha256(json.dumps(parts).encode()).digest()

    @property
    def grammar(self) -> Constraint:
        """The same constraint without a limit of the reasoning: constraints of one grammar are compiled once."""
        return self if self.reasoning is None else replace(self, reasoning=None)


ANY_TEXT = Constraint(ConstraintKind.TEXT, "")
"""No constraint; the base of one that only limits the reasoning."""

ANY_OBJECT = '{"type":"object"}'
"""The schema of ``json_object``: any JSON object."""


def as_constraint(value: object) -> Constraint:
    """A constraint as it is, or made from vLLM's ``structured_outputs`` object.

    The object has exactly one of ``json`` (a schema, or its JSON text), ``json_object`` (true), ``regex``, ``choice``,
    ``grammar`` and ``structural_tag``, and may have ``whitespace_pattern`` beside ``json``.

    Raises:
        UnusableConstraint: it has none or several of them, an unknown key, or a value of the wrong type.
    """
    if isinstance(value, Constraint):
        return value
    if not isinstance(value, Mapping):
        raise UnusableConstraint("must be an object with one of json, regex, choice, grammar, structural_tag")
    given = {name: each for name, each in value.items() if each is not None}
    if given.get("json_object") is False:
        del given["json_object"]
    whitespace = given.pop("whitespace_pattern", None)
    if unknown := sorted(str(name) for name in given if name not in _READERS):
        raise UnusableConstraint(f"unknown key {unknown[0]!r:.80}; known: {', '.join(_READERS)}")
    if len(given) != 1:
        found = ", ".join(given) or "none"
        raise UnusableConstraint(f"exactly one of {', '.join(_READERS)} must be given, got {found}")
    ((name, source),) = given.items()
    made = _READERS[name](source)
    if whitespace is None:
        return made
    if made.kind is not ConstraintKind.JSON or not isinstance(whitespace, str):
        raise UnusableConstraint("whitespace_pattern must be a string beside json or json_object")
    return Constraint(made.kind, made.source, whitespace)


class WrittenFloat(float):
    """A fraction with the ``text`` that it was read from, which may have more digits than a double."""

    __slots__ = ("text",)

    def __new__(cls, text: str) -> WrittenFloat:
        made = super().__new__(cls, text)
        made.text = text
        return made

    text: str


def json_text(value: object, what: str) -> str:
    """``value`` as JSON text, properties in their order; a `WrittenFloat` and a `Decimal` keep all their digits.

    Raises:
        UnusableConstraint: it is not JSON.
    """
    try:
        if not _has_digits(value):
            return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return "".join(_pieces(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise UnusableConstraint(f"{what} is not JSON: {error}") from None


def _has_digits(value: object) -> bool:
    """Whether a number in ``value`` may have more digits than `json.dumps` writes."""
    if isinstance(value, Mapping):
        return any(map(_has_digits, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_digits, value))
    return isinstance(value, WrittenFloat | Decimal)


def _pieces(value: object) -> Iterator[str]:
    if isinstance(value, Mapping):
        for number, (name, each) in enumerate(value.items()):
            if not isinstance(name, str):
                raise TypeError(f"the name {name!r:.80} is no string")
            yield ("," if number else "{") + json.dumps(name, ensure_ascii=False) + ":"
            yield from _pieces(each)
        yield "}" if value else "{}"
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            yield "," if number else "["
            yield from _pieces(each)
        yield "]" if value else "[]"
    elif isinstance(value, WrittenFloat):
        yield value.text
    elif isinstance(value, Decimal):
        if not value.is_finite():
            raise ValueError(f"{value} is no JSON number")
        yield str(value)
    else:
        yield json.dumps(value, ensure_ascii=False, allow_nan=False)


def json_constraint(schema: object) -> Constraint:
    """The constraint of a JSON schema, given as a value or as JSON text."""
    if isinstance(schema, str):
        return Constraint(ConstraintKind.JSON, schema)
    return Constraint(ConstraintKind.JSON, json_text(schema, "the JSON schema"))


def _object(value: object) -> Constraint:
    if value is not True:
        raise UnusableConstraint("json_object must be true or false")
    return Constraint(ConstraintKind.JSON, ANY_OBJECT)


def _text(kind: ConstraintKind, value: object) -> Constraint:
    if not isinstance(value, str) or not value:
        raise UnusableConstraint(f"{kind} must be a string that is not empty")
    return Constraint(kind, value)


def _choice(value: object) -> Constraint:
    texts = list(value) if isinstance(value, list | tuple) else None
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise UnusableConstraint("choice must be a list of strings that are not empty")
    if len(texts) > MAX_CHOICES:
        raise UnusableConstraint(f"choice has {len(texts)} strings; at most {MAX_CHOICES} are allowed")
    return Constraint(ConstraintKind.CHOICE, json_text(texts, "choice"))


def _tag(value: object) -> Constraint:
    text = value if isinstance(value, str) else json_text(value, "structural_tag")
    return Constraint(ConstraintKind.STRUCTURAL_TAG, text)


_READERS: Mapping[str, Callable[[Any], Constraint]] = {
    "json": json_constraint,
    "json_object": _object,
    "regex": lambda value: _text(ConstraintKind.REGEX, value),
    "choice": _choice,
    "grammar": lambda value: _text(ConstraintKind.GRAMMAR, value),
    "structural_tag": _tag,
}
