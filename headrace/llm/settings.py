"""Converts the keyword arguments of `LLM` and `AsyncLLM` to options."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from headrace.config import PARTS, ConfigError, Options, options
from headrace.wiring.plugins import by_name

ENGINE_PARTS = ("model", "cache", "scheduler", "cost", "adapters", "images", "embedding")
"""The parts of the configuration that apply without a server."""


def engine_options(model: str, given: Mapping[str, Any]) -> Options:
    """All options, with those that are ``given``.

    Raises:
        ConfigError: an option is unknown or the server's, or a value is invalid.
    """
    server = {each.name for part, kind in PARTS.items() if part not in ENGINE_PARTS for each in fields(kind)}
    for name in given:
        if name in server:
            raise ConfigError(f"{name} is an option of headrace serve; an engine without a server has none")
    named = by_name(given)
    if isinstance(limit := named.get("limit_mm_per_prompt"), Mapping):
        named["limit_mm_per_prompt"] = json.dumps(dict(limit), default=repr)
    return options({"model": model, **named}, keywords=True)
