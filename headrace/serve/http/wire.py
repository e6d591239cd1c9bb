"""The base of all request bodies: strict values, no unknown fields, and errors that name the field.

Strict means: ``"5"`` is no number, ``true`` is no integer, and ``NaN`` is invalid. Each error names the field as the
client spelled it (``messages[0].content``). Fields are defined in the packages beside this file.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import PydanticCustomError, from_json

from headrace.serve.http.errors import ApiError, invalid
from headrace.serve.http.generation.unsupported import NotYet, refuse_unsupported


class Wire(BaseModel):
    """The base class of JSON objects in requests."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


INLINE_BYTES = 32 * 1024
"""Bodies up to this length are parsed on the event loop, in less than a millisecond; longer ones beside it."""

MOST_PARTS = 32_768
"""Maximum objects, lists and fields of a body. Each costs a microsecond or more, and the interpreter's lock is held
while all of them are read."""

MOST_VALUES = 524_288
"""Maximum values of a body, such as the token ids of prompts."""

_PARSING = ThreadPoolExecutor(1, "headrace-body")
"""One thread: several would only compete for the interpreter with the event loop."""

_OBJECT = re.compile(rb"[ \t\r\n]*+\{")
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)

FORM_MARK = "~"
"""First character of the tags that distinguish a field's forms; tags are not part of its path."""

WireT = TypeVar("WireT", bound=Wire)
ResultT = TypeVar("ResultT")


async def beside(raw: bytes, read: Callable[[], ResultT]) -> ResultT:
    """What ``read`` returns, which parses ``raw``: on a thread if that takes long."""
    if len(raw) <= INLINE_BYTES:
        return read()
    return await asyncio.get_running_loop().run_in_executor(_PARSING, read)


async def parse_beside(raw: bytes, form: type[WireT], not_yet: NotYet) -> WireT:
    """As `parse`, without holding up the event loop.

    Raises:
        ApiError: as `parse`.
    """
    return await beside(raw, lambda: parse(raw, form, not_yet))


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
    _check_size(raw)
    try:
        body = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise invalid(f"The request body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise _not_an_object()
    return body


def _not_an_object() -> ApiError:
    return invalid("The request body must be a JSON object.", code="invalid_json")


def _check_size(raw: bytes) -> None:
    """Raise ApiError if a body has more parts or values than can be read in a short time."""
    if len(raw) > INLINE_BYTES and not _OBJECT.match(raw):
        raise _not_an_object()
    if len(raw) <= INLINE_BYTES or not _too_many(
        raw.count(b"{") + raw.count(b"[") + raw.count(b":"), raw.count(b",")
    ):
        return
    parts = values = at = 0  # texts may have many such characters: count again without them
    for text in chain(_STRING.finditer(raw), (None,)):
        end = len(raw) if text is None else text.start()
        parts += raw.count(b"{", at, end) + raw.count(b"[", at, end) + raw.count(b":", at, end)
        values += raw.count(b",", at, end)
        if why := _too_many(parts, values):
            raise invalid(f"The request body has more than {why}.", code="request_too_complex")
        at = end if text is None else text.end()


def _too_many(parts: int, values: int) -> str:
    """The limit that is exceeded, or an empty text."""
    if parts > MOST_PARTS:
        return f"{MOST_PARTS} objects, lists and fields"
    return f"{MOST_VALUES} values" if values > MOST_VALUES else ""


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
