"""``--models``: several models in one server, each with options of its own.

The value is a list of objects: the names and values of options, as in the YAML file. An option of an object overrides
the same option of the command line, of the environment and of the file, which hold for all models.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from headrace.config.errors import ConfigError

EXAMPLE = '[{"model": "Qwen/Qwen3-0.6B"}, {"model": "builtin", "kv-cache-memory-bytes": "256MiB"}]'

OF_ALL = frozenset(
    {
        *("models", "host", "port", "uds", "ssl_keyfile", "ssl_certfile", "metrics_port", "metrics_prefix"),
        *("allowed_hosts", "allowed_origins", "api_key", "api_key_file", "admin_key", "metrics_key"),
        *("drain_timeout", "log_level", "log_format", "api_server_count"),
    }
)
"""Options of the server as a whole, which no model has for itself."""

OF_ONE = (
    *("batch_path", "experiments_file", "history_file", "kv_offload_path", "record_trace"),
    *("response_store", "usage_file"),
)
"""Files and folders that one model's process has for itself."""


def models_text(label: str, value: Any) -> str | None:
    """The list as JSON text, with the options' names as in `Options`; None stays None.

    Raises:
        ConfigError: it is no list of objects, an object names no model, or has an option of the whole server.
    """
    if value is None:
        return None
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{label}: expected a JSON list such as {EXAMPLE}: {error}") from None
    if not isinstance(value, list | tuple) or not value or not all(isinstance(e, Mapping) for e in value):
        raise ConfigError(f"{label}: expected a list of objects such as {EXAMPLE}")
    entries = [_entry(f"{label}[{number}]", each) for number, each in enumerate(value)]
    try:
        return json.dumps(entries)
    except (TypeError, ValueError) as error:  # a date of YAML, for example
        raise ConfigError(f"{label}: expected plain values: {error}") from None


def _entry(label: str, given: Mapping[Any, Any]) -> dict[str, Any]:
    entry: dict[str, Any] = {}
    for key, value in given.items():
        name = str(key).replace("-", "_")
        if name in entry:
            raise ConfigError(f"{label}: the option {key} stands twice, with - and with _")
        if name in OF_ALL:
            raise ConfigError(f"{label}: {key} is an option of the whole server; move it out of the list")
        entry[name] = value
    if not isinstance(entry.get("model"), str):
        raise ConfigError(f"{label}: model is missing; it names the model to load")
    return entry
