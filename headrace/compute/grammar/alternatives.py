"""The meaning of ``oneOf``: the same as ``anyOf`` if no value satisfies two of its alternatives, and refused otherwise.

That two alternatives exclude each other is proved by showing that their conjunction is empty, type by type: types,
constants, ranges, lengths, required properties and items of tuples that contradict each other. What the proof does not
understand counts as no restriction, so it never claims too much. `plain` removes keywords that allow everything.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from itertools import product
from math import ceil, floor, isinf
from typing import Any
from urllib.parse import unquote

from headrace.core.constraint import UnusableConstraint

MAX_STEPS = 100_000
"""Maximum number of schemas and conjunctions that are examined for one constraint; about a second."""

MAX_BRANCHES = 64
"""Maximum number of cases into which the unions of a schema are split; more count as no restriction."""

MAX_DEPTH = 8
"""Maximum nesting of properties within which two alternatives are compared."""

_ONE = (
    *("items", "additionalItems", "additionalProperties", "contains", "not", "if", "then", "else"),
    *("propertyNames", "unevaluatedItems", "unevaluatedProperties"),
)
_MANY = ("anyOf", "allOf", "oneOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_USED = tuple(name for name in _NAMED if name not in ("$defs", "definitions"))
_TYPES = ("null", "boolean", "number", "string", "array", "object")
_LEGACY = re.compile(r"draft-0[3-7]")

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


def check_alternatives(schema: Any) -> None:
    """Raise `UnusableConstraint` for the first ``oneOf`` whose alternatives may overlap."""
    proof = _Proof(schema)
    for place, node in _reachable(schema, proof):
        options = node.get("oneOf")
        if isinstance(options, list) and not proof.exclusive(node, options):
            why = "alternatives that may overlap are not supported; use anyOf"
            raise UnusableConstraint(f"keyword 'oneOf' at '{place}': {why}")


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


def _children(place: str, node: Mapping[str, Any], named: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """The schemas directly in ``node``, with their JSON pointers."""
    for key, value in node.items():
        if key in _MANY and isinstance(value, list):
            yield from ((f"{place}/{key}/{at}", each) for at, each in enumerate(value))
        elif key in _ONE:
            yield f"{place}/{key}", value
        elif key in named and isinstance(value, Mapping):
            for name, each in value.items():
                yield f"{place}/{key}/{name.replace('~', '~0').replace('/', '~1')}", each


def _reachable(root: Any, proof: _Proof) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The schemas that a value may have to satisfy, with their JSON pointers."""
    seen: set[int] = set()
    waiting = [("#", root)]
    while waiting:
        place, node = waiting.pop()
        if not isinstance(node, Mapping) or id(node) in seen:
            continue
        seen.add(id(node))
        yield place, node
        waiting += _children(place, node, _NAMED if proof.misses_references else _USED)
        if isinstance(target := node.get("$ref"), str):
            waiting.append((target, proof.target(target)))


def _inner(node: Any) -> Iterator[Mapping[str, Any]]:
    """All schemas in ``node`` except itself."""
    for _, each in _children("", node, _NAMED) if isinstance(node, Mapping) else ():
        if isinstance(each, Mapping):
            yield each
            yield from _inner(each)


Nodes = tuple[Any, ...]
"""Schemas that one value must satisfy together."""


class _Proof:
    """Proofs that alternatives within one schema cannot overlap."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._steps = 0
        inner = list(_inner(root))
        self._follows = not any(isinstance(each.get("$id", each.get("id")), str) for each in inner)
        dialect = root.get("$schema") if isinstance(root, Mapping) else None
        self._legacy = isinstance(dialect, str) and _LEGACY.search(dialect) is not None
        targets = [each.get("$ref") for each in (root, *inner) if isinstance(each, Mapping)]
        self.misses_references = any(isinstance(each, str) and self.target(each) is True for each in targets)

    def exclusive(self, node: Mapping[str, Any], options: Sequence[Any]) -> bool:
        """Whether no value that satisfies the rest of ``node`` satisfies two of its options."""
        rest = {key: value for key, value in node.items() if key != "oneOf"}
        pairs = ((a, b) for at, a in enumerate(options) for b in options[at + 1 :])
        return all(self._empty((rest, a, b), 0) for a, b in pairs)

    # -- a conjunction of schemas that no value satisfies ------------------------------------------

    def _empty(self, nodes: Nodes, depth: int) -> bool:
        """Whether it is certain that no value satisfies all ``nodes``."""
        if depth > MAX_DEPTH:
            return False
        cases = [self._cases(node, frozenset()) for node in nodes]
        if not all(cases):
            return True
        count = 1
        for each in cases:
            count *= len(each)
        if count > MAX_BRANCHES**2:
            return False
        return all(self._contradict(sum(case, ()), depth) for case in product(*cases))

    def _cases(self, node: Any, open: frozenset[str]) -> list[Nodes]:
        """Conjunctions of schemas without unions and references; one of them holds for each value of ``node``."""
        self._steps += 1
        if node is False:
            return []
        if not isinstance(node, Mapping) or self._steps > MAX_STEPS:
            return [()]
        cases: list[Nodes] = [(node,)]
        target = node.get("$ref")
        if isinstance(target, str):
            followed = self._followed(target, open)
            if self._legacy:  # the keywords beside a reference are ignored
                return followed
            cases = _joined(cases, followed)
        for each in _list(node.get("allOf")):
            cases = _joined(cases, self._cases(each, open))
        for union in ("anyOf", "oneOf"):
            if isinstance(options := node.get(union), list):
                cases = _joined(cases, [case for each in options for case in self._cases(each, open)])
        return cases

    def _followed(self, target: str, open: frozenset[str]) -> list[Nodes]:
        found = self.target(target) if target not in open else True
        return self._cases(found, open | {target})

    def target(self, target: str) -> Any:
        """The schema that a reference names; True, which allows everything, if it is not known."""
        if not self._follows or not (target == "#" or target.startswith("#/")):
            return True
        found = self._root
        for step in target.split("/")[1:]:
            name = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and name.isascii() and name.isdigit() and int(name) < len(found):
                found = found[int(name)]
            elif isinstance(found, Mapping) and name in found:
                found = found[name]
            else:
                return True
        return found

    def _contradict(self, nodes: Nodes, depth: int) -> bool:
        """Whether no value satisfies all ``nodes``, by their own keywords."""
        self._steps += 1
        if self._steps > MAX_STEPS:
            return False
        values = [_values(node) for node in nodes if "const" in node or "enum" in node]
        if values:
            kept = [value for value in values[0] if all(_has(each, value) for each in values[1:])]
            return not any(all(_is_of(value, _types(node)) for node in nodes) for value in kept)
        types = [_types(node) for node in nodes]
        return all(
            any(not _may_be(kind, each) for each in types) or self._no_value(kind, types, nodes, depth)
            for kind in _TYPES
        )

    def _no_value(self, kind: str, types: Sequence[frozenset[str]], nodes: Nodes, depth: int) -> bool:
        match kind:
            case "number":
                whole = any("number" not in each for each in types)
                return _no_number(nodes, whole)
            case "string":
                return bool(_low(nodes, "minLength") > _high(nodes, "maxLength"))
            case "array":
                return _low(nodes, "minItems") > _high(nodes, "maxItems") or self._no_tuple(nodes, depth)
            case "object":
                needed = {
                    name for node in nodes for name in _list(node.get("required")) if isinstance(name, str)
                }
                least = max(len(needed), _low(nodes, "minProperties"))
                return least > _high(nodes, "maxProperties") or any(
                    self._empty(_property(nodes, name), depth + 1) for name in sorted(needed)
                )
        return False

    def _no_tuple(self, nodes: Nodes, depth: int) -> bool:
        """Whether an item that must be there cannot have a value."""
        longest = max((len(_tuple(node)) for node in nodes), default=0)
        counted = range(int(min(longest, _low(nodes, "minItems"))))
        return any(self._empty(tuple(_item(node, at) for node in nodes), depth + 1) for at in counted)


def _joined(some: list[Nodes], others: list[Nodes]) -> list[Nodes]:
    """The cases of a conjunction; only ``some`` if they were too many."""
    if len(some) * len(others) > MAX_BRANCHES:
        return some
    return [a + b for a in some for b in others]


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _types(node: Mapping[str, Any]) -> frozenset[str]:
    """The types that a schema allows by its keyword ``type``, with ``integer`` for whole numbers only."""
    found = node.get("type")
    named = [found] if isinstance(found, str) else found if isinstance(found, list) else _TYPES
    return frozenset(each for each in named if isinstance(each, str))


def _may_be(kind: str, types: frozenset[str]) -> bool:
    return kind in types or (kind == "number" and "integer" in types)


def _values(node: Mapping[str, Any]) -> list[Any]:
    """The values that a schema allows by ``const`` and ``enum``."""
    listed = _list(node.get("enum"))
    if "const" not in node:
        return listed
    return [node["const"]] if "enum" not in node or _has(listed, node["const"]) else []


def _has(values: Sequence[Any], value: Any) -> bool:
    return any(_same(each, value) for each in values)


def _same(a: Any, b: Any) -> bool:
    """Equality of JSON: 1 and 1.0 are equal, 1 and true are not."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return bool(a == b)


def _is_of(value: Any, types: frozenset[str]) -> bool:
    """Whether a value has one of these types; True if that is not certain."""
    if value is None:
        return "null" in types
    if isinstance(value, bool):
        return "boolean" in types
    if _is_number(value):
        return "number" in types or ("integer" in types and _is_whole(value))
    kind = "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"
    return kind in types


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | Decimal) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    if isinstance(value, Decimal):
        return bool(value == value.to_integral_value())
    return isinstance(value, int) or isinf(value) or float(value).is_integer()


def _low(nodes: Nodes, key: str) -> Any:
    return max((node[key] for node in nodes if _is_number(node.get(key))), default=0)


def _high(nodes: Nodes, key: str) -> Any:
    return min((node[key] for node in nodes if _is_number(node.get(key))), default=float("inf"))


def _no_number(nodes: Nodes, whole: bool) -> bool:
    """Whether the ranges of ``nodes`` have no number in common, or no whole number if only these are allowed."""
    lows = _bounds(nodes, "minimum", "exclusiveMinimum")
    highs = _bounds(nodes, "maximum", "exclusiveMaximum")
    if not lows or not highs:
        return False
    (low, low_open), (high, high_open) = max(lows), min(highs, key=lambda each: (each[0], not each[1]))
    if not whole:
        return bool(low > high or (low == high and (low_open or high_open)))
    first = floor(low) + 1 if low_open else ceil(low)
    last = ceil(high) - 1 if high_open else floor(high)
    return bool(first > last)


def _bounds(nodes: Nodes, closed: str, open: str) -> list[tuple[Any, bool]]:
    """The bounds of one side, and whether each is exclusive; a bound beyond 10^18 counts as none."""
    return [
        (bound, key == open)
        for node in nodes
        for key in (closed, open)
        if _is_number(bound := node.get(key)) and abs(bound) <= 10**18
    ]


def _property(nodes: Nodes, name: str) -> Nodes:
    """The schemas of a property of an object."""
    return tuple(_of_property(node, name) for node in nodes)


def _of_property(node: Mapping[str, Any], name: str) -> Any:
    given = node.get("properties")
    if isinstance(given, Mapping) and name in given:
        return given[name]
    if node.get("patternProperties"):
        return True
    return node.get("additionalProperties", True)


def _tuple(node: Mapping[str, Any]) -> list[Any]:
    """The schemas of the first items; drafts before 2020-12 have them in ``items``."""
    return _list(node.get("prefixItems")) or _list(node.get("items"))


def _item(node: Mapping[str, Any], at: int) -> Any:
    first = _tuple(node)
    if at < len(first):
        return first[at]
    rest = node.get("additionalItems" if isinstance(node.get("items"), list) else "items", True)
    return True if isinstance(rest, list) else rest
