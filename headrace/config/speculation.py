"""The value of ``--speculative-config``: a JSON object with vLLM's names where they exist, checked key by key."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.config.errors import ConfigError, suggestion
from headrace.config.quantities import parse_size

METHODS = ("ngram", "suffix", "prediction", "cached")

MOST_TOKENS = 64
"""The largest ``num_speculative_tokens``: longer drafts hardly ever pay."""


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """How drafts are made and how many are verified.

    ``methods`` are all used; for each request the one that promises most is. ``num_speculative_tokens`` is the most
    tokens drafted for a request in a step: as many of them are verified as pay, or always all if not ``adaptive``.
    ``prompt_lookup_min`` and ``prompt_lookup_max`` bound the length of the text that ``ngram`` looks up, in tokens.
    ``suffix_max_bytes`` is the memory of the past outputs that ``suffix`` searches.
    """

    methods: tuple[str, ...]
    num_speculative_tokens: int = 16
    adaptive: bool = True
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 16
    suffix_max_bytes: int = 64 << 20


def read_speculation(label: str, value: str | Mapping[str, Any]) -> SpeculativeConfig:
    """The configuration of JSON text, or of the object itself; an error names it ``label``.

    Raises:
        ConfigError: it is no JSON object, or a key or a value is unknown.
    """
    given = _object(label, value)
    for key in given:
        if key not in _READERS:
            known = ", ".join(_READERS)
            raise ConfigError(f"{label}: there is no key {key!r}{suggestion(key, _READERS)}; known: {known}")
    if "method" not in given:
        raise ConfigError(
            f"{label}: the key 'method' is missing: one of {', '.join(METHODS)}, or a list of them"
        )
    read = {key: _READERS[key](f"{label}: {key}", value) for key, value in given.items()}
    config = SpeculativeConfig(methods=read.pop("method"), **read)
    if config.prompt_lookup_min > config.prompt_lookup_max:
        raise ConfigError(
            f"{label}: prompt_lookup_min {config.prompt_lookup_min} is above prompt_lookup_max"
            f" {config.prompt_lookup_max}"
        )
    return config


def speculation_text(label: str, value: Any) -> Any:
    """The value of the option as JSON text, checked; None stays None.

    Raises:
        ConfigError: see `read_speculation`.
    """
    if value is None:
        return None
    given = _object(label, value)
    read_speculation(label, given)
    return json.dumps(given, sort_keys=True)


def _object(label: str, value: Any) -> Mapping[str, Any]:
    example = '{"method": "ngram", "num_speculative_tokens": 8}'
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise ConfigError(f"{label}: expected a JSON object such as {example}: {error}") from None
    if not isinstance(value, Mapping):
        raise ConfigError(f"{label}: expected a JSON object such as {example}, got {value!r}")
    return value


def _methods(label: str, value: Any) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not names:
        raise ConfigError(f"{label}: expected one of {', '.join(METHODS)}, or a list of them, got {value!r}")
    for name in names:
        if name not in METHODS:
            near = suggestion(name, METHODS) if isinstance(name, str) else ""
            raise ConfigError(f"{label}: expected one of {', '.join(METHODS)}, got {name!r}{near}")
    return tuple(dict.fromkeys(names))


def _count(least: int, most: int) -> Callable[[str, Any], int]:
    def read(label: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ConfigError(f"{label}: expected a whole number from {least} to {most}, got {value!r}")
        return value

    return read


def _switch(label: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{label}: expected true or false, got {value!r}")
    return value


def _bytes(label: str, value: Any) -> int:
    try:
        size = parse_size(value) if isinstance(value, str) else _count(1, 1 << 50)(label, value)
    except ValueError as error:
        raise ConfigError(f"{label}: {error}" if not isinstance(error, ConfigError) else str(error)) from None
    return size


_READERS: Mapping[str, Callable[[str, Any], Any]] = {
    "method": _methods,
    "num_speculative_tokens": _count(1, MOST_TOKENS),
    "adaptive": _switch,
    "prompt_lookup_min": _count(1, MOST_TOKENS),
    "prompt_lookup_max": _count(1, MOST_TOKENS),
    "suffix_max_bytes": _bytes,
}
