"""Reads an option whose value is a JSON object: parses the text, and checks the keys and their values."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from headrace.config.errors import ConfigError, suggestion

Reader = Callable[[str, Any], Any]
"""Checks the value of one key; errors name it by the label, which is the first argument."""


def json_object(label: str, value: Any, example: str) -> Mapping[str, Any]:
    """The object from JSON text, or the object itself.

    Raises:
        ConfigError: it is neither; the message shows the ``example``.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value, object_pairs_hook=_once)
        except ValueError as error:
            raise ConfigError(f"{label}: expected a JSON object such as {example}: {error}") from None
    if not isinstance(value, Mapping):
        raise ConfigError(f"{label}: expected a JSON object such as {example}, got {value!r}")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} stands twice")
        found[key] = value
    return found


def read_keys(label: str, given: Mapping[str, Any], readers: Mapping[str, Reader]) -> dict[str, Any]:
    """The checked values of an object's keys.

    Raises:
        ConfigError: a key is unknown, or its reader refuses its value.
    """
    for key in given:
        if key not in readers:
            known = ", ".join(readers)
            raise ConfigError(f"{label}: there is no key {key!r}{suggestion(key, readers)}; known: {known}")
    return {key: readers[key](f"{label}: {key}", value) for key, value in given.items()}


def whole_number(least: int, most: int) -> Callable[[str, Any], int]:
    """A reader of whole numbers within bounds."""

    def read(label: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ConfigError(f"{label}: expected a whole number from {least} to {most}, got {value!r}")
        return value

    return read


def switch(label: str, value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise ConfigError(f"{label}: expected true or false, got {value!r}")
    return value


def text(label: str, value: Any) -> str:
    """A text that is not empty."""
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{label}: expected a text, got {value!r}")
    return value
