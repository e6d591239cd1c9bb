"""JSON schemas compiled to rules whose texts satisfy them exactly.

```
 parts      the schemas that one value must satisfy together: a schema, the targets of its $ref, its allOf …
 rule       per set of parts, made once:  anyOf ─► one alternative per option
                                          otherwise one alternative per type that all parts allow
 children   the parts of an item or a property are those that each part of the parent has for it
```
A schema may refer to itself, since a set of parts that was met before is the same rule. Numbers are exact (`decimals`),
a string has one spelling (`strings`), and what derives no text is removed (`rules`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from typing import Any
from urllib.parse import unquote

from headrace.compute.grammar import decimals, strings
from headrace.compute.grammar.rules import Alternative, Repeat, Rules, all_of, matches, matches_nothing
from headrace.core.constraint import UnusableConstraint

TYPES = ("null", "boolean", "number", "string", "array", "object")
REFUSED = (
    "not",
    "if",
    "then",
    "else",
    "contains",
    "minContains",
    "maxContains",
    "uniqueItems",
    "propertyNames",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "unevaluatedItems",
    "unevaluatedProperties",
    "$dynamicRef",
    "$recursiveRef",
)
"""Keywords that no grammar enforces."""

APPLIED = frozenset(
    (
        *(
            "$ref",
            "allOf",
            "anyOf",
            "oneOf",
            "const",
            "enum",
            "type",
            "pattern",
            "format",
            "minLength",
            "maxLength",
        ),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minItems", "maxItems"),
        *(
            "items",
            "prefixItems",
            "additionalItems",
            "properties",
            "patternProperties",
            "additionalProperties",
        ),
        *("required", "minProperties", "maxProperties"),
    )
)
"""Keywords that are enforced; all others are notes."""

MAX_COUNT = 1_000_000
"""The largest number of items, properties or characters that a keyword may demand."""

MAX_REGIONS = 64

MAX_REMAINDERS = 100_000
"""The largest number whose multiples are found by their remainders; that many take half a second to compile."""

MAX_CHECKS = 1_000
"""The most terminals of a schema that are tested for whether they match nothing; one takes about half a millisecond."""

MAX_OPTIONS = 256
"""The most alternatives of a ``oneOf``, each two of which are compared."""

MAX_COMPARED = 20_000
"""The most rules that all comparisons of a schema make together."""

_ABSENT = object()
_LEGACY = ("draft-03", "draft-04", "draft-05", "draft-06", "draft-07", "2019-09")


@dataclass(frozen=True, slots=True)
class Part:
    """A schema at a JSON pointer, without the keywords of ``skip`` (they are other parts already)."""

    place: str
    skip: frozenset[str] = frozenset()
    node: Any = field(default=None, compare=False)

    def get(self, keyword: str) -> Any:
        """The value of a keyword; `_ABSENT` if there is none."""
        return _ABSENT if keyword in self.skip else self.node.get(keyword, _ABSENT)

    @property
    def allows_all(self) -> bool:
        """Whether no keyword is left that restricts a value."""
        return self.node is True or (
            self.node is not False and not any(key in APPLIED and key not in self.skip for key in self.node)
        )

    def without(self, *keywords: str) -> Part:
        """The same part without some keywords."""
        return Part(self.place, self.skip | frozenset(keywords), self.node)

    def wrong(self, keyword: str, why: str) -> UnusableConstraint:
        """The error of a keyword."""
        return UnusableConstraint(f"keyword '{keyword}' at '{self.place}': {why}")


Parts = tuple[Part, ...]


def json_rules(
    schema: Any, prefix: str, whitespace: str, *, root: Any = None, place: str = "#"
) -> tuple[str, list[str]]:
    """The rule of a JSON schema and all lines of Lark that it needs; their names begin with ``prefix``.

    A schema that is a part of ``root``, at the pointer ``place``, refers to the parts of ``root``.

    Raises:
        UnusableConstraint: the schema cannot be enforced.
    """
    made = _Compiler(schema if root is None else root, prefix, whitespace)
    start = made.compiled((made.part(place, schema),))
    if (circular := made.rules.circular()) is not None:
        raise UnusableConstraint(
            f"the schema at '{made.place(circular)}' refers to itself, so no text satisfies it"
        )
    productive = made.rules.productive()
    if start not in productive:
        raise UnusableConstraint(f"no value satisfies the schema at '{made.unsatisfied(start, productive)}'")
    return made.rules.name(start), made.rules.lines(start, productive)


class _Compiler:
    """One schema; ``wide``: the texts of at least all values that satisfy it, to find what can overlap."""

    def __init__(self, root: Any, prefix: str, whitespace: str, wide: bool = False) -> None:
        self.rules = Rules(prefix)
        self._root = root
        self.wide = wide
        self._known: dict[Parts, int] = {}
        self._pending: list[tuple[int, Parts]] = []
        self._checked: set[str] = set()
        self._compared = 0
        self._empty: dict[str, bool] = {}
        dialect = root.get("$schema") if isinstance(root, Mapping) else None
        self._legacy = isinstance(dialect, str) and any(each in dialect for each in _LEGACY)
        self._ignores_siblings = self._legacy and "2019-09" not in str(dialect)  # those of $ref
        self._whitespace = whitespace
        self._anchors: dict[str, str] | None = None

    # -- sets of parts -----------------------------------------------------------------------------

    def compiled(self, parts: Parts) -> int:
        """The rule of the values that satisfy ``parts``, with all rules that it needs."""
        start = self.rule(parts)
        while self._pending:
            number, each = self._pending.pop()
            self.rules.alternatives[number] = list(self._alternatives(each))
        return start

    def rule(self, parts: Parts) -> int:
        """The rule of the values that satisfy ``parts``; it may be made later."""
        parts = tuple(dict.fromkeys(each for each in parts if not each.allows_all))
        found = self._known.get(parts)
        if found is None:
            found = self._known[parts] = self.rules.new()
            self._pending.append((found, parts))
        return found

    def part(self, place: str, node: Any) -> Part:
        """The part of a schema.

        Raises:
            UnusableConstraint: it is no schema, or has a keyword that is not supported.
        """
        if not isinstance(node, Mapping | bool):
            raise UnusableConstraint(f"the schema at '{place}' must be an object, true or false")
        if isinstance(node, Mapping) and place not in self._checked:
            self._checked.add(place)
            refused = [key for key in REFUSED if key in node]
            if refused:
                shown = ", ".join(f"'{key}'" for key in refused)
                raise UnusableConstraint(f"keyword {shown} at '{place}' is not supported")
            if place != "#" and isinstance(node.get("$id"), str):
                raise UnusableConstraint(f"keyword '$id' at '{place}' is supported at '#' alone")
        return Part(place, frozenset(), node)

    def place(self, number: int) -> str:
        """The place of the last of a rule's parts; empty if it has none."""
        return next((parts[-1].place for parts, rule in self._known.items() if rule == number and parts), "")

    def unsatisfied(self, number: int, productive: set[int]) -> str:
        """The place of the first schema behind ``number`` that no value satisfies."""
        place, seen = "#", set[int]()
        waiting = [number]
        while waiting:
            found = waiting.pop()
            if found in seen:
                continue
            seen.add(found)
            place = self.place(found) or place
            alternatives = self.rules.alternatives[found]
            if len(alternatives) == 1:
                waiting += [
                    each for each in alternatives[0] if isinstance(each, int) and each not in productive
                ][:1]
        return place

    def _flat(self, parts: Parts) -> Parts | None:
        """Parts without references and ``allOf``; None if one is false."""
        made: dict[Part, None] = {}

        def add(part: Part, open_: tuple[str, ...]) -> bool:
            if part.node is True or part in made:
                return True
            if part.node is False:
                return False
            if part.place in open_:
                raise part.wrong("$ref", "it refers to itself, so no text satisfies it")
            target = self._target(part)
            if target and self.wide and self._ignores_siblings:
                return add(target[0], (*open_, part.place))
            inner = [*target, *self._several(part, "allOf")]
            made[part.without("$ref", "allOf") if inner else part] = None
            return all(add(each, (*open_, part.place)) for each in inner)

        return tuple(made) if all(add(each, ()) for each in parts) else None

    def _alternatives(self, parts: Parts) -> Iterator[Alternative]:
        flat = self._flat(parts)
        if flat is None:
            return
        for part in flat:
            for keyword in ("anyOf", "oneOf"):
                if part.get(keyword) is not _ABSENT:
                    options = self._several(part, keyword)
                    rest = tuple(each.without(keyword) if each is part else each for each in flat)
                    if keyword == "oneOf" and not self.wide:
                        self._check_apart(part, rest, options)
                    yield from ((self.rule((*rest, option)),) for option in options)
                    return
        yield from self._typed(flat)

    def _check_apart(self, part: Part, rest: Parts, options: Sequence[Part]) -> None:
        """Refuse a ``oneOf`` if a value may satisfy two of its options."""
        if len(options) > MAX_OPTIONS:
            raise part.wrong("oneOf", f"more than {MAX_OPTIONS} alternatives are not supported; use anyOf")
        wide = _Compiler(self._root, "wide", "", wide=True)
        flat = [each for each in (wide._flat((*rest, option)) for option in options) if each is not None]
        tags = [wide._tags(each) for each in flat]
        for i, one in enumerate(flat):
            for k in range(i + 1, len(flat)):
                if _differ(tags[i], tags[k]):
                    continue
                both = _Compiler(self._root, "both", "", wide=True)
                both._empty = self._empty
                start = both.compiled(tuple(dict.fromkeys((*one, *flat[k]))))
                self._compared += len(both.rules.alternatives)
                if start in both.rules.productive():
                    raise part.wrong("oneOf", "alternatives that may overlap are not supported; use anyOf")
                if self._compared > MAX_COMPARED:
                    raise part.wrong("oneOf", "the alternatives are too large to compare; use anyOf")

    def _tags(self, parts: Parts) -> _Tags:
        constants: dict[str, set[Any]] = {}
        for part in parts:
            for name, inner in self._properties(part).named.items():
                values = _values(self._flat((inner,)) or ())
                if values is not None:
                    these = {_same(value) for value in values}
                    constants[name] = constants[name] & these if name in constants else these
        return _kinds(parts)[0], {name for part in parts for name in _names(part)}, constants

    def _several(self, part: Part, keyword: str) -> list[Part]:
        given = part.get(keyword)
        if given is _ABSENT:
            return []
        if not isinstance(given, list) or not given:
            raise part.wrong(keyword, "it must be a list of schemas that is not empty")
        return [self.part(f"{part.place}/{keyword}/{i}", each) for i, each in enumerate(given)]

    def _target(self, part: Part) -> list[Part]:
        reference = part.get("$ref")
        if reference is _ABSENT:
            return []
        if not isinstance(reference, str):
            raise part.wrong("$ref", "it must be a string")
        base, _, fragment = reference.partition("#")
        own = self._root.get("$id") if isinstance(self._root, Mapping) else None
        if base and base != (own.rstrip("#") if isinstance(own, str) else None):
            raise part.wrong(
                "$ref", f"{reference!r:.80} is outside the schema; remote references are refused"
            )
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            fragment = self._anchor(fragment, part)
        found, place = self._root, "#"
        for step in fragment.split("/")[1:]:
            place += f"/{step}"
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(found, Mapping):
                found = found.get(name, _ABSENT)
            elif isinstance(found, list) and name.isascii() and name.isdigit() and int(name) < len(found):
                found = found[int(name)]
            else:
                found = _ABSENT
        if found is _ABSENT:
            raise part.wrong("$ref", f"there is no '{reference}' in the schema")
        return [self.part(place, found)]

    def _anchor(self, name: str, part: Part) -> str:
        """The pointer to an ``$anchor``."""
        if self._anchors is None:
            self._anchors = {}
            waiting: list[tuple[str, Any]] = [("", self._root)]
            while waiting:
                place, node = waiting.pop()
                inner = list(node.items() if isinstance(node, Mapping) else enumerate(node))
                self._anchors.update(
                    (each, place) for key, each in inner if key == "$anchor" and isinstance(each, str)
                )
                waiting += [
                    (f"{place}/{_escaped(str(key))}", each)
                    for key, each in inner
                    if isinstance(each, Mapping | list)
                ]
        if name not in self._anchors:
            raise part.wrong("$ref", f"there is no '#{name}' in the schema")
        return self._anchors[name]

    # -- types ---------------------------------------------------------------------------------------

    def _typed(self, parts: Parts) -> Iterator[Alternative]:
        kinds, integer = _kinds(parts)
        values = _values(parts)
        if values is not None:
            yield from self._constants(parts, kinds, integer, values)
            return
        for kind in TYPES:
            if kind not in kinds:
                continue
            match kind:
                case "null":
                    yield (self.rules.terminal('"null"'),)
                case "boolean":
                    yield (self.rules.terminal('"true" | "false"'),)
                case "number":
                    yield from self._number(parts, integer)
                case "string":
                    yield from self._string(parts, None)
                case "array":
                    yield from self._array(parts)
                case "object":
                    yield from self._object(parts)

    def _constants(
        self, parts: Parts, kinds: set[str], integer: bool, values: Sequence[Any]
    ) -> Iterator[Alternative]:
        """The alternatives of ``enum`` and ``const``."""
        others = tuple(part.without("enum", "const") for part in parts)
        numbers = self._range(parts, integer)
        texts, digits = [], []
        for value in values:
            kind = _kind(value)
            if kind not in kinds:
                continue
            if kind in ("null", "boolean"):
                yield (self.rules.terminal(json.dumps(json.dumps(value))),)
            elif kind == "number":
                digits += [Decimal(value)] if numbers.has(Decimal(value)) else []
            elif kind == "string":
                texts.append(value)
            else:
                yield (self.rule((*others, _constant(value))),)
        if digits:
            yield (self.rules.terminal(decimals.one_of(digits)),)
        if texts:
            yield from self._string(parts, texts)

    # -- numbers and strings ---------------------------------------------------------------------------

    def _range(self, parts: Parts, integer: bool) -> decimals.Range:
        lows: list[tuple[Decimal, bool]] = []
        highs: list[tuple[Decimal, bool]] = []
        made = decimals.Range(integer=integer)
        for part in parts:
            for plain, exclusive, into in (
                ("minimum", "exclusiveMinimum", lows),
                ("maximum", "exclusiveMaximum", highs),
            ):
                closed, opened = _bound(part, plain), part.get(exclusive)
                if closed is not None:  # a boolean says that the other keyword's bound is open, as in draft 4
                    into.append((closed, opened is True))
                if opened is not _ABSENT and not isinstance(opened, bool):
                    into.append((_bound(part, exclusive) or Decimal(0), True))
            step = _bound(part, "multipleOf")
            if step is not None:
                if not step:
                    raise part.wrong("multipleOf", "it must not be 0")
                made = made.with_step(abs(Fraction(step)))
        low = max(lows, default=(None, False), key=lambda each: each)
        high = min(highs, default=(None, False), key=lambda each: (each[0], not each[1]))
        return decimals.Range(low[0], high[0], low[1], high[1], integer, made.step)

    def _number(self, parts: Parts, integer: bool) -> Iterator[Alternative]:
        numbers = self._range(parts, integer).narrowed()
        if numbers is None:
            return
        terminal = decimals.terminal(numbers)
        if terminal and len(terminal) > decimals.LONG and matches_nothing(terminal):
            raise UnusableConstraint(
                f"the bounds of the number at '{parts[0].place}' have too many digits to be enforced together"
            )
        yield (self.rules.terminal(terminal) if terminal else self._multiples(parts, numbers),)

    def _multiples(self, parts: Parts, numbers: decimals.Range) -> int:
        """A rule of multiples whose last digits do not tell; llguidance has them between bounds that doubles have."""
        part = next(each for each in parts if each.get("multipleOf") is not _ABSENT)
        step = decimals.exact(numbers.step)
        if numbers.step.numerator > MAX_REMAINDERS:
            raise part.wrong("multipleOf", f"multiples of {step:f} with so many digits are not supported")
        node: dict[str, Any] = {"type": "integer" if numbers.integer else "number"}
        for keyword, value in (("multipleOf", step), ("minimum", numbers.low), ("maximum", numbers.high)):
            if value is None:
                continue
            if Decimal(repr(float(value))) != value or abs(value) >= 2**53:
                raise part.wrong("multipleOf", f"multiples of {step:f} with so many digits are not supported")
            node[keyword] = int(value) if value == value.to_integral_value() else float(value)
        node["x-guidance"] = {"whitespace_flexible": False}
        return self.rules.new(("%json " + json.dumps(node),))

    def _string(self, parts: Parts, texts: Sequence[str] | None) -> Iterator[Alternative]:
        least, most = self._limits(parts, "minLength", "maxLength")
        found: dict[str, tuple[Part, str]] = {}
        for part in parts:
            pattern, name = part.get("pattern"), part.get("format")
            if pattern is not _ABSENT:
                found.setdefault(self._pattern(part, "pattern", pattern, self.wide), (part, "pattern"))
            if name is not _ABSENT:
                if name not in strings.FORMATS:
                    raise part.wrong("format", f"the format {name!r:.80} is not supported")
                if not self.wide:
                    found.update((each, (part, "format")) for each in strings.format_terminals(name))
        if most is not None and least > most:
            return
        if texts is not None:
            texts = [each for each in texts if least <= len(each) and (most is None or len(each) <= most)]
            if not texts:
                return
        elif least or most is not None:
            found.setdefault(strings.lengths(least, most), (parts[0], "maxLength"))
        expressions = [*found, *([strings.literals(texts)] if texts is not None else [])]
        expression = all_of(expressions) if expressions else strings.ANY_STRING
        if found and self._matches_nothing(expression, *next(iter(found.values()))):
            return
        yield (self.rules.terminal(expression),)

    def _pattern(self, part: Part, keyword: str, pattern: Any, wide: bool) -> str:
        if not isinstance(pattern, str):
            raise part.wrong(keyword, "it must be a string")
        try:
            return strings.pattern_terminal(pattern, wide=wide)
        except UnusableConstraint as error:
            raise part.wrong(keyword, str(error)) from None

    def _matches_nothing(self, expression: str, part: Part, keyword: str) -> bool:
        known = self._empty.get(expression)
        if known is None:
            if len(self._empty) >= MAX_CHECKS:
                raise part.wrong(keyword, "the schema has too many patterns")
            try:
                known = matches_nothing(expression)
            except UnusableConstraint as error:
                raise part.wrong(keyword, str(error)) from None
            self._empty[expression] = known
        return known

    def _limits(self, parts: Parts, least: str, most: str) -> tuple[int, int | None]:
        lows = [_count(part, least) for part in parts]
        highs = [each for each in (_count(part, most) for part in parts) if each is not None]
        return max((each or 0 for each in lows), default=0), min(highs, default=None)

    # -- arrays ----------------------------------------------------------------------------------------

    def _array(self, parts: Parts) -> Iterator[Alternative]:
        least, most = self._limits(parts, "minItems", "maxItems")
        if most is not None and least > most:
            return
        given = [self._items(part) for part in parts]
        size = max((len(prefix) for prefix, _ in given), default=0)
        size = size if most is None else min(size, most)
        children = [
            self.rule(tuple(each for prefix, rest in given for each in (prefix[i : i + 1] or rest)))
            for i in range(size)
        ]
        tail = self.rule(tuple(each for _, rest in given for each in rest))
        comma = self._token(",")
        if not least:
            yield (self._token("[", "]"),)
        if most == 0:
            return
        bound = None if most is None else most - max(size, 1)
        after = self.rules.new()  # what may follow the last of the prefix
        if least <= max(size, 1):
            self.rules.alternatives[after].append(())
        if bound is None or bound > 0:
            repeat = Repeat((comma, tail), max(least - max(size, 1), 1), bound)
            self.rules.alternatives[after].append((repeat,))
        for i in range(len(children) - 1, 0, -1):
            longer: Alternative = (comma, children[i], after)
            after = self.rules.new(*([()] if least <= i else []), longer)
        yield (self._token("["), children[0] if children else tail, after, self._token("]", opens=False))

    def _items(self, part: Part) -> tuple[list[Part], list[Part]]:
        """The schemas of the first items, and that of the others."""
        first, others, name, rest = part.get("prefixItems"), part.get("items"), "prefixItems", "items"
        if isinstance(others, list):
            first, others, name, rest = others, part.get("additionalItems"), "items", "additionalItems"
        elif self._legacy:
            first = _ABSENT
        if first is not _ABSENT and not isinstance(first, list):
            raise part.wrong(name, "it must be a list of schemas")
        given: list[Any] = first if isinstance(first, list) else []
        return (
            [self.part(f"{part.place}/{name}/{i}", each) for i, each in enumerate(given)],
            [] if others is _ABSENT else [self.part(f"{part.place}/{rest}", others)],
        )

    def _token(self, before: str, behind: str = "", *, opens: bool = True) -> str:
        """A sign with the whitespace that may stand beside it."""
        white = f"(?:{self._whitespace})?" if self._whitespace else ""
        if behind:
            text = f"\\{before}{white}\\{behind}"
        elif before in ",:":
            text = f"{white}{before}{white}"
        else:
            text = f"\\{before}{white}" if opens else f"{white}\\{before}"
        return self.rules.terminal(f"/{text}/")

    # -- objects ---------------------------------------------------------------------------------------

    def _object(self, parts: Parts) -> Iterator[Alternative]:
        least, most = self._limits(parts, "minProperties", "maxProperties")
        required = {name: None for part in parts for name in _names(part)}
        if most is not None and (least > most or len(required) > most):
            return
        given = [self._properties(part) for part in parts]
        names = dict.fromkeys((*(name for each in given for name in each.named), *required))
        members = []
        children_of = [fields.of(names, self) for fields in given]
        for name in names:
            children = [each for fields in children_of for each in fields[name]]
            if any(each.node is False for each in children):
                if name in required:
                    return
                continue
            key = self.rules.terminal(json.dumps(strings.literal(name), ensure_ascii=False))
            members.append(((key, self._token(":"), self.rule(tuple(children))), name in required))
        free = self._free(given, names)
        if free is not None and least > len(members) + 1 and not self.wide:
            part = next(each for each in parts if each.get("minProperties") is not _ABSENT)
            raise part.wrong(
                "minProperties",
                f"{least} different names cannot be enforced where names are not listed in 'properties'",
            )
        if not least and not required:
            yield (self._token("{", "}"),)
        yield (
            self._token("{"),
            self._members(members, free, least, most),
            self._token("}", opens=False),
        )

    def _members(
        self,
        members: Sequence[tuple[Alternative, bool]],
        free: int | None,
        least: int,
        most: int | None,
    ) -> int:
        """The rule of at least one member: the named ones in their order, then free ones.

        A state is how many members there are before, as far as it matters. Free names may repeat, so they count as one
        for ``least``, and each for ``most``.
        """
        top = max(least, 1) if most is None else most
        comma = self._token(",")
        states: list[int] = []  # by count, the rule of the members behind
        for count in range(min(top, len(members)) + 1):
            rule = self.rules.new(*([()] if count >= max(least, 1) else []))
            room = None if most is None else most - count
            if free is not None and (room is None or room > 0) and (least - count <= 1 or self.wide):
                more = [] if room == 1 else [Repeat((comma, free), 0, None if room is None else room - 1)]
                self.rules.alternatives[rule].append((*([comma] if count else []), free, *more))
            states.append(rule)
        for i in range(len(members) - 1, -1, -1):
            member, needed = members[i]
            before = []
            for count in range(min(top, i) + 1):
                behind = min(count + 1, top) if most is None else count + 1
                taken = (
                    [(*([comma] if count else []), *member, states[behind])] if behind < len(states) else []
                )
                before.append(self.rules.new(*taken, *([] if needed else [(states[count],)])))
            states = before
        return states[0]

    def _free(self, given: Sequence[_Properties], names: Iterable[str]) -> int | None:
        """The rule of a member whose name is not listed; None if there can be none."""
        patterns = list(dict.fromkeys(each for fields in given for each in fields.patterns))
        regions: list[tuple[frozenset[str], tuple[str, ...]]] = [(frozenset(), self._unlisted(names))]
        for pattern in patterns:
            part = next(fields.part for fields in given if pattern in fields.patterns)
            inside = self._pattern(part, "patternProperties", pattern, self.wide)
            outside = f"~({self._pattern(part, 'patternProperties', pattern, not self.wide)})"
            regions = [
                (taken | ({pattern} if within is inside else set()), (*keys, within))
                for taken, keys in regions
                for within in (inside, outside)
                if not self._matches_nothing(all_of([*keys, within]), part, "patternProperties")
            ]
            if len(regions) > MAX_REGIONS:
                raise part.wrong("patternProperties", "too many patterns that overlap")
        found = []
        for taken, keys in regions:
            children = tuple(each for fields in given for each in fields.free(taken))
            if not any(each.node is False for each in children):
                found.append((self.rules.terminal(all_of(keys)), self._token(":"), self.rule(children)))
        return self.rules.new(*found) if found else None

    def _unlisted(self, names: Iterable[str]) -> tuple[str, ...]:
        listed = list(names)
        return (strings.ANY_STRING, *([f"~({strings.literals(listed)})"] if listed else []))

    def _properties(self, part: Part) -> _Properties:
        named, patterns, others = [
            default if part.get(keyword) is _ABSENT else part.get(keyword)
            for keyword, default in (
                ("properties", {}),
                ("patternProperties", {}),
                ("additionalProperties", True),
            )
        ]
        for keyword, found in (("properties", named), ("patternProperties", patterns)):
            if not isinstance(found, Mapping):
                raise part.wrong(keyword, "it must be an object of schemas")
        place = part.place
        return _Properties(
            part,
            {name: self.part(f"{place}/properties/{_escaped(name)}", each) for name, each in named.items()},
            {
                name: self.part(f"{place}/patternProperties/{_escaped(name)}", each)
                for name, each in patterns.items()
            },
            self.part(f"{place}/additionalProperties", others),
        )

    def matching(self, part: Part, pattern: str, names: Iterable[str], wide: bool) -> set[str]:
        """The names that a pattern of ``patternProperties`` matches, in all dialects or with ``wide`` in any."""
        expression = self._pattern(part, "patternProperties", pattern, wide)
        written = {strings.literal(name): name for name in names}
        try:
            return {written[each] for each in matches(expression, written)}
        except UnusableConstraint as error:
            raise part.wrong("patternProperties", str(error)) from None


@dataclass(frozen=True, slots=True)
class _Properties:
    """The schemas that a part has for properties: by name, by pattern, and for all others."""

    part: Part
    named: Mapping[str, Part]
    patterns: Mapping[str, Part]
    others: Part

    def of(self, names: Iterable[str], compiler: _Compiler) -> dict[str, list[Part]]:
        """By name, the schemas of properties."""
        names = list(names)
        certain, possible = (
            {
                pattern: compiler.matching(self.part, pattern, names, wide)
                for pattern in (self.patterns if names else ())
            }
            for wide in (False, True)
        )
        # where dialects disagree whether a pattern matches, both readings must hold
        taken, excluded = (certain, possible) if compiler.wide else (possible, certain)
        made = {}
        for name in names:
            found = [self.patterns[pattern] for pattern, those in taken.items() if name in those]
            if name in self.named:
                found.insert(0, self.named[name])
            elif not any(name in those for those in excluded.values()):
                found.append(self.others)
            made[name] = found
        return made

    def free(self, taken: frozenset[str]) -> list[Part]:
        """The schemas of a property that has no name here, and matches the patterns ``taken``."""
        found = [each for pattern, each in self.patterns.items() if pattern in taken]
        return found or [self.others]


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _bound(part: Part, keyword: str) -> Decimal | None:
    given = part.get(keyword)
    if given is _ABSENT:
        return None
    if isinstance(given, bool) or not isinstance(given, int | float | Decimal):
        raise part.wrong(keyword, "it must be a number")
    value = Decimal(repr(given)) if isinstance(given, float) else Decimal(given)
    if value and not -decimals.MAX_DIGITS <= value.adjusted() <= decimals.MAX_DIGITS:
        raise part.wrong(keyword, f"it has more than {decimals.MAX_DIGITS} digits")
    return value


def _count(part: Part, keyword: str) -> int | None:
    given = part.get(keyword)
    if given is _ABSENT:
        return None
    if (
        isinstance(given, bool)
        or not isinstance(given, int | float | Decimal)
        or given != int(given)
        or given < 0
    ):
        raise part.wrong(keyword, "it must be a whole number that is not negative")
    if keyword.startswith("min") and given > MAX_COUNT:
        raise part.wrong(keyword, f"more than {MAX_COUNT} cannot be enforced")
    return min(int(given), MAX_COUNT)


def _names(part: Part) -> list[str]:
    given = part.get("required")
    if given is _ABSENT or isinstance(given, bool):  # a boolean in draft 3
        return []
    if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
        raise part.wrong("required", "it must be a list of names")
    return given


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, str):
        return "string"
    if isinstance(value, list):
        return "array"
    return "object" if isinstance(value, Mapping) else "number"


def _kinds(parts: Parts) -> tuple[set[str], bool]:
    """The types that all parts allow, and whether numbers must be whole."""
    kinds, integer = set(TYPES), False
    for part in parts:
        given = part.get("type")
        if given is _ABSENT:
            continue
        names = given if isinstance(given, list) else [given]
        for name in names:
            if name not in (*TYPES, "integer"):
                raise part.wrong("type", f"{name!r:.80} is not a JSON type")
        kinds &= {"number" if name == "integer" else name for name in names}
        integer |= "integer" in names and "number" not in names
    return kinds, integer


_Tags = tuple[set[str], set[str], dict[str, set[Any]]]
"""Of an alternative: its types, its required properties, and by property the constants that it allows."""


def _differ(one: _Tags, other: _Tags) -> bool:
    """Whether two alternatives have no type in common, or are objects that differ in the constant of a property."""
    kinds = one[0] & other[0]
    if kinds != {"object"}:
        return not kinds
    mine, theirs = one[2], other[2]
    return any(
        not (constants & theirs[name])
        for name, constants in mine.items()
        if name in theirs and (name in one[1] or name in other[1])
    )


def allowed_values(part: Part) -> list[Any]:
    """The values of ``enum`` and ``const`` of one part that have its type."""
    kinds, integer = _kinds((part,))
    return [
        each
        for each in _values((part,)) or ()
        if _kind(each) in kinds and not (integer and _kind(each) == "number" and each != int(each))
    ]


def _same(value: Any) -> Any:
    """A key that equal JSON values share: 1 equals 1.0, and true does not equal 1."""
    kind = _kind(value)
    if kind == "array":
        return kind, tuple(_same(each) for each in value)
    if kind == "object":
        return kind, frozenset((name, _same(each)) for name, each in value.items())
    return kind, value


def _values(parts: Parts) -> list[Any] | None:
    """The values that ``enum`` and ``const`` of all parts allow; None if they allow any."""
    found: dict[Any, Any] | None = None
    for part in parts:
        const, enum = part.get("const"), part.get("enum")
        for keyword, given in (("const", [const]), ("enum", enum)):
            if part.get(keyword) is _ABSENT:
                continue
            if not isinstance(given, list):
                raise part.wrong(keyword, "it must be a list")
            these = {_same(value): value for value in given}
            found = these if found is None else {key: each for key, each in found.items() if key in these}
    return None if found is None else list(found.values())


def _constant(value: Any) -> Part:
    """The schema of one array or object."""
    if isinstance(value, list):
        items = [{"const": each} for each in value]
        node: Any = {"type": "array", "prefixItems": items, "minItems": len(value), "maxItems": len(value)}
    else:
        fields = {name: {"const": each} for name, each in value.items()}
        node = {
            "type": "object",
            "properties": fields,
            "required": list(value),
            "additionalProperties": False,
        }
    return Part(f"= {json.dumps(value, default=str)}", frozenset(), node)
