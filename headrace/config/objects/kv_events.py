"""The value of ``--kv-events-config``: a JSON object with vLLM's keys."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.config.errors import ConfigError
from headrace.config.objects.readers import Reader, json_object, read_keys, switch, text, whole_number

EXAMPLE = '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}'

MOST_KEPT = 10_000_000
"""The largest ``buffer_steps``, ``hwm`` and ``max_queue_size``."""


@dataclass(frozen=True, slots=True)
class KVEventsConfig:
    """Where events of the prefix cache are published.

    ``endpoint`` is the ZeroMQ address of the publisher: it binds to it if the host is ``*``, and connects to it
    otherwise. ``replay_endpoint`` is bound, and replays the last ``buffer_steps`` batches on request. At most ``hwm``
    batches wait for a slow subscriber, and at most ``max_queue_size`` events for the publisher. ``topic`` is the first
    frame of each message.
    """

    enable_kv_cache_events: bool = True
    publisher: str = "zmq"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""


def read_kv_events(label: str, value: str | Mapping[str, Any]) -> KVEventsConfig:
    """The configuration from JSON text or an object; an error names it ``label``.

    Raises:
        ConfigError: it is no JSON object, or a key or a value is unknown.
    """
    return KVEventsConfig(**read_keys(label, json_object(label, value, EXAMPLE), _READERS))


def kv_events_text(label: str, value: Any) -> Any:
    """The value of the option as JSON text, checked; None stays None.

    Raises:
        ConfigError: see `read_kv_events`.
    """
    if value is None:
        return None
    given = json_object(label, value, EXAMPLE)
    read_kv_events(label, given)
    return json.dumps(given, sort_keys=True)


def _publisher(label: str, value: Any) -> str:
    if value not in ("zmq", "null"):
        raise ConfigError(f"{label}: expected zmq, or null to publish nothing, got {value!r}")
    return str(value)


def _address(label: str, value: Any) -> str:
    scheme, found, rest = text(label, value).partition("://")
    if scheme not in ("tcp", "ipc", "inproc") or not found or not rest:
        raise ConfigError(f"{label}: expected a ZeroMQ address such as tcp://*:5557, got {value!r}")
    return str(value)


def _optional_address(label: str, value: Any) -> str | None:
    return None if value is None else _address(label, value)


def _topic(label: str, value: Any) -> str:
    return value if value == "" else text(label, value)


_READERS: Mapping[str, Reader] = {
    "enable_kv_cache_events": switch,
    "publisher": _publisher,
    "endpoint": _address,
    "replay_endpoint": _optional_address,
    "buffer_steps": whole_number(1, MOST_KEPT),
    "hwm": whole_number(1, MOST_KEPT),
    "max_queue_size": whole_number(1, MOST_KEPT),
    "topic": _topic,
}
