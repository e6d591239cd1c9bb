"""Structured output validated: generated schemas, typical schemas of API clients, and a published test suite.

Each schema is compiled with the built-in model's tokenizer, and refused ones are counted by their reason. For the
others tokens are drawn at random from what the grammar allows. Every text that comes to its end must be JSON that
`jsonschema` accepts. ``--suite`` names the folder ``tests/draft2020-12`` of the JSON-Schema-Test-Suite, which is in the
source distribution of jsonschema: there each invalid instance must be unreachable as well.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import numpy as np
import regex
from jsonschema.validators import extend
from rich.console import Console

from headrace.compute.grammar.compiler import Compiler
from headrace.compute.model.hub import resolve_folder
from headrace.core.constraint import Constraint, UnusableConstraint, json_constraint
from headrace.text.tokenizer import Tokenizer
from tests.judges.posted_schemas import posted

say = Console(soft_wrap=True, highlight=False).print
DIALECT = "https://json-schema.org/draft/2020-12/schema"
WORDS = (
    "name",
    "id",
    "age",
    "email",
    "tags",
    "items",
    "price",
    "city",
    "date",
    "status",
    "notes",
    "a/b",
    "ü",
)


class Case(NamedTuple):
    """A schema, and instances with whether they are valid."""

    name: str
    schema: Any
    instances: Sequence[tuple[Any, bool]] = ()


@dataclass
class Findings:
    """The results of a set of schemas."""

    schemas: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    complete: int = 0
    cut: int = 0
    gave_up: Counter[str] = field(default_factory=Counter)
    unjudged: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    reached: int = 0
    unreached: int = 0
    slowest: float = 0.0

    def show(self, name: str) -> None:
        """Print the findings as a few lines."""
        refused = sum(self.refused.values())
        say(f"{name}: {self.schemas} schemas, {self.schemas - refused} supported ({self._share(refused)})")
        say(f"  answers: {self.complete} complete, {self.cut} cut at the limit, {len(self.wrong)} wrong")
        say(
            f"  valid instances: {self.reached} reachable, {self.unreached} not; compiled in {self.slowest:.3f} s"
        )
        for reason, count in self.refused.most_common(12):
            say(f"  refused {count:5d}  {reason}")
        for reason, count in self.gave_up.most_common():
            say(f"  failed while generating {count}  {reason}")
        for reason, count in self.unjudged.most_common():
            say(f"  not judged {count}  {reason}")
        for each in self.wrong[:10]:
            say(f"  WRONG {each}")

    def _share(self, refused: int) -> str:
        return f"{100 * (1 - refused / max(1, self.schemas)):.1f} %"


def _pattern(judge: Any, pattern: str, value: Any, schema: Any) -> Iterator[jsonschema.ValidationError]:
    if isinstance(value, str) and not regex.search(pattern, value):
        yield jsonschema.ValidationError(f"{value!r} does not match {pattern!r}")


def _pattern_properties(judge: Any, patterns: Any, value: Any, schema: Any) -> Iterator[Any]:
    for pattern, inner in patterns.items() if isinstance(value, dict) else ():
        for name in value:
            if regex.search(pattern, name):
                yield from judge.descend(value[name], inner, path=name, schema_path=pattern)


Judge = extend(
    jsonschema.Draft202012Validator, {"pattern": _pattern, "patternProperties": _pattern_properties}
)
"""Draft 2020-12 with the properties of Unicode in patterns, which `re` does not know."""


class Fuzz:
    """Generates answers to schemas and validates them."""

    def __init__(self, compiler: Compiler, tokenizer: Tokenizer, seed: int) -> None:
        self._compiler = compiler
        self._tokenizer = tokenizer
        self._draw = np.random.default_rng(seed)
        tokens = [tokenizer.decode([token], False).encode() for token in range(tokenizer.vocab_size)]
        closing = [1.0 + 20.0 * bool(re.fullmatch(rb'[\]}"]+,?', token)) for token in tokens]
        self._weights = np.array(
            [weight / (1 + len(token)) for weight, token in zip(closing, tokens, strict=True)]
        )

    def judge(self, case: Case, answers: int, limit: int, into: Findings) -> None:
        """Compile a schema, draw answers to it, and try its instances."""
        into.schemas += 1
        began = time.perf_counter()
        try:
            constraint = json_constraint(case.schema)
            self._compiler.check(constraint)
        except UnusableConstraint as error:
            into.refused[re.sub(r"'#[^']*'", "…", str(error))[:90]] += 1
            if not str(error):
                into.wrong.append(f"{case.name}: refused without a reason")
            return
        finally:
            into.slowest = max(into.slowest, time.perf_counter() - began)
        for _ in range(answers):
            self._answer(case, constraint, limit, into)
        for instance, valid in case.instances:
            found = self._compiler.is_complete(constraint, json.dumps(instance, ensure_ascii=False))
            if found and not valid:
                into.wrong.append(f"{case.name}: lets {instance!r} through")
            into.reached += found and valid
            into.unreached += valid and not found

    def _answer(self, case: Case, constraint: Constraint, limit: int, into: Findings) -> None:
        text, ended, problem = self.walk(constraint, limit)
        if problem:
            into.gave_up[problem[:90]] += 1
            return
        if not ended:
            into.cut += 1
            return
        into.complete += 1
        try:
            Judge(exact(case.schema)).validate(json.loads(text, parse_float=Decimal))
        except (ValueError, jsonschema.ValidationError) as error:
            into.wrong.append(f"{case.name}: {text[:80]!r}: {str(error).splitlines()[0][:100]}")
        except Exception as error:  # a reference to the network, a pattern of another dialect
            into.unjudged[type(error).__name__] += 1

    def walk(self, constraint: Constraint, limit: int) -> tuple[str, bool, str]:
        """A random answer: its text, whether it came to its end, and why not if it failed."""
        matcher, said = self._compiler.matcher(constraint), []
        for _ in range(limit):
            mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            if matcher.is_error():
                return "", False, matcher.get_error()
            (allowed,) = np.nonzero(np.unpackbits(mask, bitorder="little")[: len(self._weights)])
            ends = [token for token in allowed.tolist() if token in self._compiler.ends]
            if ends and (len(ends) == len(allowed) or self._draw.random() < 0.4):
                return self._tokenizer.decode(said, skip_special_tokens=False), True, ""
            weights = self._weights[allowed]
            token = int(self._draw.choice(allowed, p=weights / weights.sum()))
            if token in self._compiler.ends:
                return self._tokenizer.decode(said, skip_special_tokens=False), True, ""
            if not matcher.consume_token(token):
                return "", False, matcher.get_error()
            said.append(token)
        return "", False, ""


def exact(schema: Any) -> Any:
    """A schema whose fractions are decimal: in binary 0.59 would be no multiple of 0.01."""
    return json.loads(json.dumps(schema), parse_float=Decimal)


# -- schemas ----------------------------------------------------------------------------------------


def generated(count: int, seed: int) -> Iterator[Case]:
    """Random schemas over all keywords, some of which nothing can enforce."""
    draw = random.Random(seed)
    for number in range(count):
        schema = _any(draw, 3)
        if draw.random() < 0.2:
            schema = {"$defs": {"inner": _any(draw, 2)}, "type": "array", "items": {"$ref": "#/$defs/inner"}}
        yield Case(f"generated {number}", schema)


def _any(draw: random.Random, depth: int) -> Any:
    kinds = (_string, _number, _choice, _literal)
    nested = (_object, _object, _array, _union)
    made = draw.choice(kinds + (nested if depth else ()))(draw, depth - 1)
    if draw.random() < 0.05:
        made |= draw.choice(
            [
                {"not": {"const": 3}},
                {"uniqueItems": True},
                {"if": {}, "then": {}},
                {"contains": {}},
                {"minProperties": 1},
            ]
        )
    return made


def _string(draw: random.Random, depth: int) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "string"}
    roll = draw.random()
    if roll < 0.3:
        made["maxLength"] = draw.randint(0, 30)
        made["minLength"] = draw.randint(0, 8)
    elif roll < 0.5:
        patterns = (r"^[A-Z]{3}-\d+$", "^(a|b)*c$", r"[0-9a-f]{8}", r"^\S+@\S+\.com$", "x", r"^$", "^é.ü$")
        made["pattern"] = draw.choice(patterns)
    elif roll < 0.6:
        made["format"] = draw.choice(
            ["date", "date-time", "uuid", "email", "ipv4", "time", "uri", "hostname", "nope"]
        )
    return made


def _number(draw: random.Random, depth: int) -> dict[str, Any]:
    made: dict[str, Any] = {"type": draw.choice(["integer", "number"])}
    if draw.random() < 0.5:
        made[draw.choice(["minimum", "exclusiveMinimum"])] = draw.choice([-5, 0, 1, 0.5, -1000])
    if draw.random() < 0.5:
        made[draw.choice(["maximum", "exclusiveMaximum"])] = draw.choice([1, 10, 99, 7.25, 10**6])
    if draw.random() < 0.15:
        made["multipleOf"] = draw.choice([2, 5, 0.5, 0.01])
    return made


def _choice(draw: random.Random, depth: int) -> dict[str, Any]:
    values = ["a", "b c", 'say "x"', "ü\n", 1, 2.5, None, True, {"k": [1]}, []]
    return {"enum": draw.sample(values, draw.randint(1, 4))}


def _literal(draw: random.Random, depth: int) -> dict[str, Any]:
    return draw.choice(
        [{"type": "boolean"}, {"type": "null"}, {"const": "x"}, {}, {"type": ["string", "null"]}]
    )


def _object(draw: random.Random, depth: int) -> dict[str, Any]:
    names = draw.sample(WORDS, draw.randint(0, 4))
    made: dict[str, Any] = {"type": "object", "properties": {name: _any(draw, depth) for name in names}}
    made["required"] = [name for name in names if draw.random() < 0.6]
    roll = draw.random()
    if roll < 0.5:
        made["additionalProperties"] = False
    elif roll < 0.6:
        made["additionalProperties"] = _any(draw, 0)
    elif roll < 0.7:
        made["patternProperties"] = {"^x_": _any(draw, 0)}
    if draw.random() < 0.05:
        made["maxProperties"] = draw.randint(0, 4)
    return made


def _array(draw: random.Random, depth: int) -> dict[str, Any]:
    made: dict[str, Any] = {"type": "array", "items": _any(draw, depth), "maxItems": draw.randint(0, 4)}
    if draw.random() < 0.3:
        made["minItems"] = draw.randint(0, 3)
    if draw.random() < 0.2:
        made["prefixItems"] = [_any(draw, depth), _any(draw, 0)]
    return made


def _union(draw: random.Random, depth: int) -> dict[str, Any]:
    return {draw.choice(["anyOf", "anyOf", "oneOf", "allOf"]): [_any(draw, depth), _any(draw, depth)]}


def suite(folder: Path) -> Iterator[Case]:
    """The schemas of the JSON-Schema-Test-Suite with their instances."""
    for path in sorted(folder.glob("*.json")):
        for group in json.loads(path.read_text(encoding="utf-8")):
            tests = [(test["data"], test["valid"]) for test in group["tests"]]
            schema = group["schema"]
            if isinstance(schema, Mapping) and schema.get("$schema", DIALECT) != DIALECT:
                continue
            yield Case(f"{path.stem}: {group['description']}", schema, tests)


def make_fuzz(seed: int, model: str = "builtin") -> tuple[Fuzz, Compiler]:
    """A fuzz over a model's tokenizer."""
    tokenizer = Tokenizer.from_folder(resolve_folder(model, with_weights=False))
    compiler = Compiler(tokenizer.backend.to_str, tokenizer.vocab_size, tuple(tokenizer.eos_token_ids))
    return Fuzz(compiler, tokenizer, seed), compiler


def main() -> int:
    """Run, print; fails if any answer was wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--count", type=int, default=2000, help="generated schemas")
    parser.add_argument("--answers", type=int, default=3, help="per schema")
    parser.add_argument("--limit", type=int, default=300, help="tokens of an answer")
    parser.add_argument("--suite", type=Path, default=None, help="folder tests/draft2020-12")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    fuzz, compiler = make_fuzz(args.seed, args.model)
    sets: dict[str, Iterator[Case]] = {
        "posted": (Case(*each) for each in posted()),
        "generated": generated(args.count, args.seed),
    }
    if args.suite is not None:
        sets["suite"] = suite(args.suite)
    wrong = 0
    for name, cases in sets.items():
        findings = Findings()
        for case in cases:
            fuzz.judge(case, args.answers, args.limit, findings)
        findings.show(name)
        wrong += len(findings.wrong)
    compiler.close()
    return min(wrong, 1)


if __name__ == "__main__":
    raise SystemExit(main())
