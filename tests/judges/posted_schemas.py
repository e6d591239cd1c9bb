"""Schemas of the kinds that people send to structured-output APIs: extraction, classification, tools, forms.

Each template comes alone, described, in a list, as a part of a result and beside an error. Some use keywords that no
grammar can enforce, since people send those too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Schema = dict[str, Any]

S: Schema = {"type": "string"}
I: Schema = {"type": "integer"}  # noqa: E741
N: Schema = {"type": "number"}
B: Schema = {"type": "boolean"}


def _object(fields: Mapping[str, Any], optional: tuple[str, ...] = (), **more: Any) -> Schema:
    required = [name for name in fields if name not in optional]
    return {
        "type": "object",
        "properties": dict(fields),
        "required": required,
        "additionalProperties": False,
    } | more


def _list(items: Any, **more: Any) -> Schema:
    return {"type": "array", "items": items} | more


def _null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _enum(*values: Any) -> Schema:
    return {"type": "string", "enum": list(values)}


_STEP = _object({"explanation": S, "output": S})
_ADDRESS = _object(
    {"street": S, "city": S, "zip": {"type": "string", "pattern": r"^\d{5}$"}, "country": S}, ("zip",)
)
_NODE: Schema = {
    "$defs": {"node": _object({"value": I, "children": _list({"$ref": "#/$defs/node"}, maxItems=2)})},
    "$ref": "#/$defs/node",
}
_UI: Schema = _object(
    {
        "type": _enum("div", "button", "header", "section", "field", "form"),
        "label": S,
        "children": _list({"$ref": "#"}, maxItems=1),
        "attributes": _list(_object({"name": S, "value": S}), maxItems=2),
    }
)

TEMPLATES: Mapping[str, Schema] = {
    "math": _object({"steps": _list(_STEP, maxItems=3), "final_answer": S}),
    "event": _object(
        {"name": S, "date": {"type": "string", "format": "date"}, "participants": _list(S, maxItems=4)}
    ),
    "sentiment": _object(
        {"label": _enum("positive", "neutral", "negative"), "confidence": N | {"minimum": 0, "maximum": 1}}
    ),
    "moderation": _object(
        {"is_violating": B, "category": _null(_enum("violence", "sexual", "self_harm")), "why": _null(S)}
    ),
    "ui": _UI,
    "tree": _NODE,
    "linked list": {
        "$defs": {"n": _object({"v": I, "next": _null({"$ref": "#/$defs/n"})})},
        "$ref": "#/$defs/n",
    },
    "person": _object(
        {
            "name": S | {"minLength": 1, "maxLength": 80},
            "age": I | {"minimum": 0, "maximum": 150},
            "email": S | {"format": "email"},
        }
    ),
    "address": _ADDRESS,
    "invoice": _object(
        {
            "number": S | {"pattern": "^INV-[0-9]{4,8}$"},
            "issued": S | {"format": "date"},
            "lines": _list(
                _object({"item": S, "quantity": I | {"minimum": 1}, "price": N | {"minimum": 0}}),
                minItems=1,
                maxItems=3,
            ),
            "total": N,
            "currency": _enum("EUR", "USD", "GBP"),
        }
    ),
    "receipt cents": _object({"amount": N | {"multipleOf": 0.01}, "tip": _null(N)}),
    "resume": _object(
        {
            "name": S,
            "skills": _list(S, maxItems=5),
            "jobs": _list(
                _object({"company": S, "from": S, "to": _null(S), "duties": _list(S, maxItems=2)}), maxItems=2
            ),
            "address": _ADDRESS,
        }
    ),
    "recipe": _object(
        {"title": S, "minutes": I | {"exclusiveMinimum": 0}, "ingredients": _list(S, minItems=1, maxItems=4)}
    ),
    "weather tool": _object({"location": S, "unit": {"type": ["string", "null"], "enum": ["c", "f", None]}}),
    "function call": _object(
        {"name": {"const": "get_weather"}, "arguments": _object({"city": S, "days": I | {"maximum": 14}})}
    ),
    "calls": _list(
        {
            "anyOf": [
                _object({"name": {"const": name}, "arguments": _object({"x": N})}) for name in ("add", "sub")
            ]
        },
        minItems=1,
        maxItems=2,
    ),
    "query": _object(
        {
            "table": _enum("orders", "customers", "products"),
            "columns": _list(_enum("id", "status", "date"), minItems=1, maxItems=3),
            "where": _list(
                _object({"column": S, "operator": _enum("=", ">", "<", "!="), "value": {"anyOf": [S, N]}}),
                maxItems=2,
            ),
            "order_by": _enum("asc", "desc"),
        }
    ),
    "entities": _object(
        {
            "entities": _list(
                _object({"text": S, "type": _enum("PER", "ORG", "LOC"), "start": I, "end": I}), maxItems=3
            )
        }
    ),
    "ticket": _object(
        {
            "id": S | {"format": "uuid"},
            "priority": I | {"enum": [1, 2, 3]},
            "opened": S | {"format": "date-time"},
        }
    ),
    "grade": _object({"score": I | {"minimum": 1, "maximum": 10}, "reasoning": S | {"maxLength": 200}}),
    "free map": {"type": "object", "additionalProperties": N, "maxProperties": 3},
    "headers": {"type": "object", "patternProperties": {"^X-[A-Z]+$": S}, "additionalProperties": False},
    "coordinates": _object(
        {"position": {"type": "array", "prefixItems": [N, N], "minItems": 2, "maxItems": 2}}
    ),
    "pydantic union": {
        "$defs": {
            "Cat": _object(
                {"kind": {"const": "cat", "title": "Kind", "type": "string"}, "lives": I}, title="Cat"
            ),
            "Dog": _object(
                {"kind": {"const": "dog", "title": "Kind", "type": "string"}, "good": B}, title="Dog"
            ),
        },
        "properties": {
            "pet": {
                "discriminator": {
                    "mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"},
                    "propertyName": "kind",
                },
                "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
                "title": "Pet",
            }
        },
        "required": ["pet"],
        "title": "Owner",
        "type": "object",
    },
    "pydantic defaults": {
        "properties": {
            "a": {"default": 3, "title": "A", "type": "integer"},
            "b": {"anyOf": [S, {"type": "null"}], "default": None},
        },
        "title": "Settings",
        "type": "object",
    },
    "zod": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {"url": S | {"format": "uri"}, "ok": B},
        "required": ["url"],
        "additionalProperties": False,
    },
    "unique tags": _object({"tags": _list(S, uniqueItems=True)}),
    "conditional": _object({"a": B, "b": S}, ("b",))
    | {"if": {"properties": {"a": {"const": True}}}, "then": {"required": ["b"]}},
    "not empty": _object({"x": {"not": {"const": ""}}}),
    "remote": _object({"x": {"$ref": "https://example.com/schemas/x.json"}}),
    "look-ahead": _object({"password": S | {"pattern": r"^(?=.*\d)[a-z\d]{8,}$"}}),
    "phone": _object({"phone": S | {"pattern": r"^\+?[1-9]\d{6,14}$"}}),
    "color": _object({"color": S | {"pattern": "^#([0-9a-fA-F]{3}|[0-9a-fA-F]{6})$"}}),
    "semver": _object({"version": S | {"pattern": r"^\d+\.\d+\.\d+(-[a-z]+)?$"}, "published": B}),
    "config": _object(
        {
            "host": S | {"format": "hostname"},
            "port": I | {"minimum": 1, "maximum": 65535},
            "ip": S | {"format": "ipv4"},
            "tls": _null(_object({"cert": S})),
        }
    ),
    "table": _object({"rows": _list(_list({"type": ["string", "number", "null"]}, maxItems=3), maxItems=3)}),
    "plan": _object(
        {
            "goal": S,
            "tasks": _list(_object({"id": I, "depends_on": _list(I, maxItems=3), "done": B}), maxItems=3),
        }
    ),
    "translation": _object({"quelle": S, "übersetzung": S, "sprache": _enum("de", "fr", "日本語")}),
    "quotes in keys": _object({'say "hi"': S, "back\\slash": S, "tab\there": I}),
    "all of": {
        "allOf": [
            _object({"id": I}) | {"additionalProperties": True},
            {"type": "object", "properties": {"name": S}, "required": ["name"]},
        ]
    },
}


def posted() -> Iterator[tuple[str, Schema]]:
    """Each template in five variants, by name."""
    for name, schema in TEMPLATES.items():
        yield name, schema
        yield (
            f"{name}, described",
            {
                "$schema": "https://json-schema.org/draft/2020-12/schema",
                "title": name,
                "description": "As posted.",
            }
            | schema,
        )
        yield f"{name}, in a list", _list(_embedded(schema), minItems=1, maxItems=2) | _shared(schema)
        yield (
            f"{name}, as a result",
            _object({"thinking": S | {"maxLength": 60}, "result": _embedded(schema)}) | _shared(schema),
        )
        yield (
            f"{name}, or an error",
            {"anyOf": [_embedded(schema), _object({"error": S, "code": I})]} | _shared(schema),
        )


def _shared(schema: Schema) -> Schema:
    definitions = dict(schema.get("$defs", {}))
    if schema is _UI:
        definitions["ui"] = _renamed(schema)
    return {"$defs": definitions} if definitions else {}


def _embedded(schema: Schema) -> Schema:
    """A schema inside another: its definitions go to the root, and references to itself to a name there."""
    if schema is _UI:
        return {"$ref": "#/$defs/ui"}
    return {key: value for key, value in schema.items() if key not in ("$defs", "$schema")}


def _renamed(value: Any) -> Any:
    if isinstance(value, list):
        return [_renamed(each) for each in value]
    if isinstance(value, Mapping):
        return {
            key: "#/$defs/ui" if (key, each) == ("$ref", "#") else _renamed(each)
            for key, each in value.items()
        }
    return value
