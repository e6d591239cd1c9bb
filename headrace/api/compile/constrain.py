"""Stage 3 of compiling a request: how its outputs are sampled, what constrains them, and how they are parsed.

A constraint comes from the fields for structured output, from the tools and ``tool_choice``, and from a limit of the
reasoning. It is compiled before the request is queued, so that a schema that cannot be enforced gets a 400, and on
another thread, so that it does not block the event loop. Next: `submit`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from functools import cache, lru_cache
from typing import Any

from headrace.api.compile.bodies import CallRule, ChatBody, Tool
from headrace.api.compile.call import Prompt
from headrace.api.compile.draft import AnyDraft, ChatDraft, Facts
from headrace.api.compile.fields import (
    Generation,
    JsonObjectFormat,
    JsonSchemaFormat,
    StructuralTagFormat,
    StructuredBody,
    StructuredOutputs,
    Way,
    ways,
)
from headrace.api.compile.model import ServedModel
from headrace.api.errors import ApiError, invalid
from headrace.core.constraint import (
    ANY_OBJECT,
    ANY_TEXT,
    Constraint,
    ConstraintKind,
    ReasoningLimit,
    UnusableConstraint,
    WrittenFloat,
    as_constraint,
    json_constraint,
)
from headrace.core.request import SamplingParams
from headrace.text.parsing.formats import ReasoningFormat, ToolFormat, Written
from headrace.text.parsing.machine import Reading

KNOWN_PARAMS = 256
"""Sampling parameters that are kept for the next request with the same ones."""


async def constrain(draft: AnyDraft) -> None:
    """Complete the prompts: with sampling parameters, the constraint, and the parser of outputs.

    Raises:
        ApiError: a token id does not exist, or the constraint is invalid or cannot be enforced.
        InvalidParameter: a value is outside its range.
    """
    body, model = draft.body, draft.model
    made, reading, continues, mute = stated_constraint(body), None, True, False
    if isinstance(draft, ChatDraft):
        made = output_constraint(draft.body, draft.facts, draft.opened, made)
        reading = output_reading(draft.body, draft.facts, draft.opened)
        continues = bool(draft.body.continue_final_message)
    else:
        mute = draft.mute
    length = draft.encoded[0].max_tokens
    bad_words = await bad_word_tokens(body.bad_words or [], model)
    params = sampling_params(
        body, model, max_tokens=length, logprobs=draft.logprobs, constraint=made, bad_words=bad_words
    )
    await _check_enforceable(model, body, made)
    draft.prompts = [
        Prompt(
            each.tokens,
            params if each.max_tokens == length else replace(params, max_tokens=each.max_tokens),
            continues,
            mute,
            each.echo,
            each.retention,
            reading,
            each.prediction,
            each.about,
            each.images,
        )
        for each in draft.encoded
    ]


def sampling_params(
    body: Generation,
    model: ServedModel,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    constraint: Constraint | None,
    bad_words: tuple[tuple[int, ...], ...],
) -> SamplingParams:
    """How to sample an output of at most ``max_tokens`` tokens; ``bad_words`` are the tokens of the field's words.

    Fields of the kind `Way.SAMPLING` that `SamplingParams` has too keep their value; it checks their range. A field
    that is not set has the model's default.

    Raises:
        ApiError: a token id does not exist.
        InvalidParameter: a value is outside its range.
    """
    values = {name: value for name in _same_fields(type(body)) if (value := getattr(body, name)) is not None}
    biases = tuple((int(token), bias) for token, bias in (body.logit_bias or {}).items())
    allowed = None if body.allowed_token_ids is None else tuple(dict.fromkeys(body.allowed_token_ids))
    stop_token_ids = tuple(body.stop_token_ids or ())
    model.check_tokens(stop_token_ids, "stop_token_ids")
    model.check_tokens(allowed or (), "allowed_token_ids")
    model.check_tokens([token for token, _ in biases], "logit_bias")
    ends = {*stop_token_ids, *(() if body.ignore_eos else model.tokenizer.eos_token_ids)}
    if allowed and body.min_tokens and ends.issuperset(allowed):
        message = (
            "allowed_token_ids leaves nothing to choose from before min_tokens: each of them ends the answer"
        )
        raise invalid(message, "allowed_token_ids")
    defaults = model.defaults.params
    values |= {
        "top_k": min(values.get("top_k", defaults.top_k), model.vocab_size),  # beyond it, no bound
        "logit_bias": biases,
        "allowed_token_ids": allowed,
        "bad_words": bad_words,
        "max_tokens": max_tokens,
        "logprobs": logprobs,
        "structured_outputs": constraint,
    }
    if constraint is None:
        with suppress(TypeError):  # a list cannot be looked up
            return _known_params(defaults, tuple(values.items()))
    return replace(defaults, **values)


@lru_cache(KNOWN_PARAMS)
def _known_params(defaults: SamplingParams, values: tuple[tuple[str, Any], ...]) -> SamplingParams:
    """``defaults`` with other ``values``. Most requests of a client have the same ones, which are checked once."""
    return replace(defaults, **dict(values))


@cache
def _same_fields(form: type[Generation]) -> tuple[str, ...]:
    """The sampling fields of a body that sampling parameters have under the same name."""
    known = {each.name for each in fields(SamplingParams)}
    return tuple(name for name, way in ways(form).items() if way is Way.SAMPLING and name in known)


async def bad_word_tokens(words: list[str], model: ServedModel) -> tuple[tuple[int, ...], ...]:
    """The tokens of each word, at the beginning of a text and after a space."""
    if not all(word.strip() for word in words):
        raise invalid("bad_words must not contain an empty word", "bad_words")
    texts = [text for word in words for text in (word, " " + word.lstrip())]
    tokenized = await model.encode_batch(texts, add_special_tokens=False) if texts else []
    return tuple(dict.fromkeys(map(tuple, tokenized)))


# Constraints of the fields for structured output.


def stated_constraint(body: StructuredBody) -> Constraint | None:
    """The constraint that fields for structured output ask for; None for any text.

    Raises:
        ApiError: several fields are set, or one is invalid.
    """
    asked = body.constraining
    if len(asked) > 1:
        raise invalid(f"{asked[0]} and {asked[1]} cannot be used together", asked[1])
    if not asked:
        return None
    try:
        return _made(body, asked[0])
    except UnusableConstraint as error:
        raise _refused(error, asked[0], None) from None


def _made(body: StructuredBody, field: str) -> Constraint:
    value = getattr(body, field)
    match value:
        case JsonObjectFormat():
            return Constraint(ConstraintKind.JSON, ANY_OBJECT)
        case JsonSchemaFormat():
            return json_constraint(value.json_schema.schema_)
        case StructuralTagFormat():
            return as_constraint({"structural_tag": value.model_dump(exclude={"type"})})
        case StructuredOutputs():
            return as_constraint(value.model_dump(by_alias=True, exclude_none=True))
    return as_constraint({field.removeprefix("guided_"): value})


async def _check_enforceable(model: ServedModel, body: Generation, made: Constraint | None) -> None:
    """Compile the constraint of a call, if it has one: of a field, of the tools, or a limit of the reasoning.

    Raises:
        ApiError: it cannot be enforced.
    """
    if made is None:
        return
    other = "thinking_token_budget" if made.kind is ConstraintKind.TEXT else "tools"
    param = next(iter(body.constraining), other)
    grammars = model.grammars
    if grammars is None:
        raise invalid(
            "this server has no grammar engine for structured outputs", param, "unsupported_parameter"
        )
    try:
        if not grammars.ready(made):
            await asyncio.to_thread(grammars.check, made)
    except UnusableConstraint as error:
        kind = ConstraintKind.JSON if isinstance(body.response_format, JsonSchemaFormat) else made.kind
        raise _refused(error, param, kind) from None


def _refused(error: UnusableConstraint, param: str, kind: ConstraintKind | None) -> ApiError:
    """400: a constraint that cannot be enforced, with the reason."""
    if error.path:
        return invalid(f"{error.path}: {error}", error.path, "unsupported_schema")
    code = "unsupported_schema" if kind in (None, ConstraintKind.JSON) else "invalid_grammar"
    if error.server:
        return invalid(str(error), param, "unsupported_parameter")
    return invalid(f"{param}: {error}", param, code)


# Constraints of tools and reasoning.


def output_constraint(
    body: ChatBody, facts: Facts, opened: bool, stated: Constraint | None
) -> Constraint | None:
    """All constraints on the outputs of a conversation together: their format, their tool calls and their reasoning.

    A required call has no text, so ``response_format`` does not apply to it. Otherwise an output has the ``stated``
    format, or calls tools. These constraints begin after reasoning that the prompt has ``opened``.

    Raises:
        ApiError: it cannot be enforced.
    """
    reasoning = facts.reasoning
    asked = None if facts.rule.forced else stated
    made = _tools_constraint(body, facts) if asked is None else _or_calls(asked, body, facts)
    if made is not None and reasoning is not None and opened:
        made = replace(made, after=reasoning.end[0])
    if body.thinking_token_budget is not None:
        made = replace(made or ANY_TEXT, reasoning=_limit(reasoning, body.thinking_token_budget, opened))
    return made


def _tools_constraint(body: ChatBody, facts: Facts) -> Constraint | None:
    """The constraint of ``tools`` and ``tool_choice``; None if there is none."""
    written = facts.written
    if written is None:
        return None
    parallel = body.parallel_tool_calls is not False
    tag = constraint_for_tools(body.tools or (), facts.rule, written, parallel=parallel)
    if tag is None:
        return None
    try:
        return as_constraint({"structural_tag": tag})
    except UnusableConstraint as error:
        raise _refused(error, "tools", None) from None


def _limit(reasoning: ReasoningFormat | None, tokens: int, opened: bool) -> ReasoningLimit:
    if reasoning is None:
        raise invalid(
            "thinking_token_budget: the chat template of this model shows no known format of reasoning; "
            "name one with --reasoning-parser",
            "thinking_token_budget",
            "unsupported_parameter",
        )
    return ReasoningLimit(tokens, reasoning.begin, reasoning.end, opened, reasoning.first)


def _or_calls(stated: Constraint, body: ChatBody, facts: Facts) -> Constraint:
    """``stated``, or calls of the tools: with ``response_format``, an output that calls no tool is JSON.

    Only ``stated`` if calls cannot be distinguished from text, or if another field made the constraint.
    """
    json_text = body.response_format is not None and stated.kind is ConstraintKind.JSON
    written = facts.calls
    if not json_text or not body.tools or written is None or body.tool_choice == "none":
        return stated
    parallel = body.parallel_tool_calls is not False
    tag = constraint_for_tools(body.tools, facts.rule._replace(mode="required"), written, parallel=parallel)
    try:
        schema = json.loads(stated.source, parse_float=WrittenFloat)
    except ValueError:
        return stated
    return stated if tag is None else as_constraint({"structural_tag": tag | {"otherwise": schema}})


def constraint_for_tools(
    tools: Sequence[Tool], rule: CallRule, written: ToolFormat, *, parallel: bool = True
) -> dict[str, Any] | None:
    """The structural tag that enforces ``rule``; None if there is no constraint.

    ``{"structures": [{"begin", "schema", "end"}], "triggers": […]}``. Required calls, which begin with the first token,
    have ``"required": true`` too, and ``"many"``: whether several calls are allowed. With ``auto`` the output is free
    until a call begins; then it is a call of an allowed tool, and a call of a ``strict`` tool follows its schema. If
    only its first character distinguishes a call, an output that does not begin with it is free (``"text_unless"``).

    Args:
        tools: the tools of the request.
        rule: what its ``tool_choice`` says.
        written: how the model writes calls.
        parallel: whether the output may have several calls.
    """
    held = [(at, tool) for at, tool in enumerate(tools) if rule.allows(tool.function.name)]
    limited = len(held) < len(tools) or any(tool.function.strict for _, tool in held)
    form = written.written
    first = _first_character(written)
    if rule.mode == "none" or not held or not (rule.forced or (limited and (form.trigger or first))):
        return None
    exact = rule.forced or form.python or form.quote  # these formats have no schema for arbitrary arguments
    structures = [
        _structure(form, at, tool, _schema(tool) if exact or tool.function.strict else _ANY)
        for at, tool in held
    ]
    if not rule.forced and form.trigger:
        return {"structures": structures, "triggers": [form.trigger]}
    made = {
        "structures": structures,
        "triggers": [form.before_name],
        "required": True,
        "many": parallel and not rule.one and not form.single,
    }
    return made if rule.forced else made | {"text_unless": first}


def _first_character(written: ToolFormat) -> str:
    """The character that alone distinguishes a call from text; empty if there is none, or more than one."""
    firsts = {opening.first for opening in written.openings if not opening.begin}
    return firsts.pop() if len(firsts) == 1 else ""


_ANY: dict[str, Any] = {"type": "object"}


def _schema(tool: Tool) -> dict[str, Any]:
    return tool.function.parameters or {"type": "object", "properties": {}, "additionalProperties": False}


def _structure(form: Written, at: int, tool: Tool, schema: dict[str, Any]) -> dict[str, Any]:
    name = tool.function.name
    begin = form.before_name + name + form.before_arguments
    made: dict[str, Any] = {"begin": begin, "schema": schema, "end": form.end}
    made |= {"name": name, "path": f"tools[{at}].function.parameters"}
    if form.python:
        made["python"] = True
    if form.quote:
        made["quote"] = form.quote
    return made


def output_reading(body: ChatBody, facts: Facts, opened: bool) -> Reading | None:
    """How the outputs of a conversation are parsed; None if they are plain text."""
    rule, reasoning = facts.rule, facts.reasoning
    tools = facts.written if body.tools and rule.mode != "none" else None
    if tools is None and reasoning is None:
        return None
    functions = [tool.function for tool in body.tools or () if rule.allows(tool.function.name)]
    return Reading(
        tools,
        reasoning,
        opened=opened,
        schemas={function.name: _properties(function.parameters) for function in functions},
        limited=rule.names is not None,
        forced=tools is not None and rule.forced,
        parallel=body.parallel_tool_calls is not False,
        show_reasoning=body.include_reasoning is not False,
    )


def _properties(schema: Mapping[str, Any] | None) -> dict[str, Any]:
    found = (schema or {}).get("properties")
    return dict(found) if isinstance(found, Mapping) else {}
