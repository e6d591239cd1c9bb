"""Lark grammar rules for tool call arguments in formats other than JSON.

There are two formats: Python keyword arguments (``city="Paris", deep=True``), whose values are JSON except True, False
and None; and members with bare keys, whose strings are enclosed in special marks (``city:<|"|>Paris<|"|>``).
`text.parsing.python_calls` reads both. Properties are in the schema's order.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any, NamedTuple

from headrace.compute.grammar.decimals import one_of
from headrace.compute.grammar.schemas import Part, allowed_values, json_rules
from headrace.core.constraint import UnusableConstraint

_BARE = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_NOTES = frozenset(
    (
        "title",
        "description",
        "default",
        "examples",
        "deprecated",
        "discriminator",
        "readOnly",
        "writeOnly",
        "$comment",
        "$schema",
    )
)
"""Keywords without constraints."""

_OBJECT = frozenset(
    {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "strict"}
)
_KNOWN = {
    "string": frozenset({"type", "minLength", "maxLength"}),
    "array": frozenset({"type", "items", "minItems", "maxItems"}),
    "object": _OBJECT,
}
"""Keywords that strings, arrays and objects with marks may have. Numbers may have all."""

MAX_RULES = 4096

Spelt = Callable[[str], str]
"""A text as Lark has it."""


class _Form(NamedTuple):
    """The separators between key and value and between members, and the quote of keys that are not identifiers."""

    sign: str
    comma: str
    quote: str


class _Rules:
    """Rules under construction, whose names begin with ``prefix``."""

    def __init__(self, root: Mapping[str, Any], prefix: str, spelt: Spelt) -> None:
        self.lines: list[str] = []
        self.spelt = spelt
        self._prefix = prefix
        self._root = root

    def add(self, body: str, lazy: bool = False) -> str:
        """A new rule; its name."""
        if len(self.lines) >= MAX_RULES:
            raise UnusableConstraint(f"the arguments' schema has more than {MAX_RULES} parts")
        name = f"{self._prefix}_{len(self.lines)}"
        self.lines.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def json(self, schema: Any, whitespace: str, path: str) -> str:
        """A rule for JSON of ``schema``, which is at ``path``."""
        prefix = f"{self._prefix}_{len(self.lines)}"
        start, lines = json_rules(schema, prefix, whitespace, root=self._root, place=path)
        self.lines += lines
        return start

    def check(self, schema: Any, path: str) -> None:
        """Raise `UnusableConstraint` if JSON of ``schema`` could not be enforced: alternatives may overlap."""
        json_rules(schema, self._prefix, "", root=self._root, place=path)

    def members(self, schema: Mapping[str, Any], path: str, form: _Form, value: Value) -> str:
        """A rule for the members of an object: all that are required, and any of the others."""
        _check(schema, _OBJECT, path)
        given = schema.get("properties") or {}
        missing = [name for name in schema.get("required") or () if name not in given]
        if missing:
            raise UnusableConstraint(
                f"keyword 'required' at '{path}': there is no property {missing[0]!r:.80}"
            )
        first = more = ""  # rules for the members from here on, before and after one has been written
        for name, inner in reversed(given.items()):
            place = f"{path}/properties/{name}"
            key = json.dumps(name) if _BARE.fullmatch(name) else self.quoted(name, form.quote, place)
            this = f"{key} {json.dumps(form.sign)} {value(inner, place)}"
            needed = name in (schema.get("required") or ())
            without_first, without_more = first, more
            first = self.add(f"{this} {more}" + ("" if needed else f" | {without_first or _NOTHING}"))
            more = self.add(
                f"{self.spelt(form.comma)} {this} {without_more}"
                + ("" if needed else f" | {without_more or _NOTHING}")
            )
        return first or _NOTHING

    def quoted(self, text: str, quote: str, path: str) -> str:
        """A text between two of ``quote``; between quotation marks, it is escaped as in JSON."""
        self.check_text(text, quote, path)
        if quote == '"':
            return json.dumps(json.dumps(text, ensure_ascii=False))
        return f"{self.spelt(quote)} {json.dumps(text) if text else ''} {self.spelt(quote)}"

    def check_text(self, text: object, quote: str, path: str) -> None:
        """Raise `UnusableConstraint` if ``text`` cannot stand between two of ``quote``."""
        if not isinstance(text, str) or not text:
            return
        if quote in text and quote != '"':
            raise UnusableConstraint(
                f"'{path}': a text with {quote!r} cannot be written in this model's calls"
            )


Value = Callable[[Any, str], str]
"""Returns the rule for a value of a schema at a path."""

_NOTHING = '""'


def python_arguments(
    schema: Mapping[str, Any], prefix: str, spelt: Spelt, whitespace: str
) -> tuple[str, list[str]]:
    """The rule for keyword arguments of ``schema``, and all rules.

    Raises:
        UnusableConstraint: the schema has a keyword that cannot be enforced in this form.
    """
    rules = _Rules(schema, prefix, spelt)

    def value(inner: Any, path: str) -> str:
        if isinstance(inner, Mapping) and inner.keys() - _NOTES == {"type"}:
            if inner["type"] == "boolean":
                return '("True" | "False")'
            if inner["type"] == "null":
                return '"None"'
        return rules.json(inner, whitespace, path)

    return rules.members(schema, "#", _Form("=", ", ", '"'), value), rules.lines


def marked_arguments(
    schema: Mapping[str, Any], prefix: str, spelt: Spelt, quote: str
) -> tuple[str, list[str]]:
    """The rule for members of ``schema`` whose strings stand between ``quote``, and all rules.

    Raises:
        UnusableConstraint: the schema has a keyword that cannot be enforced in this form.
    """
    marked = _Marked(_Rules(schema, prefix, spelt), schema, quote)
    return marked.rules.members(schema, "#", _Form(":", ",", quote), marked.value), marked.rules.lines


class _Marked:
    """Values whose strings stand between marks."""

    def __init__(self, rules: _Rules, root: Mapping[str, Any], quote: str) -> None:
        self.rules = rules
        self._root = root
        self._form = _Form(":", ",", quote)
        self._quote = rules.spelt(quote)
        self._open: list[str] = []  # references that are being followed

    def value(self, schema: Any, path: str) -> str:
        if schema is True or schema == {}:
            raise UnusableConstraint(
                f"'{path}': a value of any type cannot be enforced in this model's calls"
            )
        if not isinstance(schema, Mapping):
            raise UnusableConstraint(f"'{path}' is not a JSON schema")
        if "$ref" in schema:
            return self._referred(str(schema["$ref"]), path)
        if "const" in schema or "enum" in schema:
            _check(schema, frozenset({"type", "const", "enum"}), path)
            return self._constants(schema, path)
        for union in ("anyOf", "oneOf"):
            if union in schema:
                _check(schema, frozenset({union}), path)
                self.rules.check(schema, path)
                parts = enumerate(schema[union])
                return self.rules.add(
                    " | ".join(self.value(each, f"{path}/{union}/{at}") for at, each in parts)
                )
        kinds = schema.get("type")
        if kinds is None:
            kinds = "object" if "properties" in schema else None
        if isinstance(kinds, list):
            return self.rules.add(" | ".join(self._of_type(schema, kind, path) for kind in kinds))
        return self._of_type(schema, kinds, path)

    def _of_type(self, schema: Mapping[str, Any], kind: object, path: str) -> str:
        match kind:
            case "boolean":
                return '("true" | "false")'
            case "null":
                return '"null"'
            case "integer" | "number":
                return self.rules.json({**schema, "type": kind}, "", path)
            case "string":
                _check(schema, _KNOWN["string"], path)
                return self._string(schema)
            case "array":
                _check(schema, _KNOWN["array"], path)
                return self._array(schema, path)
            case "object":
                members = self.rules.members(schema, path, self._form, self.value)
                return self.rules.add(f'"{{" {members} "}}"')
        raise UnusableConstraint(f"'{path}': a value without a type cannot be enforced in this model's calls")

    def _string(self, schema: Mapping[str, Any]) -> str:
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        text = rf"/(.|\n){{{least},{'' if most is None else most}}}/" if least or most is not None else "TEXT"
        if self._quote.startswith("<["):  # no text spells a special token, so none can run past it
            return self.rules.add(f"{self._quote} {text} {self._quote}")
        closed = self.rules.add(f"{text} {self._quote}", lazy=True)
        return self.rules.add(f"{self._quote} {closed}")

    def _array(self, schema: Mapping[str, Any], path: str) -> str:
        item = self.value(schema.get("items", True), f"{path}/items")
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most == 0:
            return '"[]"'
        more = f'("," {item}){{{max(0, least - 1)},{"" if most is None else most - 1}}}'
        filled = f"{item} {more}"
        return self.rules.add('"["' + (f" ({filled})? " if not least else f" {filled} ") + '"]"')

    def _constants(self, schema: Mapping[str, Any], path: str) -> str:
        """The values of ``enum`` and ``const`` that have the type."""
        part = Part(path, frozenset(), schema)
        allowed = allowed_values(part)
        if not allowed:
            raise UnusableConstraint(f"no value satisfies the schema at '{path}'")
        return self.rules.add(" | ".join(self._constant(value, path) for value in allowed))

    def _constant(self, value: Any, path: str) -> str:
        self.rules.check_text(value, self._form.quote, path)
        if isinstance(value, str):
            return f"{self._quote} {json.dumps(value, ensure_ascii=False) if value else ''} {self._quote}"
        if value is None or isinstance(value, bool):
            return json.dumps(json.dumps(value))
        if isinstance(value, int | Decimal):
            return one_of([Decimal(value)])
        raise UnusableConstraint(
            f"keyword 'enum' at '{path}': only strings, numbers and constants can be enforced"
        )

    def _referred(self, target: str, path: str) -> str:
        found: Any = self._root
        for step in target.removeprefix("#/").split("/") if target.startswith("#/") else ("",):
            found = (
                found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
            )
        if found is None:
            raise UnusableConstraint(f"keyword '$ref' at '{path}': there is no {target!r:.80} in the schema")
        if target in self._open:
            raise UnusableConstraint(
                f"keyword '$ref' at '{path}': a schema that contains itself is not supported"
            )
        self._open.append(target)
        try:
            return self.value(found, target)
        finally:
            self._open.pop()


def _check(schema: Mapping[str, Any], known: frozenset[str], path: str) -> None:
    """Raise `UnusableConstraint` for the first keyword that is neither ``known`` nor a note."""
    for key in _foreign(schema, known):
        raise UnusableConstraint(f"keyword '{key}' at '{path}' cannot be enforced in this model's calls")


def _foreign(schema: Mapping[str, Any], known: frozenset[str]) -> Iterator[str]:
    return (key for key in schema if key not in known and key not in _NOTES)
