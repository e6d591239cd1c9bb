"""Error messages for constraints that cannot be enforced, with the keyword and its location.

llguidance reports what it does not support, but not where in a schema. The location is found by compiling subschemas:
it is the deepest subschema that fails by itself for the same reason.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

MAX_TRIES = 500
"""Maximum number of subschemas to compile; one takes about 0.2 ms."""

_ONE = (
    "items",
    "additionalProperties",
    "additionalItems",
    "not",
    "contains",
    "propertyNames",
    "if",
    "then",
    "else",
)
_MANY = ("anyOf", "allOf", "oneOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")

Refused = Callable[[Any], str]
"""Compiles a schema and returns its error; empty if it compiles."""


def described(schema: Any, error: str, refused: Refused) -> str:
    """The error message for ``schema``, whose compilation failed with ``error``."""
    place, node = find(schema, error, refused)
    return in_words(error, place, node)


def find(schema: Any, error: str, refused: Refused) -> tuple[str, Any]:
    """The deepest subschema of ``schema`` that fails with ``error`` by itself: its JSON pointer, and itself."""
    place, node, tries = "#", schema, 0
    shared = {
        key: schema[key] for key in ("$defs", "definitions") if isinstance(schema, Mapping) and key in schema
    }
    deeper = True
    while deeper:
        deeper = False
        for where, inner in (*_inside(node, place), *_referred(node, schema, place)):
            tries += 1
            if tries > MAX_TRIES:
                return place, node
            if _bare(refused({**shared, **inner})) == _bare(error):
                place, node, deeper = where, inner, True
                break
    return place, node


def _bare(error: str) -> str:
    """An error without its chain of references."""
    return error.split("\n  while processing")[0]


def _referred(node: Any, root: Any, place: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The targets of a reference within the schema."""
    target = node.get("$ref") if isinstance(node, Mapping) else None
    if not isinstance(target, str) or not target.startswith("#/") or target == place:
        return
    found = root
    for step in target.removeprefix("#/").split("/"):
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    if isinstance(found, Mapping):
        yield target, found


def _inside(node: Any, place: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if not isinstance(node, Mapping):
        return
    for key in _ONE:
        if isinstance(node.get(key), Mapping):
            yield f"{place}/{key}", node[key]
    for key in _MANY:
        if isinstance(node.get(key), list):
            yield from (
                (f"{place}/{key}/{i}", each) for i, each in enumerate(node[key]) if isinstance(each, Mapping)
            )
    for key in _NAMED:
        if isinstance(node.get(key), Mapping):
            named = node[key].items()
            yield from (
                (f"{place}/{key}/{_escaped(name)}", each) for name, each in named if isinstance(each, Mapping)
            )


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def in_words(error: str, place: str, node: Any) -> str:
    """One sentence that names the keyword and its JSON pointer."""
    if found := re.match(r"Unimplemented keys: (\[.*\])", error):
        keys = json.loads(found[1])
        shown = ", ".join(f"'{key}'" for key in keys)
        return f"keyword {shown} at '{place}' is not supported"
    if found := re.match(r"Unknown format: (.*)", error):
        return f"keyword 'format' at '{place}': the format {found[1]!r} is not supported"
    if found := re.match(r"Resource '(.*?)' is not present", error):
        return (
            f"keyword '$ref' at '{place}': {found[1]!r} is outside the schema; remote references are refused"
        )
    if found := re.match(r"Pointer '(.*?)' does not exist", error):
        return f"keyword '$ref' at '{place}': there is no '#{found[1]}' in the schema"
    if found := re.match(r"Invalid type: (.*)", error):
        return f"keyword 'type' at '{place}': {found[1]!r} is not a JSON type"
    if "regex" in error and isinstance(node, Mapping):
        key = next((name for name in ("pattern", "patternProperties", "format") if name in node), "pattern")
        return f"keyword '{key}' at '{place}': {first_reason(error)}"
    if error.startswith("Unsatisfiable schema"):
        return f"no value satisfies the schema at '{place}': {error.removeprefix('Unsatisfiable schema: ')}"
    return f"the schema at '{place}' cannot be enforced: {first_reason(error)}"


def first_reason(error: str) -> str:
    """The reason in an error, without the excerpt of the source."""
    if error.startswith("NoExtension"):
        return "no text satisfies it"
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    why = next((line for line in lines if line.startswith("error: ")), lines[0] if lines else "unknown")
    return why.removeprefix("error: ")[:300]
