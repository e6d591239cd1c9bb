"""The base of all request bodies: strict values, no unknown fields, and errors that name the field.

Strict means: ``"5"`` is no number, ``true`` is no integer, and ``NaN`` is invalid. Each error names the field as the
client spelled it (``messages[0].content``). Fields are defined in the packages beside this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import PydanticCustomError, from_json

from headrace.serve.http.errors import ApiError, invalid
from headrace.serve.http.generation.unsupported import NotYet, refuse_unsupported


class Wire(BaseModel):
    """The base class of JSON objects in requests."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


FORM_MARK = "~"
"""First character of the tags that distinguish a field's forms; tags are not part of its path."""

WireT = TypeVar("WireT", bound=Wire)


def parse(raw: bytes, form: type[WireT], not_yet: NotYet) -> WireT:
    """The typed body of a request.

    Raises:
        ApiError: it is not a JSON object in UTF-8, or a field is wrong, unknown or not supported yet.
    """
    return valid(form, refuse_unsupported(json_object(raw), not_yet))


def json_object(raw: bytes) -> dict[str, Any]:
    """The JSON object in a request's body.

    Raises:
        ApiError: it is not a JSON object in UTF-8.
    """
    try:
        body = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise invalid(f"The request body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise invalid("The request body must be a JSON object.", code="invalid_json")
    return body


def valid(form: type[WireT], body: Mapping[str, Any]) -> WireT:
    """A JSON object as its type.

    Raises:
        ApiError: a field is wrong or unknown.
    """
    try:
        return form.model_validate(body)
    except ValidationError as error:
        raise _first_error(error) from None


def wrong_type(expected: str) -> PydanticCustomError:
    """For validators of fields that take several forms: one message instead of one per form."""
    return PydanticCustomError("wrong_type", "must be {expected}", {"expected": expected})


def wrong_value(why: str) -> PydanticCustomError:
    """For validators: the type is right, the value is not."""
    return PydanticCustomError("wrong_value", "{why}", {"why": why})


def _first_error(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_input=False)[0]
    param, kind = _path(first["loc"]), first["type"]
    if kind == "missing":
        return invalid(f"Missing required parameter: {param!r}.", param, "missing_required_parameter")
    if kind == "extra_forbidden":
        return invalid(f"Unknown parameter: {param!r}.", param, "unknown_parameter")
    what = "type" if kind.endswith("_type") else "value"
    reason = _REASONS.get(kind) or first["msg"].removeprefix("Input ")
    return invalid(f"Invalid {what} for {param!r}: {reason}.", param, f"invalid_{what}")


_REASONS = {
    "model_type": "should be an object",
    "dict_type": "should be an object",
    "too_short": "is too short",
}


def _path(loc: tuple[int | str, ...]) -> str:
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not part.startswith(FORM_MARK):
            path += f".{part}" if path else part
    return path
