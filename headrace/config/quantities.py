"""Sizes and durations as text: converts ``2GiB`` and ``30s`` to bytes and seconds, and back for display.

A field declares its unit in its metadata: ``Field(json_schema_extra=BYTES)`` or ``=SECONDS``. A plain number means
bytes or seconds.
"""

from __future__ import annotations

import re
from typing import Any

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
        raise ValueError(f"expected {SIZE_FORMS}, got {text!r}")
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
        raise ValueError(f"expected {DURATION_FORMS}, got {text!r}")
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
