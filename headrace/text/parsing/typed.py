"""Converts arguments in plain text to JSON, by the types in the tool's schema."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from headrace.text.parsing.json_calls import write_json

Schemas = Mapping[str, Mapping[str, Any]]
"""Schemas of arguments, by function and by argument."""


def argument_types(schema: object) -> frozenset[str]:
    """The JSON types that a schema allows; empty if it does not specify any."""
    if not isinstance(schema, Mapping):
        return frozenset()
    declared = schema.get("type")
    types = {declared} if isinstance(declared, str) else set()
    if isinstance(declared, list):
        types |= {each for each in declared if isinstance(each, str)}
    for union in ("anyOf", "oneOf"):
        for choice in schema.get(union) or ():
            types |= argument_types(choice)
    values = schema.get("enum")
    if not types and isinstance(values, list):
        types |= {_TYPE_OF[type(value)] for value in values if type(value) in _TYPE_OF}
    return frozenset(types)


_TYPE_OF = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}


def is_plain(types: frozenset[str]) -> bool:
    """Whether a value of these types is always a string."""
    return not types or types == {"string"}


def typed_json(text: str, types: frozenset[str]) -> str:
    """The JSON of the value in ``text``; a string if it fits no other of ``types``."""
    bare = text.strip()
    if "null" in types and bare in ("null", "None"):
        return "null"
    if "boolean" in types and bare.lower() in ("true", "false"):
        return bare.lower()
    try:
        value = json.loads(bare)
    except (ValueError, RecursionError):
        return write_json(text)
    if isinstance(value, float) and not math.isfinite(value):
        return write_json(text)
    if isinstance(value, float) and "number" not in types and "integer" in types and value.is_integer():
        return str(int(value))
    kind = (
        "object" if isinstance(value, dict) else "array" if isinstance(value, list) else _TYPE_OF[type(value)]
    )
    if kind in types or (kind == "integer" and "number" in types):
        return write_json(value)
    return write_json(text)
