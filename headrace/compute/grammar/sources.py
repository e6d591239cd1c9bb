"""Converts the source of a constraint to an llguidance grammar, or raises an error.

There is one function per kind. The result is llguidance's JSON, which `compiler` passes to a matcher. JSON schemas are
compiled by `schemas`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from decimal import Decimal
from functools import partial
from typing import Any

from llguidance import LLMatcher, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark

from headrace.compute.grammar.call_arguments import Spelt, marked_arguments, python_arguments
from headrace.compute.grammar.rules import matches_nothing
from headrace.compute.grammar.schemas import json_rules
from headrace.core.constraint import Constraint, ConstraintKind, UnusableConstraint

# Grammars in Lark's notation, without the marks that llguidance does not know and that allow the same texts.
#
# ``?rule`` and ``!rule`` change the parse tree. Priorities (``rule.2``, ``NAME.1``) choose between several parses of
# one text: with Lark's default parser they allow the same texts. There is no tree here, so all of them are removed.

_PART = re.compile(
    r"""
    (?P<literal> //[^\n]* | "(?:\\.|[^"\\\n])*" | /(?!/)(?:\\.|[^/\\\n])*/ )
  | ^(?P<space>[ \t]*) (?P<marks>[?!]*) [ \t]*
    (?P<name>[A-Za-z_][A-Za-z0-9_]*) (?P<rest>(?:\{[^}\n]*\}|\[[^\]\n]*\])*)
    (?P<priority>\.[+-]?[0-9]+)? (?P<colon>[ \t]*:(?!:))
    """,
    re.MULTILINE | re.VERBOSE,
)
"""A comment or a literal, in which nothing is a rule; or the beginning of a rule."""

_MARKS = ("", "?", "!", "?!", "!?")


def as_lark(source: str) -> str:
    """A grammar in Lark or GBNF as llguidance takes it.

    Raises:
        UnusableConstraint: it is neither, or a rule has marks that Lark does not have.
    """
    rules = 0

    def plain(found: re.Match[str]) -> str:
        nonlocal rules
        if found["literal"] is not None:
            return found[0]
        rules += 1
        name, marks = found["name"], found["marks"]
        if marks not in _MARKS or (marks and name.lstrip("_")[:1].isupper()):
            kind = "terminal" if name.lstrip("_")[:1].isupper() else "rule"
            raise UnusableConstraint(f"the {kind} {name!r:.80} cannot begin with {marks!r:.80}")
        return found["space"] + name + found["rest"] + found["colon"]

    made = _PART.sub(plain, source)
    if rules:
        return made
    try:
        return any_to_lark(source)
    except Exception as error:  # the converter raises what its parser does
        first = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise UnusableConstraint(f"the grammar is neither Lark nor GBNF: {first}") from None


# Keywords of JSON schemas that allow everything: a schema means the same without them.

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


WHITESPACE = r"( |\r?\n( {0,32}|\t{0,8}))?"  # see docs/decisions/structured-output.md#whitespace-in-json
"""Allowed whitespace between JSON tokens: a space, or a line break and an indentation. Otherwise models may generate
whitespace until max_tokens (https://github.com/vllm-project/vllm/issues/13260)."""

MAX_DEPTH = 64
"""Maximum nesting depth of a schema."""

MAX_TAGS = 256
"""Maximum number of structures of a structural tag."""


def grammar(constraint: Constraint, special: Mapping[str, int], plain: Collection[str] = ()) -> str:
    """The grammar of ``constraint`` for llguidance.

    ``special`` are the ids of tokens that text cannot produce; tags refer to them by id. ``plain`` ones of them belong
    to the free text around tags all the same, as markers of reasoning do.

    Raises:
        UnusableConstraint: the source is not valid for its kind.
    """
    made = _grammar(constraint, special, plain)
    return _after(constraint.after, made, special) if constraint.after else made


def _grammar(constraint: Constraint, special: Mapping[str, int], plain: Collection[str]) -> str:
    source = constraint.source
    match constraint.kind:
        case ConstraintKind.JSON:
            return schema_grammar(read_schema(source), constraint.whitespace)
        case ConstraintKind.REGEX:
            return _regex(source)
        case ConstraintKind.CHOICE:
            return _choice(source)
        case ConstraintKind.GRAMMAR:
            return str(LLMatcher.grammar_from_lark(as_lark(source)))
        case ConstraintKind.STRUCTURAL_TAG:
            return _structural_tag(source, special, plain)
        case ConstraintKind.TEXT:
            raise ValueError("any text needs no grammar")


def _after(marker: str, made: str, special: Mapping[str, int]) -> str:
    """Free text up to ``marker``, then the grammar ``made``."""
    spelt = _spelt(marker, special)
    opened = f"free: TEXT {spelt}" if spelt.startswith("<[") else f"free[lazy]: TEXT {spelt}"
    lines = ["%llguidance {}", "start: free @body", opened, r"TEXT: /(.|\n)*/"]
    body = json.loads(made) if made.lstrip().startswith("{") else {"grammars": [{"lark_grammar": made}]}
    first, *others = body["grammars"]
    head = {"name": "after", "lark_grammar": "\n".join(lines)}
    return json.dumps(body | {"grammars": [head, first | {"name": "body"}, *others]})


def read_schema(source: str) -> Any:
    """A JSON schema from its text.

    Raises:
        UnusableConstraint: it is not JSON, not an object or boolean, too deep, or contains options of llguidance.
    """
    return _checked_schema(_read(source, "the JSON schema"))


def _checked_schema(schema: Any) -> Any:
    if not isinstance(schema, dict | bool):
        raise UnusableConstraint("the JSON schema must be an object, true or false")
    if schema is False:
        raise UnusableConstraint("no value satisfies the schema false")
    _check_depth(schema)
    if isinstance(schema, dict) and "x-guidance" in schema:
        raise UnusableConstraint("keyword 'x-guidance' at '#/x-guidance' is not supported")
    return plain(schema)


def schema_grammar(schema: Any, whitespace: str | None = None) -> str:
    """The grammar of a JSON schema.

    Raises:
        UnusableConstraint: the schema cannot be enforced, or the whitespace may be something else.
    """
    start, lines = json_rules(schema, "json", WHITESPACE if whitespace is None else _whitespace(whitespace))
    return _lark_of(["%llguidance {}", f"start: {start}", *lines])


def _whitespace(pattern: str) -> str:
    """A client's ``whitespace_pattern``, as Lark has it between slashes."""
    escaped = re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", pattern).replace("\n", "\\n")
    try:
        foreign = not matches_nothing(f"/{escaped}/ & ~/[ \\t\\r\\n]*/") if escaped else False
    except UnusableConstraint as error:
        raise UnusableConstraint(f"whitespace_pattern: {error}") from None
    if foreign:
        raise UnusableConstraint("whitespace_pattern may match blanks, tabs and line breaks only")
    return escaped


def _lark_of(lines: Iterable[str]) -> str:
    return str(LLMatcher.grammar_from_lark("\n".join(lines)))


def _read(source: str, what: str) -> Any:
    try:
        return json.loads(source, parse_float=Decimal, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise UnusableConstraint(f"{what} is not valid JSON: {error}") from None


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _check_depth(schema: Any) -> None:
    level, depth = [schema], 0
    while level:
        if depth > MAX_DEPTH:
            raise UnusableConstraint(f"the JSON schema is nested more than {MAX_DEPTH} levels deep")
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                inner += value.values()
            elif isinstance(value, list):
                inner += value
        level, depth = inner, depth + 1


def _choice(source: str) -> str:
    texts = _read(source, "choice")
    return str(LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(text) for text in texts)))


def _regex(source: str) -> str:
    r"""``\d`` is 0 to 9, as in JavaScript and JSON schemas; ``\w`` and ``\s`` are Unicode's, as in Python."""
    return str(LLMatcher.grammar_from_regex(regex_to_lark(source, "d")))


def _structural_tag(source: str, special: Mapping[str, int], plain: Collection[str]) -> str:
    """vLLM's structural tag: free text, and after each trigger one of the structures that begin with it.

    ``{"structures": [{"begin": …, "schema": {…}, "end": …}], "triggers": [begin of structures, …]}``
    With ``"required": true`` there is no free text, but one structure, or with ``"many": true`` one or several, or JSON
    of the schema ``"otherwise"``, or text whose first character is not ``"text_unless"``. A structure is JSON, but for
    arguments of calls: with ``"python": true`` they are Python's keyword arguments, with ``"quote"`` members whose
    strings stand between that mark. A structure's ``"name"`` and ``"path"`` say in errors which function it is, and
    where the request has its schema.
    """
    tag = _read(source, "structural_tag")
    if isinstance(tag, dict) and "format" in tag:
        raise UnusableConstraint("structural_tag.format is not supported; use structures and triggers")
    if not isinstance(tag, dict) or not isinstance(tag.get("structures"), list):
        raise UnusableConstraint("structural_tag must be an object with the lists structures and triggers")
    structures, triggers = tag["structures"], tag.get("triggers")
    if not structures or len(structures) > MAX_TAGS:
        raise UnusableConstraint(f"structural_tag.structures must have 1 to {MAX_TAGS} entries")
    if not isinstance(triggers, list) or not all(isinstance(text, str) and text for text in triggers):
        raise UnusableConstraint("structural_tag.triggers must be a list of strings that are not empty")
    required, many = tag.get("required") is True, tag.get("many") is True
    marks = [special[each] for each in plain if not any(each in text for text in triggers)]
    before, rules = (
        ("before ", [f"before: (TEXT <[{_ranges(marks)}]>)*"]) if marks and not required else ("", [])
    )
    for number, structure in enumerate(structures):
        begin, schema, end = _structure(structure, number)
        spell = partial(_spelt, special=special)
        trigger = next((text for text in triggers if begin.startswith(text)), None)
        if trigger is None:
            path = f"structural_tag.structures[{number}]"
            raise UnusableConstraint(f"{path}.begin starts with none of the triggers")
        opening, rest = _spelt(trigger, special), _spelt(begin[len(trigger) :], special)
        if required:
            opened = opening
        elif opening.startswith("<["):  # no text spells a special token, so none can run past it
            opened = f"{before}TEXT {opening}"
        else:
            rules.append(f"open_{number}[lazy]: TEXT {opening}")
            opened = f"{before}open_{number}"
        try:
            body, lines = _body(structure, schema, f"value_{number}", spell)
        except UnusableConstraint as error:
            raise of_structure(error, structure, number) from None
        rules += lines
        rules.append(f"tag_{number}: {opened} {rest} {body} {_spelt(end, special)}")
    tags = " | ".join(f"tag_{number}" for number in range(len(structures)))
    start = f"start: ({tags}){'+' if many else ''}" if required else f"start: ({tags})* rest"
    if required and "otherwise" in tag:
        otherwise, lines = json_rules(_checked_schema(tag["otherwise"]), "otherwise", WHITESPACE)
        start += f" | {otherwise}"
        rules += lines
    if required and isinstance(unless := tag.get("text_unless"), str):
        start += " | PLAIN"
        rules.append(rf"PLAIN: /\s*([^\s\x00-\x1f\x85{re.escape(unless)}](.|\n)*)?/")
    whole = ["%llguidance {}", start, *rules, *(() if required else [f"rest: {before}TEXT"])]
    if any("TEXT" in line for line in whole):
        whole.append(r"TEXT: /(.|\n)*/")
    return _lark_of(whole)


def _body(
    structure: Mapping[str, Any], schema: dict[str, Any], prefix: str, spell: Spelt
) -> tuple[str, list[str]]:
    """The rule between the begin and the end of a structure, and all rules that it needs."""
    if structure.get("python") is True:
        return python_arguments(schema, prefix, spell, WHITESPACE)
    if isinstance(quote := structure.get("quote"), str) and quote:
        return marked_arguments(schema, prefix, spell, quote)
    return json_rules(schema, prefix, WHITESPACE)


def of_structure(error: object, structure: Mapping[str, Any], number: int) -> UnusableConstraint:
    """The error of a structure's schema: with the name and the place that the structure says it has in the request."""
    name, path = structure.get("name"), structure.get("path")
    if isinstance(name, str) and isinstance(path, str):
        return UnusableConstraint(f"function {name!r:.80}: {error}", path=path)
    return UnusableConstraint(f"structural_tag.structures[{number}].schema: {error}")


def _spelt(text: str, special: Mapping[str, int]) -> str:
    """A text as a Lark expression: strings, and special tokens by id."""
    if not text:
        return ""
    if not special:
        return json.dumps(text)
    longest_first = sorted(special, key=len, reverse=True)
    parts = re.split("(" + "|".join(map(re.escape, longest_first)) + ")", text)
    return " ".join(f"<[{special[part]}]>" if part in special else json.dumps(part) for part in parts if part)


def _ranges(tokens: Iterable[int]) -> str:
    """Tokens as Lark's ranges: a vocabulary may have thousands of unused ones."""
    ranges: list[list[int]] = []
    for token in sorted(tokens):
        if ranges and token == ranges[-1][1] + 1:
            ranges[-1][1] = token
        else:
            ranges.append([token, token])
    return ",".join(f"{first}-{last}" for first, last in ranges)


def _structure(structure: Any, number: int) -> tuple[str, dict[str, Any], str]:
    path = f"structural_tag.structures[{number}]"
    if not isinstance(structure, dict):
        raise UnusableConstraint(f"{path} must be an object")
    begin, end, schema = structure.get("begin"), structure.get("end", ""), structure.get("schema", {})
    if not isinstance(begin, str) or not begin or not isinstance(end, str):
        raise UnusableConstraint(f"{path} must have the strings begin and end")
    if not isinstance(schema, dict) or "x-guidance" in schema:
        raise UnusableConstraint(f"{path}.schema must be a JSON schema that is an object")
    return begin, plain(schema), end
