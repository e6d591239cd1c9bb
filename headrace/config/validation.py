"""Reads values of options from text and numbers, with error messages that list the accepted values."""

from __future__ import annotations

import ipaddress
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from headrace.config.errors import ConfigError, suggestion
from headrace.config.quantities import (
    DURATION_FORMS,
    SIZE_FORMS,
    parse_duration,
    parse_size,
    show_duration,
    show_size,
)


def parse_value(label: str, hint: Any, value: Any, *, secret: bool = False) -> Any:
    """The value of a field whose annotation is ``hint`` (``Annotated[type, Field(...)]``).

    ``label`` is the field's name in errors, as the user wrote it; a ``secret`` value is not shown.

    Raises:
        ConfigError: the value has the wrong type or is out of range.
    """
    kind, info = get_args(hint)
    try:
        if isinstance(value, bool) and not _is_switch(kind):
            raise ValueError
        return TypeAdapter(hint).validate_python(_number(info, value))
    except ValueError:  # a ValidationError is one
        got = "" if secret else f", got {value!r}"
        hinted = _near_choice(kind, value)
        raise ConfigError(f"{label}: expected {expected(kind, info)}{got}{hinted}") from None


def parse_host(label: str, value: Any) -> Any:
    """An address to listen on; an IPv6 address may stand in brackets, as in a URL.

    Raises:
        ConfigError: the text is empty, or the brackets hold no IPv6 address.
    """
    if not isinstance(value, str):
        return value  # refused as any other value that is no text
    bare = value[1:-1] if value.startswith("[") and value.endswith("]") else value
    if not bare.strip() or (bare != value and not _is_ipv6(bare)):
        raise ConfigError(f"{label}: expected an address such as 127.0.0.1, ::1 or 0.0.0.0, got {value!r}")
    return bare


def unit_of(info: FieldInfo) -> str:
    """The unit of a field: ``bytes``, ``seconds`` or nothing."""
    extra = info.json_schema_extra
    return str(extra.get("unit", "")) if isinstance(extra, dict) else ""


def show_value(info: FieldInfo, value: Any) -> str:
    """A value of a field as a user would write it."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        if unit_of(info) == "bytes":
            return show_size(int(value))
        if unit_of(info) == "seconds":
            return show_duration(value)
    return str(value)


def plain_type(kind: Any) -> Any:
    """A type without its None."""
    if get_origin(kind) in (Union, UnionType):
        (kind,) = (each for each in get_args(kind) if each is not NoneType)
    return kind


def expected(kind: Any, info: FieldInfo) -> str:
    """The accepted values of a field, for an error message: ``a whole number from 1 to 1024``."""
    kind = plain_type(kind)
    extra = info.json_schema_extra
    if isinstance(extra, dict) and "expected" in extra:
        return str(extra["expected"])
    if get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, get_args(kind)))}"
    if get_origin(kind) is tuple:
        return "text, or a list of texts"
    if unit_of(info) == "bytes":
        return SIZE_FORMS + _limits(info)
    if unit_of(info) == "seconds":
        return DURATION_FORMS + _limits(info)
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return names.get(kind, "another value") + _limits(info).replace(", at ", " of at ").replace(
        ", above", " above"
    )


def plain_reason(error: ValidationError) -> str:
    """The first error of a value from a file, as text."""
    first = error.errors(include_url=False)[0]
    kind, limits = first["type"], first.get("ctx", {})
    bounds = {
        "greater_than": "a number above {gt:g}",
        "greater_than_equal": "a number of at least {ge:g}",
        "less_than": "a number below {lt:g}",
        "less_than_equal": "a number of at most {le:g}",
        "too_short": "at least {min_length} entries",
        "too_long": "at most {max_length} entries",
        "string_pattern_mismatch": "text that matches {pattern}",
        "literal_error": "one of {expected}",
    }
    types = {
        "int": "a whole number",
        "float": "a number",
        "bool": "true or false",
        "string": "text",
        "list": "a list",
        "tuple": "a list",
        "dict": "a mapping of names to values",
        "model": "a mapping of names to values",
        "dataclass": "a mapping of names to values",
        "finite": "a finite number",
    }
    if kind == "extra_forbidden":
        return "there is no such field"
    if kind == "missing":
        return "the field is missing"
    wanted = (
        bounds[kind].format(**limits) if kind in bounds else types.get(kind.split("_")[0], "another value")
    )
    return f"expected {wanted}, got {first['input']!r}"


def _number(info: FieldInfo, value: Any) -> Any:
    """Convert a size or duration in text to bytes or seconds."""
    if isinstance(value, str) and unit_of(info) == "bytes":
        return parse_size(value)
    if isinstance(value, str) and unit_of(info) == "seconds":
        return parse_duration(value)
    return value


def _is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return True


def _is_switch(kind: Any) -> bool:
    return plain_type(kind) is bool


def _near_choice(kind: Any, value: Any) -> str:
    kind = plain_type(kind)
    if get_origin(kind) is Literal and isinstance(value, str):
        return suggestion(value, map(str, get_args(kind)))
    return ""


def _limits(info: FieldInfo) -> str:
    """The bounds of a number as text."""
    found: dict[str, float] = {}
    for each in info.metadata:
        for name in ("ge", "gt", "le", "lt"):
            if (bound := getattr(each, name, None)) is not None:
                found[name] = bound
    shown = {name: show_value(info, bound) for name, bound in found.items()}
    low = f"at least {shown['ge']}" if "ge" in shown else f"above {shown['gt']}" if "gt" in shown else ""
    high = f"at most {shown['le']}" if "le" in shown else f"below {shown['lt']}" if "lt" in shown else ""
    if "ge" in shown and "le" in shown:
        return f" from {shown['ge']} to {shown['le']}"
    bounds = " and ".join(filter(None, (low, high)))
    return f", {bounds}" if bounds else ""
