"""Schemas and texts judged in both directions: is what the grammar accepts valid, and is what is valid accepted?

Random schemas over all keywords are compiled. Texts come from the grammar itself (random tokens that its mask allows),
from values around the schema's limits, and from both with other spellings of numbers, names, order and whitespace. The
judge is `jsonschema` with numbers at their exact value and names as they decode.

- *unsound*: the grammar accepts a text that is not valid.
- *dead end*: the mask is empty before a text is complete.
- *refused*: valid, and not accepted. The reason is found by writing the same value as the grammar writes it.
"""

from __future__ import annotations

import argparse
import datetime
import decimal
import itertools
import json
import math
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import jsonschema
import numpy as np
from jsonschema.validators import extend
from llguidance import LLMatcher, LLTokenizer
from rich.console import Console

from headrace.compute.grammar.compiler import LIMITS
from headrace.compute.grammar.sources import read_schema, schema_grammar
from headrace.core.constraint import UnusableConstraint

say = Console(soft_wrap=True, highlight=False, markup=False).print

NAMES = ("a", "b", "id", "x1", "x2", "ü", 'q"', "\n", "")
TEXTS = ("a", "ab", "", "x", "é", "ü\n", 'say "x"', "\\", "12", "a\nb", "\x01", "2024-02-29", "😀", "\u2028")
PATTERNS = (
    r"^[A-Z]{1,3}-\d+$",
    "^(a|b)*c$",
    "[0-9a-f]{2}",
    r"^\S+@\S+$",
    "x",
    "^$",
    "^é.ü$",
    r"^\w+$",
    r"\W",
    r"[^\s]",
    r"(^a|b$)",
    r"^.{1,2}$",
    r"^[^\"\\]*$",
    r"\n",
    r"^[\x00-\x20]$",
    r"^a?b+?c{2}d{1,}$",
)
NUMBERS = (
    0,
    1,
    -1,
    5,
    10,
    99,
    100,
    0.5,
    -0.5,
    0.1,
    0.25,
    1.5,
    -2.75,
    7.25,
    1e2,
    1e-3,
    1e20,
    2**53,
    2**53 + 1,
    1234567890123456789,
    -(2**63),
    2**63 - 1,
    2**64,
    1e300,
    Decimal("0.1000000000000000055511151231257827"),
    Decimal("3.30"),
)
FORMATS = ("date", "time", "date-time", "uuid", "email", "ipv4", "ipv6", "hostname", "duration", "uri")
KEYS_OF_OBJECTS = ("^x", "^[ab]$", "1$", "^")


# -- the judge ---------------------------------------------------------------------------------------


class Repeated(dict[str, Any]):
    """An object with a name that was written more than once; the last value counts."""


def decoded(text: str) -> Any:
    """The value of a JSON text, with exact numbers."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(items)
        return made if len(made) == len(items) else Repeated(items)

    def constant(name: str) -> Any:
        raise ValueError(name)

    return json.loads(text, parse_float=Decimal, parse_constant=constant, object_pairs_hook=pairs)


def _is_number(_: Any, value: Any) -> bool:
    return isinstance(value, int | Decimal) and not isinstance(value, bool)


def _is_integer(checker: Any, value: Any) -> bool:
    return _is_number(checker, value) and value == int(value)


def _multiple(_: Any, step: Any, value: Any, __: Any) -> Iterator[jsonschema.ValidationError]:
    if _is_number(_, value) and Decimal(value) % Decimal(step):
        yield jsonschema.ValidationError(f"{value} is not a multiple of {step}")


_CHECKER = jsonschema.FormatChecker()


@_CHECKER.checks("date-time")
def _date_time(value: object) -> bool:
    if not isinstance(value, str):
        return True
    whole = re.fullmatch(r"(\d{4}-\d\d-\d\d)T(.*)", value, re.ASCII | re.DOTALL)
    return bool(whole) and _date(whole[1]) and _time(whole[2])


@_CHECKER.checks("date")
def _date(value: object) -> bool:
    if not isinstance(value, str):
        return True
    try:
        return bool(re.fullmatch(r"\d{4}-\d\d-\d\d", value, re.ASCII) and datetime.date.fromisoformat(value))
    except ValueError:
        return False


@_CHECKER.checks("time")
def _time(value: object) -> bool:
    if not isinstance(value, str):
        return True
    found = re.fullmatch(r"(\d\d):(\d\d):(\d\d)(\.\d+)?(Z|[+-](\d\d):(\d\d))", value, re.ASCII)
    if not found:
        return False
    return all(int(found[i] or 0) < top for i, top in ((1, 24), (2, 60), (3, 60), (6, 24), (7, 60)))


def _pattern(_: Any, pattern: str, value: Any, __: Any) -> Iterator[jsonschema.ValidationError]:
    """A pattern must match as ECMA-262 means it and as Python does."""
    exact = re.sub(r"\$(?=$|\))", r"\\Z", pattern)
    narrow = exact.replace(".", "[^\n\r\u2028\u2029]")  # no pattern here has a point that is meant literally
    if isinstance(value, str) and not (re.search(exact, value) and re.search(narrow, value, re.ASCII)):
        yield jsonschema.ValidationError(f"{value!r} does not match {pattern}")


UNCHECKED = ("uri", "hostname", "duration", "email")
"""Formats that the judge knows hardly or not."""

Judge = extend(
    jsonschema.Draft202012Validator,
    {"multipleOf": _multiple, "pattern": _pattern},
    type_checker=jsonschema.Draft202012Validator.TYPE_CHECKER.redefine("number", _is_number).redefine(
        "integer", _is_integer
    ),
)


# -- schemas -----------------------------------------------------------------------------------------


class Schemas:
    """Random schemas over all keywords that are supported."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._shared: list[str] = []

    def whole(self) -> Any:
        """A schema, with definitions that it refers to in one of four."""
        draw = self._draw
        if draw.random() < 0.75:
            self._shared = []
            return self.any(3)
        self._shared = ["#/$defs/one", "#/$defs/two", "#"][: draw.randint(1, 3)]
        made = self.any(3)
        made = made if isinstance(made, dict) and not made.keys() & {"$ref"} else self.object(2)
        return made | {"$defs": {"one": self.any(2), "two": self.any(2)}}

    def any(self, depth: int) -> Any:
        """A schema with ``depth`` more levels below."""
        draw = self._draw
        simple: list[Callable[[int], Any]] = [self.string, self.number, self.number, self.values, self.other]
        nested = [self.object, self.object, self.object, self.array, self.union, self.mixed] if depth else []
        if self._shared and draw.random() < 0.15:
            return {"$ref": draw.choice(self._shared)}
        return draw.choice(simple + nested)(depth - 1)

    def string(self, depth: int) -> Any:
        """Lengths, patterns, formats."""
        draw, made = self._draw, {"type": "string"}
        more: dict[str, Any] = {}
        if draw.random() < 0.4:
            more |= {"minLength": draw.randint(0, 3)}
        if draw.random() < 0.4:
            more |= {"maxLength": draw.randint(0, 6)}
        if draw.random() < 0.4:
            more |= {"pattern": draw.choice(PATTERNS)}
        elif draw.random() < 0.3:
            more |= {"format": draw.choice(FORMATS)}
        return made | more

    def number(self, depth: int) -> Any:
        """Bounds and multiples."""
        draw = self._draw
        made: dict[str, Any] = {"type": draw.choice(["integer", "number", "number"])}
        near = draw.choice(NUMBERS)
        for keyword in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
            if draw.random() < 0.3:
                made[keyword] = near if draw.random() < 0.3 else draw.choice(NUMBERS)
        if draw.random() < 0.2:
            made["multipleOf"] = draw.choice([2, 5, 7, 0.5, 0.01, 0.25, 3, 100, 1, 1.5, 0.3])
        return made

    def values(self, depth: int) -> Any:
        """``enum`` and ``const`` of several types, some beside other keywords."""
        draw = self._draw
        values: list[Any] = [
            *TEXTS,
            *NUMBERS,
            None,
            True,
            False,
            [],
            [1, "a"],
            {"k": [1]},
            {"b": 1, "a": None},
        ]
        made: dict[str, Any] = {"enum": draw.sample(values, draw.randint(1, 5))}
        if draw.random() < 0.3:
            made = {"const": draw.choice(values)}
        if draw.random() < 0.3:
            made |= draw.choice([self.string, self.number])(0)
        return made

    def other(self, depth: int) -> Any:
        """Booleans, null, anything, several types."""
        types = ["null", "boolean", "integer", "number", "string", "array", "object"]
        several = {"type": self._draw.sample(types, 2)}
        return self._draw.choice([{"type": "boolean"}, {"type": "null"}, {}, True, several])

    def array(self, depth: int) -> Any:
        """Items, first items, counts."""
        draw = self._draw
        made: dict[str, Any] = {"type": "array"}
        if draw.random() < 0.8:
            made["items"] = False if draw.random() < 0.1 else self.any(depth)
        if draw.random() < 0.3:
            made["prefixItems"] = [self.any(depth) for _ in range(draw.randint(1, 3))]
        if draw.random() < 0.4:
            made["minItems"] = draw.randint(0, 3)
        if draw.random() < 0.6:
            made["maxItems"] = draw.randint(0, 4)
        return made

    def object(self, depth: int) -> Any:
        """Properties by name, by pattern and others, counts."""
        draw = self._draw
        names = draw.sample(NAMES, draw.randint(0, 4))
        made: dict[str, Any] = {
            "type": "object",
            "properties": {name: False if draw.random() < 0.04 else self.any(depth) for name in names},
        }
        if draw.random() < 0.7:
            made["required"] = [name for name in NAMES if draw.random() < (0.4 if name in names else 0.04)]
        if draw.random() < 0.7:
            made["additionalProperties"] = draw.choice([False, False, self.any(0), self.any(0)])
        if draw.random() < 0.25:
            chosen = draw.sample(KEYS_OF_OBJECTS, draw.randint(1, 2))
            made["patternProperties"] = {
                each: draw.choice([False, self.any(0), self.any(0)]) for each in chosen
            }
        if draw.random() < 0.15:
            made["maxProperties"] = draw.randint(0, 4)
        if draw.random() < 0.15:
            made["minProperties"] = draw.randint(0, 3)
        return made

    def union(self, depth: int) -> Any:
        """``anyOf``, ``oneOf``, ``allOf``, some beside other keywords."""
        draw = self._draw
        keyword = draw.choice(["anyOf", "anyOf", "oneOf", "allOf"])
        made: dict[str, Any] = {keyword: [self.any(depth) for _ in range(draw.randint(1, 3))]}
        if draw.random() < 0.3:
            beside = draw.choice([self.string, self.number, self.object])(depth if depth > 0 else 0)
            made |= beside
        return made

    def mixed(self, depth: int) -> Any:
        """Keywords of several types without a type."""
        made = {}
        for each in self._draw.sample([self.string, self.number, self.array, self.object], 2):
            made |= each(max(depth, 0))
        made.pop("type", None)
        return made


# -- texts -------------------------------------------------------------------------------------------


class Written:
    """Writes values as JSON: as the grammar does (``plain``), or in any other way that means the same."""

    def __init__(self, draw: random.Random, plain: bool = True, digits: int = 400) -> None:
        self._draw = draw
        self._plain = plain
        self._digits = digits

    def text(self, value: Any) -> str:
        """JSON of a value."""
        if isinstance(value, str):
            return self._string(value)
        if isinstance(value, bool) or value is None:
            return json.dumps(value)
        if isinstance(value, list):
            return "[" + ",".join(self._padded(self.text(each)) for each in value) + "]"
        if isinstance(value, dict):
            pairs = list(value.items())
            if not self._plain and self._draw.random() < 0.3:
                self._draw.shuffle(pairs)
            if pairs and not self._plain and self._draw.random() < 0.15:
                pairs.insert(self._draw.randint(0, len(pairs)), self._draw.choice(pairs))
            inner = (
                self._padded(self._string(name)) + ":" + self._padded(self.text(each)) for name, each in pairs
            )
            return "{" + ",".join(inner) + "}"
        return self._number(Decimal(repr(value)) if isinstance(value, float) else Decimal(value))

    def _padded(self, text: str) -> str:
        if self._plain or self._draw.random() < 0.8:
            return text
        return self._draw.choice([" ", "\n", "\n  ", "\t", "  "]) + text

    def _string(self, value: str) -> str:
        spelled = "".join(f"\\u{ord(each):04x}" if each == "\x7f" else each for each in value)
        if self._plain or self._draw.random() < 0.75:
            return json.dumps(spelled, ensure_ascii=False).replace("\\\\u007f", "\\u007f")
        if self._draw.random() < 0.5:
            return json.dumps(value)
        return '"' + "".join(f"\\u{ord(each):04X}" if ord(each) < 0x10000 else each for each in value) + '"'

    def _number(self, value: Decimal) -> str:
        with decimal.localcontext(prec=2000):
            value = value.normalize()
            plain = "0" if not value else f"{value:f}"
            plain = str(value).lower() if len(plain) > self._digits else plain
            if self._plain or self._draw.random() < 0.5:
                return plain
            return self._draw.choice(
                [
                    plain
                    if "." in plain or "e" in plain.lower()
                    else plain + self._draw.choice([".0", ".00", "e0"]),
                    plain + "0" if "." in plain and "e" not in plain.lower() else plain,
                    f"{value:e}",
                    f"{value:E}".replace("E+", "E"),
                    "-0" if not value else plain,
                    "0e5" if not value else plain,
                ]
            )


class Values:
    """Values around the limits of a schema: most satisfy it, the others are near it."""

    def __init__(self, root: Any, draw: random.Random) -> None:
        self._root = root
        self._draw = draw

    def of(self, schema: Any, depth: int = 6) -> Any:
        """A value for ``schema``."""
        draw = self._draw
        if not isinstance(schema, dict) or depth < 0 or draw.random() < 0.04:
            return self._any(depth)
        if "$ref" in schema:
            found = self._root
            for step in schema["$ref"].split("/")[1:]:
                found = found[step]
            return self.of(found, depth - 1)
        if "const" in schema or "enum" in schema:
            return draw.choice(schema.get("enum") or [schema.get("const")])
        for keyword in ("anyOf", "oneOf", "allOf"):
            if keyword in schema and draw.random() < 0.7:
                return self.of(draw.choice(schema[keyword]), depth - 1)
        kinds = schema.get("type", ["number", "string", "array", "object", "null"])
        kind = draw.choice(kinds) if isinstance(kinds, list) else kinds
        match kind:
            case "number" | "integer":
                return self._near(schema, kind)
            case "string":
                return self._string(schema)
            case "array":
                return self._array(schema, depth)
            case "object":
                return self._object(schema, depth)
        return None if kind == "null" else draw.random() < 0.5

    def _any(self, depth: int) -> Any:
        return self._draw.choice(
            [None, True, 0, 1, -3, Decimal("0.5"), 2**60 + 1, "a", "x", [], {}, [1], {"a": 1}]
        )

    def _near(self, schema: Any, kind: str) -> Any:
        draw = self._draw
        limits = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
        bases = [Decimal(str(schema[each])) for each in limits if each in schema] or [
            Decimal(draw.choice([0, 3]))
        ]
        with decimal.localcontext(prec=400):
            value = draw.choice(bases) + draw.choice(
                [0, 0, 1, -1, Decimal("0.1"), -Decimal("1e-20"), Decimal("1e-9"), 7]
            )
            if kind == "integer" or draw.random() < 0.3:
                value = Decimal(math.floor(value))
            return value * draw.choice([1, 1, 1, 2, -1, 10])

    def _string(self, schema: Any) -> str:
        draw = self._draw
        examples = (
            "AB-12",
            "ac",
            "ababc",
            "0f",
            "a@b",
            "é-ü",
            "2024-02-29",
            "2023-02-29",
            "12:30:00Z",
            "23:59:60Z",
        )
        more = (
            "127.0.0.1",
            "::1",
            "1::",
            "example.com",
            "P1D",
            "a@b.co",
            "http://a/b",
            "abccd",
            "aé",
            "\u00a0",
        )
        dates = ("2024-02-29T10:00:00Z", "0000-01-01", "f81d4fae-7dec-11d0-a765-00a0c91e6bf6")
        base = draw.choice([*TEXTS, *examples, *more, *dates])
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        if draw.random() < 0.7:
            base = base.ljust(least, draw.choice("aé\n"))[:most]
        return base

    def _array(self, schema: Any, depth: int) -> list[Any]:
        draw = self._draw
        least, most = schema.get("minItems", 0), schema.get("maxItems", 3)
        count = draw.randint(least, max(least, most)) + draw.choice([0, 0, 0, 0, 1, -1])
        prefix = schema.get("prefixItems", [])
        return [
            self.of(prefix[i] if i < len(prefix) else schema.get("items", True), depth - 1)
            for i in range(max(0, count))
        ]

    def _object(self, schema: Any, depth: int) -> dict[str, Any]:
        draw, made = self._draw, {}
        for name, inner in schema.get("properties", {}).items():
            if draw.random() < (0.95 if name in schema.get("required", ()) else 0.5):
                made[name] = self.of(inner, depth - 1)
        for name in schema.get("required", ()):
            if name not in made and draw.random() < 0.95:
                made[name] = self.of(schema.get("additionalProperties", True), depth - 1)
        while draw.random() < 0.25:
            name = draw.choice([*NAMES, "x9", "y1", "z"])
            patterns = [
                each
                for pattern, each in schema.get("patternProperties", {}).items()
                if re.search(pattern, name)
            ]
            inner = draw.choice(patterns or [schema.get("additionalProperties", True)])
            made.setdefault(name, self.of(inner, depth - 1))
        return made


# -- the run -----------------------------------------------------------------------------------------


@dataclass
class Findings:
    """What a run found."""

    schemas: int = 0
    unsupported: Counter[str] = field(default_factory=Counter)
    pairs: int = 0
    accepted: int = 0
    repeated: int = 0
    valid: int = 0
    walked: int = 0
    cut: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    unexplained: list[tuple[str, str]] = field(default_factory=list)
    unsound: list[tuple[str, str]] = field(default_factory=list)
    dead: list[tuple[str, str]] = field(default_factory=list)

    def show(self) -> None:
        """Print the findings."""
        unsupported = sum(self.unsupported.values())
        say(f"schemas {self.schemas}, compiled {self.schemas - unsupported}; pairs {self.pairs}")
        say(f"texts walked to their end {self.walked}, cut {self.cut}")
        say(f"valid {self.valid}, accepted {self.accepted} (with a repeated free name {self.repeated})")
        say(
            f"UNSOUND {len(self.unsound)}, DEAD ENDS {len(self.dead)}, valid and refused {sum(self.refused.values())}"
        )
        for reason, count in self.refused.most_common():
            say(f"  refused {count:7d}  {reason}")
        for reason, count in self.unsupported.most_common(20):
            say(f"  schemas not supported {count:6d}  {reason}")
        for name in ("unsound", "dead", "unexplained"):
            for schema, text in getattr(self, name)[:12]:
                say(f"  {name}: {text!r} for {schema}")


class Fuzz:
    """Judges schemas with texts."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.found = Findings()
        self._schemas = Schemas(self.draw)
        self._tokenizer = LLTokenizer("byte")
        self._plain = Written(self.draw)
        self._short = Written(self.draw, digits=41)
        self._other = Written(self.draw, plain=False)

    def run(self, pairs: int, *, walks: int = 4, values: int = 12) -> Findings:
        """Judge random schemas until there were so many pairs."""
        while self.found.pairs < pairs:
            self.schema(self._plain.text(self._schemas.whole()), walks, values)
        return self.found

    def schema(self, source: str, walks: int, values: int) -> None:
        """Judge texts to one schema."""
        found, schema = self.found, decoded(source)
        found.schemas += 1
        try:
            matcher = self._compiled(source)
        except UnusableConstraint as error:
            found.unsupported[re.sub(r"'(#|=)[^']*'|\d+", "…", str(error))[:100]] += 1
            if str(error).startswith("no value"):
                self._doubt(schema, source, values)
            return
        judge = Judge(schema, format_checker=_CHECKER)
        for _ in range(walks):
            text = self._walk(matcher.deep_copy(), source)
            if text is not None:
                self._judge(judge, matcher, source, text)
                self._judge(judge, matcher, source, self._other.text(decoded(text)))
        near = Values(schema, self.draw)
        for _ in range(values):
            value = near.of(schema)
            self._judge(judge, matcher, source, self._plain.text(value))
            self._judge(judge, matcher, source, self._other.text(value))

    def _compiled(self, source: str) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, schema_grammar(read_schema(source)), log_level=0, limits=LIMITS)
        matcher.compute_bitmask()  # as the server does: it warms the lexer of all copies
        if matcher.is_error():
            raise UnusableConstraint(matcher.get_error())
        return matcher

    def _doubt(self, schema: Any, source: str, values: int) -> None:
        """Look for a value that satisfies a schema which is said to have none."""
        near, judge = Values(schema, self.draw), Judge(schema, format_checker=_CHECKER)
        unchecked = any(f'"format":"{each}"' in source for each in UNCHECKED)
        for value in [near.of(schema) for _ in range(values)]:
            if _is_valid(judge, value) and not unchecked:
                self.found.unexplained.append((source, self._plain.text(value)))

    def _walk(self, matcher: LLMatcher, source: str, limit: int = 160) -> str | None:
        """A text of random tokens that the masks allow."""
        said = bytearray()
        closing = b'"]},0123456789'
        for step in range(limit):
            mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            (allowed,) = np.nonzero(np.unpackbits(mask, bitorder="little"))
            if matcher.is_error() or not len(allowed):
                self.found.dead.append((source, said.decode(errors="replace")))
                return None
            ends = [token for token in allowed.tolist() if token >= 256]
            tokens = [token for token in allowed.tolist() if token < 256]
            if not tokens or (ends and self.draw.random() < 0.5):
                self.found.walked += 1
                return said.decode()
            near = [token for token in tokens if token in closing]
            if near and self.draw.random() < min(0.9, 0.3 + step / 60):
                tokens = near
            token = self.draw.choice(tokens)
            if not matcher.consume_token(token):
                self.found.dead.append((source, said.decode(errors="replace")))
                return None
            said.append(token)
        self.found.cut += 1
        return None

    def accepts(self, matcher: LLMatcher, text: str) -> bool:
        """Whether the grammar accepts a text."""
        copy = matcher.deep_copy()
        try:
            tokens = list(text.encode())
        except UnicodeEncodeError:
            return False
        return copy.try_consume_tokens(tokens) == len(tokens) and copy.is_accepting()

    def _judge(self, judge: Any, matcher: LLMatcher, source: str, text: str) -> None:
        found = self.found
        found.pairs += 1
        accepted = self.accepts(matcher, text)
        try:
            value = decoded(text)
            valid = _is_valid(judge, value)
        except ValueError:
            value, valid = None, False
        found.accepted += accepted
        found.valid += valid
        if accepted and not valid:
            found.unsound.append((source, text))
        elif accepted and _repeats(value):
            found.repeated += 1
        elif valid and not accepted:
            reason = self._reason(self._compiled(source), text, value)
            if reason == "unexplained" and any(f'"format":"{each}"' in source for each in UNCHECKED):
                reason = "formats that the judge does not check"
            if reason == "unexplained" and '"minProperties"' in source:
                reason = "minProperties, for which free names count once"
            found.refused[reason] += 1
            if reason == "unexplained":
                found.unexplained.append((source, text))

    def _reason(self, matcher: LLMatcher, text: str, value: Any) -> str:
        if self.accepts(matcher, text):
            return "the lexer of the earlier texts was used up"
        writers = (self._plain, self._short)
        if any(self.accepts(matcher, each.text(value)) for each in writers):
            if _repeats(value):
                return "a name that is repeated"
            return "spelling of numbers, strings or whitespace"
        orders = [*itertools.islice(_orders(value), 201)]
        if any(self.accepts(matcher, each.text(order)) for order in orders[:200] for each in writers):
            return "order of names"
        if len(orders) > 200 or _widest(value) > 2:
            return "more orders of names than were tried"
        return "unexplained"


def _widest(value: Any) -> int:
    """The most names that an object has."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return max((len(value) if isinstance(value, dict) else 0, *(_widest(each) for each in inner)))


def _is_valid(judge: Any, value: Any) -> bool:
    with decimal.localcontext(prec=2000):
        try:
            return bool(judge.is_valid(value))
        except RecursionError:  # a reference to itself, which no value ends
            return False


def _repeats(value: Any) -> bool:
    if isinstance(value, dict):
        return isinstance(value, Repeated) or any(_repeats(each) for each in value.values())
    return isinstance(value, list) and any(_repeats(each) for each in value)


def _orders(value: Any) -> Iterator[Any]:
    """The same value with its names in all orders."""
    if isinstance(value, list):
        for each in itertools.product(*([*itertools.islice(_orders(inner), 24)] for inner in value)):
            yield list(each)
    elif isinstance(value, dict):
        for names in itertools.permutations(value):
            inner = ([*itertools.islice(_orders(value[name]), 6)] for name in names)
            for each in itertools.product(*inner):
                yield dict(zip(names, each, strict=True))
    else:
        yield value


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print; fails if a text was unsound or a grammar had a dead end."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=100_000, help="number of pairs of schema and text")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    began = time.monotonic()
    found = Fuzz(args.seed).run(args.pairs)
    found.show()
    say(f"{time.monotonic() - began:.0f} s")
    return min(1, len(found.unsound) + len(found.dead))


if __name__ == "__main__":
    raise SystemExit(main())
