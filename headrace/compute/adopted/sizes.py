"""Counts in a config of transformers that are checked before its model is built: each is so many modules.

A module takes some kilobytes even without memory for its weights, so a count of a billion would fill the machine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from headrace.compute.checkpoint import ModelError

MAX_COUNT = 1 << 16
"""The most of one kind of module."""

MAX_MODULES = 1 << 18
"""The most experts of all layers together, or of other modules within each other."""

_LAYERS = re.compile(r"(?:^|_)(?:n_?layers?|num_layers|(?:\w+_)?layers|layers_\w+|depths?)$")
_WITHIN = re.compile(r"(?:^|_)(?:experts?|blocks?)$")
_OTHER = re.compile(r"(?:^|_)(?:heads?|stages|codebooks|quantizers|streams|hops)$")


def check_counts(config: Mapping[str, Any]) -> None:
    """Raise `ModelError` if a config asks for more modules than a model has."""
    most_layers = most_within = 1
    for name, count in _counts(config):
        if count > MAX_COUNT:
            raise ModelError(f"{name} must be at most {MAX_COUNT}, the config has {str(count)[:24]}")
        most_layers = max(most_layers, count if _LAYERS.search(name) else 1)
        most_within = max(most_within, count if _WITHIN.search(name) else 1)
    if most_layers * most_within > MAX_MODULES:
        raise ModelError(
            f"the config has {most_layers} layers with {most_within} modules each, more than {MAX_MODULES} together"
        )


def _counts(value: Any) -> Iterator[tuple[str, int]]:
    """The names and values of integers that count modules, at any depth."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            if isinstance(name, str) and any(form.search(name) for form in (_LAYERS, _WITHIN, _OTHER)):
                listed = each if isinstance(each, list | tuple) else (each,)
                yield from ((name, one) for one in listed if isinstance(one, int))
            yield from _counts(each)
    elif isinstance(value, list | tuple):
        for each in value:
            if isinstance(each, Mapping):
                yield from _counts(each)
