"""Reads single fields of a ``config.json``, so that an error names a malformed field."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from headrace.compute.checkpoint import ModelError

MAX_INTEGER = 2**53
"""The largest integer of a config: floating point still holds it exactly."""

MAX_SHOWN = 60
"""Characters of a wrong value that an error shows."""


def _shown(value: Any) -> str:
    """A wrong value, shortened: it may have megabytes."""
    text = repr(value if not isinstance(value, str) else value[:MAX_SHOWN])
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}\u2026"


class ConfigReader:
    """A model's config, with its family's defaults."""

    def __init__(self, architecture: str, config: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self.architecture = architecture
        self._config = config
        self._defaults = defaults

    def get(self, field: str) -> Any:
        """The raw value, else the family's default, else None. An explicit null is None."""
        return self._config[field] if field in self._config else self._defaults.get(field)

    def given(self, field: str) -> bool:
        """Whether the config itself has a field that is not null."""
        return self._config.get(field) is not None

    def object(self, field: str) -> Mapping[str, Any]:
        """An object of further fields; empty if there is none."""
        value = self.get(field)
        if value is not None and not isinstance(value, Mapping):
            raise ModelError(
                f"{self.architecture}: {field} must be an object, the config has {_shown(value)}"
            )
        return value or {}

    def count(self, field: str) -> int:
        """An integer that may be 0."""
        return 0 if self.get(field) == 0 else self.integer(field)

    def integer(self, field: str) -> int:
        value = self.optional_integer(field)
        if value is None:
            raise ModelError(f"{self.architecture}: the config lacks {field}")
        return value

    def optional_integer(self, field: str) -> int | None:
        value = self.get(field)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ModelError(
                f"{self.architecture}: {field} must be a positive integer, the config has {_shown(value)}"
            )
        if value is not None and value > MAX_INTEGER:
            raise ModelError(
                f"{self.architecture}: {field} must be at most {MAX_INTEGER}, the config has {_shown(value)}"
            )
        return value

    def number(self, field: str) -> float:
        value = self.optional_number(field)
        if value is None:
            raise ModelError(f"{self.architecture}: the config lacks {field}")
        return value

    def optional_number(self, field: str) -> float | None:
        value = self.get(field)
        if value is None:
            return None
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0 < value <= sys.float_info.max:  # JSON as Python reads it has NaN and Infinity
            raise ModelError(
                f"{self.architecture}: {field} must be a positive number, the config has {_shown(value)}"
            )
        return float(value)

    def flag(self, field: str) -> bool:
        value = self.get(field)
        if value is not None and not isinstance(value, bool):
            raise ModelError(
                f"{self.architecture}: {field} must be true or false, the config has {_shown(value)}"
            )
        return bool(value)

    def integers(self, field: str) -> list[int] | None:
        """A list of integers, or None."""
        value = self.get(field)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(each, int) for each in value):
            raise ModelError(
                f"{self.architecture}: {field} must be a list of integers, the config has {_shown(value)}"
            )
        return value

    def names(self, field: str) -> list[str] | None:
        """A list of names, or None."""
        value = self.get(field)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise ModelError(
                f"{self.architecture}: {field} must be a list of names, the config has {_shown(value)}"
            )
        return value
