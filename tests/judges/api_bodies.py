"""Requests drawn from an OpenAPI document: bodies that follow its schemas, and bodies with mutations.

Fields that mean something outside their schema (the model's name, a JSON schema, a grammar, ids) draw from a list of
plausible values first, so that most unchanged bodies get past validation. Mutations then put wrong types, huge, tiny
and nested values anywhere, and drop, double and invent fields.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

from hypothesis import strategies as st

Document = Mapping[str, Any]
Schema = Mapping[str, Any]

MAX_DEPTH = 6
LONGEST = 12
"""Elements of a drawn list, and optional fields of a drawn object, at most."""

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
SCHEMAS = (
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    {"type": "object", "properties": {"b": {"enum": ["x", "y"]}}, "additionalProperties": False},
    {"type": "object"},
    {"type": "object", "properties": {"c": {"$ref": "#/$defs/none"}}},
    {"type": "object", "properties": {"d": {"not": {}}}},
    {"type": "object", "patternProperties": {"(": {}}},
    {"type": "object", "properties": {"e": {"type": "string", "pattern": "(a|aa)+$"}}},
    {"type": "object", "properties": {"f": {"type": "array", "minItems": 3, "maxItems": 2}}},
    {"type": "object", "properties": {"g": {"type": "integer", "multipleOf": 0}}},
    {"$ref": "#"},
)
_CALLED = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
_USED = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
_USER = {"role": "user", "content": "Hi"}
CONVERSATIONS: tuple[list[dict[str, Any]], ...] = (
    [_USER],
    [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "\U0001f98a"}]}],
    [{"role": "system", "content": "Be brief."}, _USER],
    [_USER, {"role": "assistant", "content": "So"}],
    [
        _USER,
        {"role": "assistant", "tool_calls": [_CALLED]},
        {"role": "tool", "tool_call_id": "c", "content": "1"},
    ],
    [
        _USER,
        {"role": "assistant", "content": [{"type": "text", "text": "So"}, _USED]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "1"}]},
    ],
)
"""Histories with and without calls, of both APIs."""

ODD: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2,
    128,
    129,
    2**31 - 1,
    2**31,
    2**63,
    -(2**63) - 1,
    2**64,
    10**400,
    0.0,
    -0.0,
    0.5,
    1e-320,
    1e308,
    -1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    "\x00",
    "\ud800",
    "\U0001f98a",
    "1",
    "null",
    "a" * 3000,
    [],
    [None],
    [[]],
    [[[[[[[[[[]]]]]]]]]],
    [0] * 300,
    {},
    {"": None},
    {"type": "text"},
    {"type": "function"},
    {"type": "x" * 300},
    {"a": {"b": {"c": {"d": [{}]}}}},
)


class Place(NamedTuple):
    """What requests may name: the model, and ids that exist."""

    model: str
    ids: Sequence[str] = ()


class Sent(NamedTuple):
    """A drawn request. ``body`` is what a JSON or form body encodes; None without a body."""

    method: str
    route: str
    path: str
    body: Any = None
    media: str = ""


ENDLESS = frozenset({"/v1/dashboard/stream"})
"""Routes whose response has no end; drawn requests would wait for it."""


def operations(document: Document) -> list[tuple[str, str]]:
    """Method and path of every route with an end; those that end or delete something come last."""
    paths = {path: entry for path, entry in document["paths"].items() if path not in ENDLESS}
    routes = [(method.upper(), path) for path, entry in paths.items() for method in entry]
    return sorted(routes, key=lambda route: (route[0] == "DELETE", route[1].endswith("/cancel")))


@st.composite
def requests(draw: st.DrawFn, document: Document, method: str, route: str, place: Place) -> Sent:
    """A request to a route."""
    entry = document["paths"][route][method.lower()]
    path = route
    ids = st.sampled_from([*place.ids, "x", "..", "a/b", "%00", "\U0001f98a", "a" * 300])
    for parameter in entry.get("parameters", ()):
        id = draw(st.just(place.model) if parameter["name"] == "model" and draw(st.booleans()) else ids)
        path = path.replace(f"{{{parameter['name']}}}", quote(id, safe="") or "x")
    if method == "GET" and draw(st.booleans()):
        name = draw(st.sampled_from(["limit", "after", "order", "tenant", "purpose", "stream", "x"]))
        value = draw(st.sampled_from(["0", "1", "-1", "99999", "asc", "desc", "x", "", *place.ids]))
        path += f"?{name}={quote(value)}"
    if "requestBody" not in entry:
        return Sent(method, route, path)
    ((media, content),) = entry["requestBody"]["content"].items()
    body = draw(_Drawn(document["components"]["schemas"], place).value(content["schema"]))
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 1, 2, 3]))):
        body = draw(mutations(body))
    return Sent(method, route, path, body, media)


class _Drawn:
    """Strategies of schemas; ``schemas`` are the document's components."""

    def __init__(self, schemas: Mapping[str, Schema], place: Place) -> None:
        self._schemas = schemas
        self._hints = _hints(place)

    def value(self, schema: Schema, depth: int = 0) -> st.SearchStrategy[Any]:
        """Values that follow a schema."""
        if "$ref" in schema:
            return self.value(self._schemas[schema["$ref"].rpartition("/")[2]], depth)
        for union in ("anyOf", "oneOf"):
            if union in schema:
                return self._one_of(schema[union], depth)
        if "const" in schema:
            return st.just(schema["const"])
        if "enum" in schema:
            return st.sampled_from(schema["enum"])
        plain: Mapping[str, Callable[[Schema, int], st.SearchStrategy[Any]]] = {
            "object": self._object,
            "array": self._array,
            "string": lambda form, _: _text(form),
            "integer": lambda form, _: _integer(form),
            "number": lambda form, _: _number(form),
            "boolean": lambda form, _: st.booleans(),
            "null": lambda form, _: st.none(),
        }
        return plain[schema["type"]](schema, depth) if "type" in schema else JSON

    def _one_of(self, schemas: Sequence[Schema], depth: int) -> st.SearchStrategy[Any]:
        given = [schema for schema in schemas if schema.get("type") != "null"]
        if len(given) == len(schemas):
            return st.deferred(lambda: st.one_of([self.value(schema, depth + 1) for schema in given]))
        sometimes = st.sampled_from([False, False, False, True])
        return sometimes.flatmap(lambda null: st.none() if null else self._one_of(given, depth))

    def _array(self, schema: Schema, depth: int) -> st.SearchStrategy[list[Any]]:
        if depth > MAX_DEPTH:
            return st.just([])
        most = min(schema.get("maxItems", LONGEST), 3)
        return st.lists(
            self.value(schema.get("items", {}), depth + 1), min_size=schema.get("minItems", 0), max_size=most
        )

    def _object(self, schema: Schema, depth: int) -> st.SearchStrategy[dict[str, Any]]:
        fields = schema.get("properties")
        if fields is None:
            return st.dictionaries(TEXTS, self._free(schema, depth), max_size=3)
        required = [name for name in schema.get("required", ()) if name in fields]
        optional = [name for name in fields if name not in required]

        @st.composite
        def drawn(draw: st.DrawFn) -> dict[str, Any]:
            some: list[str] = []
            if optional and depth <= MAX_DEPTH:
                most = draw(st.sampled_from([2, 4, LONGEST]))
                some = draw(st.lists(st.sampled_from(optional), max_size=most, unique=True))
            return {name: draw(self._field(name, fields[name], depth)) for name in [*required, *some]}

        return drawn()

    def _free(self, schema: Schema, depth: int) -> st.SearchStrategy[Any]:
        more = schema.get("additionalProperties")
        return self.value(more, depth + 1) if isinstance(more, Mapping) else JSON

    def _field(self, name: str, schema: Schema, depth: int) -> st.SearchStrategy[Any]:
        plain = self.value(schema, depth + 1)
        hint = self._hints.get(name)
        if hint is None or "object" in (schema.get("type"), name):
            return plain
        mostly = st.sampled_from([True, True, True, True, True, True, True, False])
        return mostly.flatmap(lambda hinted: hint if hinted else plain)


def _hints(place: Place) -> dict[str, st.SearchStrategy[Any]]:
    ids = st.sampled_from([*place.ids, *place.ids, "x"])
    schema = st.sampled_from(SCHEMAS)
    small = st.integers(1, 8)
    return {
        "model": st.just(place.model),
        "messages": st.sampled_from(CONVERSATIONS) | st.sampled_from(CONVERSATIONS[:2]),
        "name": st.sampled_from(["f", "get_weather", "a-b"]),
        "tool_call_id": st.just("c"),
        "call_id": st.just("c"),
        "tool_use_id": st.just("c"),
        "purpose": st.just("batch"),
        "max_tokens": small,
        "max_completion_tokens": small,
        "max_output_tokens": small,
        "min_tokens": st.integers(0, 3),
        "n": st.integers(1, 3),
        "best_of": st.integers(1, 3),
        "temperature": st.sampled_from([0, 0.5, 1, 2]),
        "top_p": st.sampled_from([0.5, 1, 1.0]),
        "min_p": st.sampled_from([0, 0.5, 1]),
        "repetition_penalty": st.sampled_from([0.5, 1, 2]),
        "presence_penalty": st.sampled_from([-2, 0, 1.5]),
        "frequency_penalty": st.sampled_from([-2, 0, 1.5]),
        "prompt": st.sampled_from(["Once", ["a", "b"], [5, 6, 7], [[1], [2, 3]], "Hi \U0001f98a"]),
        "logit_bias": st.sampled_from([{}, {"5": 1}, {"5": -100, "6": 100}]),
        "stop": st.sampled_from(["a", ["b", "the"], []]),
        "metadata": st.sampled_from([{}, {"a": "b"}]),
        "deadline_ms": st.sampled_from([1, 50, 60_000]),
        "schema": schema,
        "parameters": schema,
        "input_schema": schema,
        "json": schema,
        "guided_json": schema,
        "regex": st.sampled_from(["[ab]+", "(a", "a{1,99999}", "(?=a)b", ""]),
        "guided_regex": st.sampled_from(["[ab]+", "\\d{3}", "*"]),
        "grammar": st.sampled_from(['start: "a" | "b"', 'root ::= "a"', "start: x", ""]),
        "guided_grammar": st.sampled_from(['start: "a"+', "start: start"]),
        "chat_template": st.sampled_from(["{{ messages[0].content }}", "{{ x.y.z }}", "{% for %}"]),
        "previous_response_id": ids,
        "input_file_id": ids,
        "request_id": ids,
        "id": ids,
        "endpoint": st.sampled_from(["/v1/chat/completions", "/v1/completions", "/x"]),
        "completion_window": st.sampled_from(["24h", "1m", "0h", "9d"]),
        "arguments": st.sampled_from(["{}", '{"a": 1}', "{", "[]", ""]),
        "file": st.sampled_from(["", "{}", "x\n", "\x00"]),
    }


def _text(schema: Schema) -> st.SearchStrategy[str]:
    if "pattern" in schema:
        return st.from_regex(schema["pattern"].removeprefix("^").removesuffix("$"), fullmatch=True)
    least = schema.get("minLength", 0)
    return st.text(
        st.characters(exclude_categories=["Cs"]),
        min_size=least,
        max_size=min(schema.get("maxLength", 20), 20),
    )


def _integer(schema: Schema) -> st.SearchStrategy[int]:
    least = schema.get("minimum", -(2**33))
    most = schema.get("maximum", schema.get("exclusiveMaximum", 2**33 + 1) - 1)
    return (
        st.sampled_from([least, most]) | st.integers(least, min(most, least + 20)) | st.integers(least, most)
    )


def _number(schema: Schema) -> st.SearchStrategy[float]:
    least = schema.get("minimum", schema.get("exclusiveMinimum"))
    return st.floats(least, schema.get("maximum"), allow_nan=False, allow_infinity=False)


@st.composite
def mutations(draw: st.DrawFn, body: Any) -> Any:
    """A body with one change somewhere."""
    body = copy.deepcopy(body)
    places = list(_places(body))
    odd = st.sampled_from(ODD) | JSON
    if not places:
        return draw(odd)
    parent, key = draw(st.sampled_from(places))
    match draw(st.sampled_from(["replace", "replace", "replace", "drop", "invent", "double", "whole"])):
        case "replace":
            parent[key] = draw(odd)
        case "drop":
            del parent[key]
        case "invent" if isinstance(parent, dict):
            parent[draw(st.sampled_from(["x", "", "type", "content", "temprature", "__class__"]))] = draw(odd)
        case "double" if isinstance(parent, list):
            parent.append(copy.deepcopy(parent[key]))
        case "whole":
            return draw(odd) if draw(st.booleans()) else body
    return body


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every place in a body that can be changed: its container, and its key there."""
    found: list[tuple[Any, Any]] = []
    todo = [value]
    while todo:
        parent = todo.pop()
        keys = (
            list(parent)
            if isinstance(parent, dict)
            else range(len(parent))
            if isinstance(parent, list)
            else ()
        )
        for key in keys:
            found.append((parent, key))
            todo.append(parent[key])
    return found
