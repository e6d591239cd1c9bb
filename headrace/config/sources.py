"""Reads options from a YAML file and the environment. No other file of the package reads the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from headrace.config.errors import ConfigError, advice, suggestion

# Reads a YAML file that holds one mapping, and refuses a key that stands twice, of which YAML keeps the last.

_MERGE = "tag:yaml.org,2002:merge"


class _Loader(yaml.SafeLoader):
    """A loader of plain values in which a mapping has each key once."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """The mapping of a node, checked before ``<<`` adds keys, which those beside it override."""
        lines: dict[Hashable, int] = {}
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            key = None if key_node.tag == _MERGE else self.construct_object(key_node, deep=True)
            if key is None or not isinstance(key, Hashable):
                continue  # the loader refuses what cannot be a key
            line = key_node.start_mark.line + 1
            if key in lines:
                raise _Twice(f"the key {key!r:.200} stands twice, in lines {lines[key]} and {line}")
            lines[key] = line
        return super().construct_mapping(node, deep)


class _Twice(ValueError):
    """A key stands twice."""


MAX_YAML_BYTES = 8 << 20
"""The largest file that is read."""

MAX_YAML_VALUES = 500_000
"""Values of a file, each as often as aliases and merges repeat it: ten lines of aliases can stand for billions."""

MAX_YAML_DEPTH = 64
"""Lists and mappings within each other."""


class _TooMuch(ValueError):
    """A file is longer, stands for more values, or nests them deeper than the limits above."""


def _load(text: str) -> Any:
    """The value of a YAML text; its size is checked before aliases are expanded.

    Raises:
        ValueError, yaml.YAMLError: it cannot be read.
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        _count(node, {}, 0)
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _count(node: yaml.Node, known: dict[int, tuple[int, int]], depth: int) -> tuple[int, int]:
    """The values of a node, and how deep they are, as often as aliases repeat them; ``known`` are those of nodes."""
    found = known.get(id(node))
    if found is None:
        if depth > MAX_YAML_DEPTH:  # an alias to what contains it is deep without an end
            raise _TooMuch(f"its lists and mappings are nested more than {MAX_YAML_DEPTH} deep")
        below = node.value if isinstance(node, yaml.CollectionNode) else ()
        values, deepest = 1, 0
        for each in below:
            for part in each if isinstance(each, tuple) else (each,):
                more, levels = _count(part, known, depth + 1)
                values, deepest = values + more, max(deepest, levels + 1)
        found = known[id(node)] = values, deepest
    values, deepest = found
    if values > MAX_YAML_VALUES:
        raise _TooMuch(f"with its aliases it has more than {MAX_YAML_VALUES:,} values")
    if depth + deepest > MAX_YAML_DEPTH:
        raise _TooMuch(f"its lists and mappings are nested more than {MAX_YAML_DEPTH} deep")
    return found


def read_mapping(file: Path, label: str) -> dict[Any, Any]:
    """The mapping of ``file``, empty if the file is; errors name it ``label``.

    Raises:
        ConfigError: the file cannot be read, is not YAML, holds something else, or a mapping has a key twice.
    """
    try:
        size = file.stat().st_size
        if size > MAX_YAML_BYTES:
            raise _TooMuch(f"it has {size:,} bytes, and the limit is {MAX_YAML_BYTES:,}")
        content = _load(file.read_text(encoding="utf-8"))
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise ConfigError(f"{label} cannot be read: {reason}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{label} cannot be read as YAML: it is not UTF-8 text") from None
    except (_Twice, _TooMuch) as error:
        raise ConfigError(f"{label}: {error}") from None
    except RecursionError:
        raise ConfigError(
            f"{label} cannot be read as YAML: its lists and mappings are nested too deeply"
        ) from None
    except (ValueError, yaml.YAMLError) as error:  # ValueError: a date that does not exist
        raise ConfigError(f"{label} cannot be read as YAML: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{label} must hold one mapping of names to values")
    return content


ENVIRONMENT_PREFIX = "HEADRACE_"

_SERVICE_LINK = re.compile(
    ENVIRONMENT_PREFIX + r"(.*_)?(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT_\d+_(TCP|UDP|SCTP)(_.*)?)"
)
"""Variables that Kubernetes sets in every pod for a Service whose name begins with ``headrace``."""

_SERVICE_ADDRESS = re.compile(r"(tcp|udp|sctp)://\S+")
"""The value of another such variable, ``HEADRACE_PORT``, which has the name of an option."""


class Setting(NamedTuple):
    """A value, and the name that an error uses for it."""

    label: str
    value: Any


def from_call(given: Mapping[str, Any], known: Iterable[str], *, keywords: bool) -> dict[str, Setting]:
    """The options of a command line, or the keyword arguments of a call such as ``LLM(...)``.

    Raises:
        ConfigError: a name is unknown.
    """
    known = set(known)
    for name in given:
        if name not in known:
            what = "keyword argument" if keywords else "option"
            raise ConfigError(f"there is no {what} {name!r:.200}{_instead(name, known)}")
    return {
        name: Setting(name if keywords else f"--{name.replace('_', '-')}", value)
        for name, value in given.items()
    }


def from_yaml(file: Path, known: Iterable[str]) -> dict[str, Setting]:
    """The options of a YAML file; their names may have hyphens or underscores.

    Raises:
        ConfigError: the file cannot be read, is no mapping, or has an unknown name or one that stands twice.
    """
    known = set(known)
    settings = {}
    for given, value in read_mapping(file, str(file)).items():
        name = str(given).replace("-", "_")
        if name not in known:
            spellings = {each.replace("_", "-") for each in known} if "-" in str(given) else known
            raise ConfigError(f"{file}: there is no option {given!r:.200}{_instead(str(given), spellings)}")
        if name in settings:
            raise ConfigError(f"{file}: the option {name.replace('_', '-')} stands twice, with - and with _")
        settings[name] = Setting(f"{file}: {given}", value)
    return settings


def from_environment(known: Iterable[str], lists: Iterable[str]) -> dict[str, Setting]:
    """The options of the environment; those in ``lists`` have values separated by commas.

    Raises:
        ConfigError: a variable with the prefix ``HEADRACE_`` names no option.
    """
    settings = {}
    variables = {ENVIRONMENT_PREFIX + name.upper(): name for name in known}
    for variable, value in os.environ.items():
        if not variable.startswith(ENVIRONMENT_PREFIX) or _is_service_link(variable, value):
            continue
        if variable not in variables:
            raise ConfigError(f"the environment: {variable} names no option{_instead(variable, variables)}")
        name = variables[variable]
        several = tuple(each.strip() for each in value.split(",")) if name in lists else value
        settings[name] = Setting(variable, several)
    return settings


@dataclass(frozen=True, slots=True)
class Systemd:
    """The socket of systemd, and the seconds between two watchdog messages (None: none)."""

    notify_socket: str | None = None
    watchdog_seconds: float | None = None


def read_systemd() -> Systemd:
    """The settings that systemd put into the environment of this process; empty if systemd did not start it."""
    interval = os.environ.get("WATCHDOG_USEC", "")
    for_us = os.environ.get("WATCHDOG_PID") in (None, "", str(os.getpid()))
    watchdog = int(interval) / 1e6 if interval.isdigit() and int(interval) and for_us else None
    return Systemd(os.environ.get("NOTIFY_SOCKET") or None, watchdog)


@dataclass(frozen=True, slots=True)
class Launch:
    """The place of this process among the ranks of a model, as its launcher set it.

    ``local_rank`` and ``local_size`` count the ranks of this machine. ``agent_store``: torchrun's own store listens at
    ``host`` and ``port``; otherwise rank 0 listens there. ``attempt`` counts the starts by torchrun.
    ``secret`` is known to all ranks; empty if none is configured.
    """

    rank: int
    size: int
    host: str
    port: int
    local_rank: int
    local_size: int
    agent_store: bool
    attempt: str
    secret: str = field(default="", repr=False)


def read_launch() -> Launch | None:
    """The place that torchrun or another launcher of torch.distributed put into the environment; None for one process.

    Raises:
        ConfigError: a variable is missing or has no usable value.
    """
    given = os.environ
    if not given.get("RANK") and not given.get("WORLD_SIZE"):
        return None
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        if not given.get(name):
            there = "RANK" if given.get("RANK") else "WORLD_SIZE"
            raise ConfigError(f"the environment: {there} is set, but {name} is not; several ranks need both")
    size = _number("WORLD_SIZE", 1, 1 << 16)
    if size == 1:
        return None
    local_size = _number("LOCAL_WORLD_SIZE", 1, size, default=1)
    return Launch(
        rank=_number("RANK", 0, size - 1),
        size=size,
        host=given["MASTER_ADDR"],
        port=_number("MASTER_PORT", 1, 65535),
        local_rank=_number("LOCAL_RANK", 0, local_size - 1, default=0),
        local_size=local_size,
        agent_store=given.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=given.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )


def _number(name: str, least: int, most: int, default: int | None = None) -> int:
    value = os.environ.get(name, "")
    if not value and default is not None:
        return default
    if not value.isdecimal() or not least <= int(value) <= most:
        raise ConfigError(f"the environment: {name} {value!r:.200}: expected a number from {least} to {most}")
    return int(value)


def _is_service_link(variable: str, value: str) -> bool:
    """Whether Kubernetes set this variable for a Service, so that it is not an option."""
    if _SERVICE_LINK.fullmatch(variable):
        return True
    return variable.endswith("_PORT") and _SERVICE_ADDRESS.fullmatch(value) is not None


def _instead(given: str, known: Iterable[str]) -> str:
    """Advice for an unknown name: what to use instead of another engine's option, or the closest known name."""
    name = given.removeprefix(ENVIRONMENT_PREFIX)
    if (what := advice(name)) is not None:
        return f": {what}"
    return suggestion(given, known)
