"""Reads a YAML file that holds one mapping, and refuses a key that stands twice, of which YAML keeps the last."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from headrace.config.errors import ConfigError

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
                raise _Twice(f"the key {key!r} stands twice, in lines {lines[key]} and {line}")
            lines[key] = line
        return super().construct_mapping(node, deep)


class _Twice(ValueError):
    """A key stands twice."""


def read_mapping(file: Path, label: str) -> dict[Any, Any]:
    """The mapping of ``file``, empty if the file is; errors name it ``label``.

    Raises:
        ConfigError: the file cannot be read, is not YAML, holds something else, or a mapping has a key twice.
    """
    try:
        content = yaml.load(file.read_text(encoding="utf-8"), _Loader)  # noqa: S506, it is a SafeLoader
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise ConfigError(f"{label} cannot be read: {reason}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{label} cannot be read as YAML: it is not UTF-8 text") from None
    except _Twice as error:
        raise ConfigError(f"{label}: {error}") from None
    except (ValueError, RecursionError, yaml.YAMLError) as error:  # ValueError: a date that does not exist
        raise ConfigError(f"{label} cannot be read as YAML: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{label} must hold one mapping of names to values")
    return content
