"""Makes constraints from schemas and structural tags, for all dialects of the API.

Only `core.ports.Grammars` decides whether a constraint can be enforced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from headrace.core.constraint import ANY_OBJECT, Constraint, ConstraintKind, json_constraint, json_text


class Structure(NamedTuple):
    """One structure inside free text: ``begin``, then JSON that follows ``schema``, then ``end``.

    For a tool call in Hermes' format, ``begin`` is ``<tool_call>{"name": "f", "arguments": `` and ``end`` is
    ``}</tool_call>``.
    """

    begin: str
    schema: Mapping[str, Any]
    end: str


def json_object() -> Constraint:
    """Any JSON object."""
    return Constraint(ConstraintKind.JSON, ANY_OBJECT)


def json_schema(schema: Mapping[str, Any] | bool | str) -> Constraint:
    """Only JSON that follows ``schema``.

    Raises:
        UnusableConstraint: the schema is not JSON, or too long.
    """
    return json_constraint(schema)


def tool_call_array(tools: Mapping[str, Mapping[str, Any]], *, most: int | None = None) -> Constraint:
    """A JSON array of at least one and at most ``most`` calls ``{"name": …, "arguments": …}`` of ``tools``.

    ``tools`` has the schema of the parameters of each function; a reference in a schema points into the same schema.

    Raises:
        UnusableConstraint: a schema is not JSON, or the schemas are too long together.
    """
    shared: dict[str, Any] = {}
    calls = [_call(name, schema, number, shared) for number, (name, schema) in enumerate(tools.items())]
    array: dict[str, Any] = {"type": "array", "items": {"anyOf": calls}, "minItems": 1}
    if most is not None:
        array["maxItems"] = most
    return json_constraint(array | ({"$defs": shared} if shared else {}))


def structural_tag(
    structures: Sequence[Structure], triggers: Sequence[str], *, required: bool = False, many: bool = True
) -> Constraint:
    """Free text in which each of ``triggers`` begins one of ``structures``, which must follow its schema.

    ``required``: no free text, but one structure, or with ``many`` one or several in sequence. Otherwise the output may
    have none, and ``many`` has no effect.

    Raises:
        UnusableConstraint: a schema is not JSON, or the schemas are too long together.
    """
    tag: dict[str, Any] = {
        "structures": [dict(structure._asdict()) for structure in structures],
        "triggers": list(triggers),
    }
    if required:
        tag |= {"required": True, "many": many}
    return Constraint(ConstraintKind.STRUCTURAL_TAG, json_text(tag, "the structural tag"))


def after(constraint: Constraint, marker: str) -> Constraint:
    """The same constraint for a model that reasons first: it applies after ``marker``, such as ``</think>``."""
    return replace(constraint, after=marker)


def _call(name: str, schema: Mapping[str, Any], number: int, shared: dict[str, Any]) -> dict[str, Any]:
    arguments = dict(schema)
    for key in ("$defs", "definitions"):
        for inner, value in dict(arguments.pop(key, None) or {}).items():
            shared[f"{number}.{inner}"] = _renamed(value, number)
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": _renamed(arguments, number)},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _renamed(value: Any, number: int) -> Any:
    """``value`` with its references to definitions changed to where `_call` has moved them."""
    if isinstance(value, list):
        return [_renamed(each, number) for each in value]
    if not isinstance(value, Mapping):
        return value
    renamed = {key: _renamed(each, number) for key, each in value.items()}
    target = value.get("$ref")
    if isinstance(target, str):
        for key in ("#/$defs/", "#/definitions/"):
            if target.startswith(key):
                renamed["$ref"] = f"#/$defs/{number}.{target.removeprefix(key)}"
    return renamed
