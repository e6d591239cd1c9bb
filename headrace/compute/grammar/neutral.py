"""Keywords of JSON schemas that allow everything: a schema means the same without them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

_ONE = (
    *("items", "additionalItems", "additionalProperties", "contains", "not", "if", "then", "else"),
    *("propertyNames", "unevaluatedItems", "unevaluatedProperties"),
)
_MANY = ("anyOf", "allOf", "oneOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")

_EVERYTHING: Mapping[str, Callable[[Mapping[str, Any]], bool]] = {
    "uniqueItems": lambda node: node["uniqueItems"] is False,
    "contains": lambda node: _is(node.get("minContains"), 0) and "maxContains" not in node,
    "minContains": lambda node: "contains" not in node or _EVERYTHING["contains"](node),
    "maxContains": lambda node: "contains" not in node,
    "not": lambda node: node["not"] is False,
    "propertyNames": lambda node: _allows_all(node["propertyNames"]),
    "unevaluatedItems": lambda node: _allows_all(node["unevaluatedItems"]),
    "unevaluatedProperties": lambda node: _allows_all(node["unevaluatedProperties"]),
    "dependentRequired": lambda node: node["dependentRequired"] == {},
    "dependentSchemas": lambda node: node["dependentSchemas"] == {},
    "dependencies": lambda node: node["dependencies"] == {},
    "if": lambda node: "then" not in node and "else" not in node,
    "then": lambda node: "if" not in node,
    "else": lambda node: "if" not in node,
    "$dynamicAnchor": lambda _: True,  # only $dynamicRef needs it, which is not supported
    "$recursiveAnchor": lambda node: node["$recursiveAnchor"] is False,
}
"""Keywords, and when a schema with this keyword means the same without it."""


def plain(schema: Any) -> Any:
    """``schema`` without keywords that allow everything."""
    if not isinstance(schema, Mapping):
        return schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _EVERYTHING and _EVERYTHING[key](schema):
            continue
        if key in _MANY and isinstance(value, list):
            made[key] = [plain(each) for each in value]
        elif key in _ONE:
            made[key] = plain(value)
        elif key in _NAMED and isinstance(value, Mapping):
            made[key] = {name: plain(each) for name, each in value.items()}
        else:
            made[key] = value
    return made


def _allows_all(schema: object) -> bool:
    return schema is True or schema == {}


def _is(value: object, number: int) -> bool:
    return not isinstance(value, bool) and value == number
