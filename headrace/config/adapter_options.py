"""Options of LoRA adapters, and the adapters that are loaded at start."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from headrace.config.errors import ConfigError


@dataclass(frozen=True, slots=True)
class AdapterOptions:
    """LoRA adapters of the model: which ones, how many at once, and how large."""

    enable_lora: Annotated[
        bool,
        Field(description="Serve LoRA adapters of the model, each under its own model name."),
    ] = False
    max_loras: Annotated[
        int,
        Field(
            ge=1,
            le=1024,
            description="Maximum number of LoRA adapters whose requests run at once, on the device.",
        ),
    ] = 1
    max_lora_rank: Annotated[int, Field(ge=1, le=1024, description="Highest rank of a LoRA adapter.")] = 16
    max_cpu_loras: Annotated[
        int | None,
        Field(
            ge=1,
            le=100_000,
            description="Maximum number of LoRA adapters in host memory; others are read again from their folders "
            "(default: --max-loras).",
        ),
    ] = None

    @property
    def host_adapters(self) -> int:
        """The most adapters in host memory."""
        return self.max_loras if self.max_cpu_loras is None else self.max_cpu_loras


class AdapterModule(NamedTuple):
    """An adapter that is loaded at start."""

    name: str
    path: str
    base: str = ""  # the model that it is for; empty: the served one


def check_adapters(options: AdapterOptions, modules: Sequence[str]) -> None:
    """Raise ConfigError for options that need each other; ``modules`` are those of ``--lora-modules``."""
    if not options.enable_lora:
        names = [each.name for each in fields(options)]
        given = [name for name in names if getattr(options, name) != getattr(AdapterOptions(), name)]
        for name in (*given, *(["lora_modules"] if modules else [])):
            raise ConfigError(f"--{name.replace('_', '-')} needs --enable-lora")
    if options.host_adapters < options.max_loras:
        raise ConfigError(
            f"--max-cpu-loras {options.max_cpu_loras} is less than --max-loras {options.max_loras}: an adapter on the"
            " device is also in host memory"
        )


def read_modules(given: Sequence[str]) -> list[AdapterModule]:
    """The adapters of ``--lora-modules``.

    Raises:
        ConfigError: a value has neither form, or a name stands twice.
    """
    modules = [_module(value) for value in given]
    names = [module.name for module in modules]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"--lora-modules: the name {name!r:.200} stands twice")
    return modules


def _module(value: str) -> AdapterModule:
    name, found, path = value.partition("=")
    base = ""
    if value.lstrip().startswith("{"):
        name, path, base = _from_object(value)
    elif not found:
        name = ""
    if not name.strip() or not path.strip():
        raise ConfigError(
            f"--lora-modules: expected NAME=FOLDER, or a JSON object with name and path, got {value!r:.200}"
        )
    return AdapterModule(name.strip(), path.strip(), base)


def _from_object(value: str) -> AdapterModule:
    try:
        given: dict[str, Any] = json.loads(value)
    except ValueError as error:
        raise ConfigError(f"--lora-modules: {value!r:.200} is not JSON: {error}") from None
    unknown = sorted(given.keys() - {"name", "path", "base_model_name"})
    if unknown:
        raise ConfigError(f"--lora-modules: unknown keys {', '.join(unknown)}; expected name and path")
    values = [given.get(key) or "" for key in ("name", "path", "base_model_name")]
    if not all(isinstance(each, str) for each in values):
        return AdapterModule("", "")
    return AdapterModule(*values)
