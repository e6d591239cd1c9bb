"""The fields that ask for structured output, converted to a constraint.

They are OpenAI's ``response_format``, vLLM's ``structured_outputs`` and its older ``guided_…`` fields; a request may
set one of them. A constraint is compiled before its request is queued, so that a schema that cannot be enforced gets a
400, and on another thread, so that it does not block the event loop.
"""

from __future__ import annotations

import asyncio

from headrace.api.compile.fields import (
    JsonObjectFormat,
    JsonSchemaFormat,
    StructuralTagFormat,
    StructuredBody,
    StructuredOutputs,
    TextFormat,
)
from headrace.api.compile.model import ServedModel
from headrace.api.errors import ApiError, invalid
from headrace.core.constraint import (
    ANY_OBJECT,
    Constraint,
    ConstraintKind,
    UnusableConstraint,
    as_constraint,
    json_constraint,
)
from headrace.core.request import SamplingParams


def constraint(body: StructuredBody) -> Constraint | None:
    """The constraint on the output; None for any text.

    Raises:
        ApiError: several fields are set, or one is invalid.
    """
    asked = _asked(body)
    if len(asked) > 1:
        raise invalid(f"{asked[0]} and {asked[1]} cannot be used together", asked[1])
    if not asked:
        return None
    try:
        return _made(body, asked[0])
    except UnusableConstraint as error:
        raise refused(error, asked[0], None) from None


async def check_constraint(model: ServedModel, params: SamplingParams, body: StructuredBody) -> None:
    """Compile the constraint of a call, if it has one: of a field, of the tools, or a limit of the reasoning.

    Raises:
        ApiError: it cannot be enforced.
    """
    made = params.structured_outputs
    if made is None:
        return
    other = "thinking_token_budget" if made.kind is ConstraintKind.TEXT else "tools"
    param = demand(body) or other
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
        raise refused(error, param, kind) from None


def refused(error: UnusableConstraint, param: str, kind: ConstraintKind | None) -> ApiError:
    """400: a constraint that cannot be enforced, with the reason."""
    if error.path:
        return invalid(f"{error.path}: {error}", error.path, "unsupported_schema")
    code = "unsupported_schema" if kind in (None, ConstraintKind.JSON) else "invalid_grammar"
    if error.server:
        return invalid(str(error), param, "unsupported_parameter")
    return invalid(f"{param}: {error}", param, code)


def demand(body: StructuredBody) -> str | None:
    """The name of the field that constrains the output; None if there is none."""
    return next(iter(_asked(body)), None)


def _asked(body: StructuredBody) -> list[str]:
    """The names of the fields that are set."""
    asked = [name for name in _FIELDS if getattr(body, name) is not None]
    if isinstance(body.response_format, TextFormat):
        asked.remove("response_format")
    if body.structured_outputs is not None and not body.structured_outputs.model_dump(exclude_none=True):
        asked.remove("structured_outputs")
    return asked


_FIELDS = tuple(StructuredBody.model_fields)


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
