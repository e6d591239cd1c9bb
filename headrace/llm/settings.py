"""The options of an engine from the keyword arguments of `LLM` and `AsyncLLM`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from headrace.build.plugins import by_name
from headrace.config import PARTS, ConfigError, Options, options

ENGINE_PARTS = ("model", "cache", "scheduler", "cost", "embedding")
"""The parts of the configuration that matter without a server."""


def engine_options(model: str, given: Mapping[str, Any]) -> Options:
    """All options, with those that are ``given``.

    Raises:
        ConfigError: an unknown option, one of the server, or a value that cannot work.
    """
    server = {each.name for part, kind in PARTS.items() if part not in ENGINE_PARTS for each in fields(kind)}
    for name in given:
        if name in server:
            raise ConfigError(f"{name} is an option of headrace serve; an engine without a server has none")
    return options({"model": model, **by_name(given)}, keywords=True)
