"""The base of all request bodies: strict values, no unknown fields, and errors that name the field.

- Strict means: ``"5"`` is no number, ``true`` is no integer, and ``NaN`` is invalid.
- ``null`` for a field that has a default means the default, as if the field was absent.
- Items of a conversation that clients send back (`Replayed`, `Answered`) may have fields that they got from an answer.
- Each error names the field as the client spelled it (``messages[0].content``), also where a dialect is served as
  a chat request (`named`).
- A known field that is not supported yet is refused by name, unless it has a neutral value (`refuse_unsupported`).
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from itertools import chain, takewhile
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, ValidationError, model_validator
from pydantic_core import PydanticCustomError, from_json

from headrace.api.errors import ApiError, invalid, not_supported
from headrace.core.constraint import WrittenFloat
from headrace.core.request import InvalidParameter


class Wire(BaseModel):
    """The base class of JSON objects in requests."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        """The object without optional fields that are null, so that their defaults apply."""
        if not isinstance(value, dict) or None not in value.values():
            return value
        optional = _optional(cls)
        return {name: each for name, each in value.items() if each is not None or name not in optional}


class Replayed(Wire):
    """The base of items of a conversation, which clients send back: an unknown field that is null has no effect.

    Clients add the fields of their newest version, and leave them null.
    """

    @model_validator(mode="before")
    @classmethod
    def _without_unknown(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        known = _names(cls)
        return {
            name: each
            for name, each in value.items()
            if name in known or not (each is None or cls._from_answer(name, each))
        }

    @classmethod
    def _from_answer(cls, name: str, value: Any) -> bool:
        """Whether an unknown field is a part of an earlier answer, so that it has no effect."""
        return False


OUTPUT_FIELDS = frozenset(
    (
        *("annotations", "async", "async_", "caller", "created_by", "extras", "finish_reason", "id", "index"),
        *("logprobs", "parsed", "parsed_arguments", "parsed_output", "partial_json", "phase"),
        *("provider_specific_fields", "reasoning", "reasoning_content", "reasoning_details"),
        *("reasoning_items", "status", "stop_reason", "thinking_blocks", "token_ids", "toolset_name"),
    )
)
"""Fields that answers have in clients, and that say nothing to the model when clients send the answers back."""


class Answered(Replayed):
    """The base of items that an earlier answer had: unknown fields of `OUTPUT_FIELDS` and empty ones have no effect."""

    @classmethod
    def _from_answer(cls, name: str, value: Any) -> bool:
        return name in OUTPUT_FIELDS or value == [] or value == {}


@cache
def _names(form: type[Wire]) -> frozenset[str]:
    """The names of the fields, as clients spell them."""
    return frozenset(field.alias or name for name, field in form.model_fields.items())


@cache
def _optional(form: type[Wire]) -> frozenset[str]:
    """The names of the fields that have a default."""
    required = {field.alias or name for name, field in form.model_fields.items() if field.is_required()}
    return _names(form) - required


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
WITH_SCHEMAS = frozenset(
    (
        "functions",
        "guided_json",
        "output_config",
        "output_format",
        "requests",
        "response_format",
        "structured_outputs",
        "text",
        "tools",
    )
)
"""Fields of bodies that contain JSON schemas, whose numbers are enforced with all their digits."""


_LONG_NUMBER = re.compile(rb"[0-9.]{16}|[eE][+-]?[0-9]{3}")
"""Finds every fraction that a double may not hold exactly; a double holds 15 digits."""


FORM_MARK = "~"
"""First character of the tags that distinguish a field's forms, so that no tag is equal to a field."""


def either(field: str, value: str, form: str, other: str) -> Discriminator:
    """Tells two forms of an object apart: it has ``form`` if its ``field`` has this value, else the ``other``."""

    def form_of(given: Any) -> str:
        found = given.get(field) if isinstance(given, dict) else getattr(given, field, None)
        return FORM_MARK + (form if found == value else other)

    return Discriminator(form_of)


WireT = TypeVar("WireT", bound=Wire)

ResultT = TypeVar("ResultT")
ValueT = TypeVar("ValueT")


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
    if not WITH_SCHEMAS.isdisjoint(body) and _LONG_NUMBER.search(raw):
        body.update(_with_digits(raw))
    return body


def _with_digits(raw: bytes) -> dict[str, Any]:
    """The fields of a body that contain schemas, in which fractions keep all their digits.

    Raises:
        ApiError: a number is too long, or the body too deep.
    """
    try:
        body: dict[str, Any] = json.loads(raw, parse_float=WrittenFloat)
    except (ValueError, RecursionError) as error:
        raise invalid(f"The request body cannot be read: {error}", code="invalid_json") from None
    return {name: body[name] for name in WITH_SCHEMAS & body.keys()}


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
        raise _first_error(error, body) from None


def reason_of(error: ValidationError) -> str:
    """The reason of the first error, without its field."""
    return _reason(error.errors(include_url=False, include_input=False)[0])


def wrong_type(expected: str) -> PydanticCustomError:
    """For validators of fields that take several forms: one message instead of one per form."""
    return PydanticCustomError("wrong_type", "must be {expected}", {"expected": expected})


def wrong_value(why: str) -> PydanticCustomError:
    """For validators: the type is right, the value is not."""
    return PydanticCustomError("wrong_value", "{why}", {"why": why})


def not_empty(values: list[ValueT]) -> list[ValueT]:
    """For validators: a list with at least one value."""
    if not values:
        raise wrong_value("must not be empty")
    return values


def is_token_ids(value: Any) -> bool:
    """Whether a value of JSON is a list of whole numbers."""
    return isinstance(value, list) and set(map(type, value)) <= {int}


def _first_error(error: ValidationError, body: Mapping[str, Any]) -> ApiError:
    found = error.errors(include_url=False, include_input=False)
    first = found[0]
    param, kind = _path(first, body), first["type"]
    if kind == "missing":
        return invalid(f"Missing required parameter: {param!r:.200}.", param, "missing_required_parameter")
    if kind == "extra_forbidden":
        return invalid(f"Unknown parameter: {param!r:.200}.", param, "unknown_parameter")
    what = "type" if kind.endswith("_type") else "value"
    reason = _reasons(takewhile(lambda each: _path(each, body) == param, found))
    return invalid(f"Invalid {what} for {param!r:.200}: {reason}.", param, f"invalid_{what}")


_REASONS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "model_type": lambda _: "should be an object",
    "dict_type": lambda _: "should be an object",
    "model_attributes_type": lambda _: "should be an object",
    "too_short": lambda _: "is too short",
    "union_tag_not_found": lambda context: f"should be an object with the field {context['discriminator']}",
    "union_tag_invalid": lambda context: (
        f"its field {context['discriminator']} should be one of {context['expected_tags']}"
    ),
}
"""Reasons whose text in pydantic shows its own words."""


def _reason(error: Mapping[str, Any]) -> str:
    made = _REASONS.get(error["type"])
    return str(error["msg"]).removeprefix("Input ") if made is None else made(error.get("ctx", {}))


def _reasons(errors: Iterable[Mapping[str, Any]]) -> str:
    """The reasons of the errors of one value: several if it may have several types, and has none of them."""
    first, *others = dict.fromkeys(map(_reason, errors))
    return " or ".join([first, *(each.removeprefix("should be ") for each in others)])


def _path(error: Mapping[str, Any], body: Mapping[str, Any]) -> str:
    """The place of an error in ``body``.

    pydantic's location also has the names of types and tags, which are not part of the body.
    """
    location: Sequence[int | str] = error["loc"]
    path = ""
    value: Any = body
    for at, part in enumerate(location):
        absent = at == len(location) - 1 and error["type"] == "missing"
        if isinstance(part, int):
            path += f"[{part}]"
            value = value[part] if isinstance(value, list) and part < len(value) else None
        elif (isinstance(value, dict) and part in value) or absent:
            path += f".{part}" if path else part
            value = None if absent else value[part]
    return path


NotYet = Mapping[str, tuple[object, ...]]

MESSAGE: NotYet = {"function_call": (), "audio": ()}
_ROLES = ("function",)


def refuse_unsupported(body: Mapping[str, Any], not_yet: NotYet) -> dict[str, Any]:
    """``body`` without the fields of ``not_yet``.

    Raises:
        ApiError: one of them has a value that is not neutral.
    """
    kept = without(body, not_yet, "")
    messages = kept.get("messages")
    if isinstance(messages, list):
        kept["messages"] = [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
    return kept


def _message(message: object, path: str) -> object:
    """One message without neutral unsupported fields; a value that is no object is left to validation."""
    if not isinstance(message, dict):
        return message
    role, content = message.get("role"), message.get("content")
    if role in _ROLES:
        raise not_supported(f"{path}.role", f"The role {role!r:.200}")
    kinds = ("text", "refusal") if role == "assistant" else ("text", "image_url")
    for i, part in enumerate(content if isinstance(content, list) else ()):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind not in kinds:
            raise not_supported(f"{path}.content[{i}].type", f"Content of type {kind!r:.200}")
    return without(message, MESSAGE, f"{path}.")


def without(body: Mapping[str, Any], not_yet: NotYet, path: str) -> dict[str, Any]:
    """``body`` without the fields of ``not_yet``; ``path`` is its place in the request.

    Raises:
        ApiError: one of them has a value that is not neutral.
    """
    kept = {}
    for name, value in body.items():
        if name not in not_yet:
            kept[name] = value
        elif value is not None and not any(_same(value, neutral) for neutral in not_yet[name]):
            raise not_supported(f"{path}{name}")
    return kept


def _same(value: object, other: object) -> bool:
    return type(value) is type(other) and value == other  # True == 1, but not on the wire


@contextmanager
def named(names: Mapping[str, str], places: Callable[[str], str] = str) -> Iterator[None]:
    """Rename fields in errors: ``names`` has the client's by those of the chat body.

    ``places`` does the same for paths within a text, where a field has another place in the client's body.
    """
    try:
        yield
    except InvalidParameter as error:
        raise _renamed(invalid(str(error), error.param), names, places) from None
    except ApiError as error:
        raise _renamed(error, names, places) from None


def _renamed(error: ApiError, names: Mapping[str, str], places: Callable[[str], str]) -> ApiError:
    param, message = error.param or "", str(error)
    first = re.split(r"[.\[]", param)[0]
    if first in names:
        name = re.compile("|".join(rf"\b{each}\b" for each in names))
        own, message = names[first], name.sub(lambda found: names[found[0]], message)
    elif (own := places(param)) != param:
        message = places(message)
    else:
        return error
    return ApiError(
        error.status,
        message,
        type=error.type,
        param=own,
        code=error.code,
        headers=error.headers,
    )


class Page(NamedTuple):
    """The page that a listing asks for; ``after`` is the id of the object before it."""

    limit: int
    newest_first: bool
    after: str | None


def read_page(query: Mapping[str, str], default: int, most: int) -> Page:
    """The page that ``query`` asks for, by default of ``default`` objects.

    Raises:
        ApiError: ``limit`` is no whole number from 1 to ``most``, or ``order`` is unknown.
    """
    limit = query.get("limit", str(default))
    if not (limit.isascii() and limit.isdigit() and len(limit) < 10 and 1 <= int(limit) <= most):
        raise invalid(f"limit must be a whole number from 1 to {most}", "limit")
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise invalid("order must be 'asc' or 'desc'", "order")
    return Page(int(limit), order == "desc", query.get("after"))
