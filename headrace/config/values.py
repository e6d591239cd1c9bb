"""Sizes and durations as text: converts ``2GiB`` and ``30s`` to bytes and seconds, and back for display.

A field declares its unit in its metadata: ``Field(json_schema_extra=BYTES)`` or ``=SECONDS``. A plain number means
bytes or seconds.
"""

from __future__ import annotations

import ipaddress
import re
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from headrace.config.errors import ConfigError, suggestion

BYTES: dict[str, Any] = {"unit": "bytes"}
SECONDS: dict[str, Any] = {"unit": "seconds"}

SIZE_FORMS = "a size such as 512MB or 2GiB, or a number of bytes"
DURATION_FORMS = "a duration such as 500ms, 30s, 5m or 1h, or a number of seconds"

_DECIMAL = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_BINARY = {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_KUBERNETES = {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}
_SIZES = {"": 1, "b": 1} | _DECIMAL | _BINARY | _KUBERNETES
_DURATIONS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)")
_PART = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|min|s|m|h|d)")


def parse_size(text: str) -> int:
    """Bytes of a size such as ``512MB`` (powers of 1000) or ``2GiB`` (powers of 1024).

    Raises:
        ValueError: the text is no size.
    """
    match = _SIZE.fullmatch(text.strip().lower())
    if match is None or match[2] not in _SIZES or ("." in match[1] and match[2] in ("", "b")):
        raise ValueError(f"expected {SIZE_FORMS}, got {text!r:.200}")
    whole, _, fraction = match[1].partition(".")
    unit = _SIZES[match[2]]
    return int(whole) * unit + (int(fraction) * unit // 10 ** len(fraction) if fraction else 0)


def parse_duration(text: str) -> float:
    """Seconds of a duration such as ``500ms``, ``30s``, ``5m`` or ``1h30m``, or of a plain number.

    Raises:
        ValueError: the text is no duration.
    """
    given = text.strip().lower()
    try:
        return float(given)
    except ValueError:
        pass
    parts = list(_PART.finditer(given))
    if not parts or "".join(part[0] for part in parts) != given:
        raise ValueError(f"expected {DURATION_FORMS}, got {text!r:.200}")
    return sum(float(part[1]) * _DURATIONS[part[2]] for part in parts)


def show_size(size: int) -> str:
    """Bytes in the largest binary unit that leaves a whole number: ``256MiB``."""
    for name, unit in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size and size % unit == 0:
            return f"{size // unit}{name}"
    return f"{size}"


def show_duration(seconds: float) -> str:
    """Seconds in a readable unit: ``20ms``, ``30s``, ``10m``, ``1h``."""
    if seconds and seconds < 1:
        return f"{1000 * seconds:g}ms"
    for name, unit in (("h", 3600), ("m", 60)):
        if seconds and seconds % unit == 0:
            return f"{int(seconds // unit)}{name}"
    return f"{seconds:g}s" if seconds else "0"


# Reads values of options from text and numbers, with error messages that list the accepted values.


def parse_value(label: str, hint: Any, value: Any, *, secret: bool = False) -> Any:
    """The value of a field whose annotation is ``hint`` (``Annotated[type, Field(...)]``).

    ``label`` is the field's name in errors, as the user wrote it; a ``secret`` value is not shown.

    Raises:
        ConfigError: the value has the wrong type or is out of range.
    """
    kind, info, *_ = get_args(hint)
    try:
        if isinstance(value, bool) and not _is_switch(kind):
            raise ValueError
        return TypeAdapter(hint).validate_python(_number(info, value))
    except ValueError as error:
        if isinstance(error, ValidationError) and (why := _own_reason(error)):
            raise ConfigError(f"{label}{why}") from None
        got = "" if secret else f", got {value!r:.200}"
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
        raise ConfigError(
            f"{label}: expected an address such as 127.0.0.1, ::1 or 0.0.0.0, got {value!r:.200}"
        )
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


def expected_of(hint: Any) -> str:
    """The accepted values of a field by its annotation."""
    kind, info, *_ = get_args(hint)
    return expected(kind, info)


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
    return f"expected {wanted}, got {first['input']!r:.200}"


def _own_reason(error: ValidationError) -> str:
    """The reason that a validator of the field gave, after its place in a list; empty if pydantic refused the value."""
    first = error.errors(include_url=False)[0]
    if first["type"] != "value_error":
        return ""
    places = (f"[{each}]" for each in first["loc"] if isinstance(each, int))
    return f"{''.join(places)}: {first['ctx']['error']}"


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
