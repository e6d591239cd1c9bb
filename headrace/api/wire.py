"""The types of request bodies: strict values and no unknown fields. `body` reads them.

- Strict means: ``"5"`` is no number, ``true`` is no integer, and ``NaN`` is invalid.
- ``null`` for a field that has a default means the default, as if the field was absent.
- Items of a conversation that clients send back (`Replayed`, `Answered`) may have fields that they got from an answer.
- Where a dialect is served as a chat request, errors still name the field as the client spelled it (`named`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Discriminator, model_validator
from pydantic_core import PydanticCustomError

from headrace.api.errors import ApiError, invalid, not_supported
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


FORM_MARK = "~"
"""First character of the tags that distinguish a field's forms, so that no tag is equal to a field."""


def either(field: str, value: str, form: str, other: str) -> Discriminator:
    """Tells two forms of an object apart: it has ``form`` if its ``field`` has this value, else the ``other``."""

    def form_of(given: Any) -> str:
        found = given.get(field) if isinstance(given, dict) else getattr(given, field, None)
        return FORM_MARK + (form if found == value else other)

    return Discriminator(form_of)


WireT = TypeVar("WireT", bound=Wire)

ValueT = TypeVar("ValueT")

NotYet = Mapping[str, tuple[object, ...]]
"""Fields that are known and not supported, with the values that have no effect."""


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
