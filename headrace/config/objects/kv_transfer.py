"""The value of ``--kv-transfer-config``: a JSON object with vLLM's keys."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.config.errors import ConfigError
from headrace.config.objects.readers import Reader, json_object, read_keys, text, whole_number

EXAMPLE = '{"kv_connector": "SharedMemoryConnector", "kv_role": "kv_both", "kv_port": 14579}'

CONNECTORS = ("SharedMemoryConnector", "NixlConnector")

PRODUCER, CONSUMER, BOTH = "kv_producer", "kv_consumer", "kv_both"

NOT_SUPPORTED: Mapping[str, str] = {
    "kv_rank": "servers are named by their addresses",
    "kv_parallel_size": "any number of servers may take part",
    "kv_buffer_device": "blocks are exchanged through host memory",
    "kv_connector_module_path": "connectors are part of this package",
    "enable_permute_local_kv": "servers must have the same layout of blocks",
}
"""Keys of vLLM that are not supported, with the reasons."""


@dataclass(frozen=True, slots=True)
class Address:
    """The address at which a server publishes its blocks."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class KVTransferConfig:
    """How this server exchanges KV blocks with others.

    A producer publishes its prefix cache at ``kv_ip`` and ``kv_port``, a consumer pulls from ``peers``. ``engine_id``
    is the server's name for clients (None: its address). ``kv_buffer_size`` is the memory for each reading peer, in
    bytes. If a peer does not respond within ``timeout_seconds``, the blocks are computed.
    """

    kv_connector: str
    kv_role: str
    kv_ip: str = "127.0.0.1"
    kv_port: int = 14579
    engine_id: str | None = None
    kv_buffer_size: int = 64 << 20
    kv_load_failure_policy: str = "recompute"
    peers: tuple[Address, ...] = ()
    timeout_seconds: float = 0.5

    @property
    def produces(self) -> bool:
        return self.kv_role != CONSUMER

    @property
    def consumes(self) -> bool:
        return self.kv_role != PRODUCER


def read_kv_transfer(label: str, value: str | Mapping[str, Any]) -> KVTransferConfig:
    """The configuration from JSON text or an object; an error names it ``label``.

    Raises:
        ConfigError: it is no JSON object, a key or a value is unknown, or two keys contradict each other.
    """
    given = json_object(label, value, EXAMPLE)
    for key, why in NOT_SUPPORTED.items():
        if key in given:
            raise ConfigError(f"{label}: {key} is not supported: {why}")
    for key in ("kv_connector", "kv_role"):
        if key not in given:
            raise ConfigError(f"{label}: {key} is missing; for example {EXAMPLE}")
    read = read_keys(label, given, _READERS)
    config = KVTransferConfig(**(read.pop("kv_connector_extra_config", {}) | read))
    if config.kv_role == CONSUMER and not config.peers:
        raise ConfigError(
            f"{label}: a {CONSUMER} needs servers to pull from: "
            '"kv_connector_extra_config": {"peers": ["HOST:PORT"]}'
        )
    if config.peers and not config.consumes:
        raise ConfigError(
            f"{label}: a {PRODUCER} pulls from no peers; leave kv_connector_extra_config.peers out"
        )
    return config


def kv_transfer_text(label: str, value: Any) -> Any:
    """The value of the option as JSON text, checked; None stays None.

    Raises:
        ConfigError: see `read_kv_transfer`.
    """
    if value is None:
        return None
    given = json_object(label, value, EXAMPLE)
    read_kv_transfer(label, given)
    return json.dumps(given, sort_keys=True)


def _one_of(*known: str) -> Callable[[str, Any], str]:
    def read(label: str, value: Any) -> str:
        if value not in known:
            raise ConfigError(f"{label}: expected {' or '.join(known)}, got {value!r}")
        return str(value)

    return read


def _host(label: str, value: Any) -> str:
    host = text(label, value)
    try:
        wildcard = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        wildcard = False
    if wildcard:
        raise ConfigError(f"{label}: {host} is no address that a peer can connect to")
    return host


def _address(label: str, value: Any) -> Address:
    host, colon, port = text(label, value).rpartition(":")
    if not colon or not host or not port.isdecimal() or not 1 <= int(port) <= 65_535:
        raise ConfigError(f"{label}: expected HOST:PORT, got {value!r}")
    return Address(host.strip("[]"), int(port))


def _peers(label: str, value: Any) -> tuple[Address, ...]:
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{label}: expected a list of HOST:PORT, got {value!r}")
    return tuple(dict.fromkeys(_address(f"{label}[{i}]", each) for i, each in enumerate(value)))


def _seconds(label: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.001 <= value <= 5:
        raise ConfigError(f"{label}: expected seconds from 0.001 to 5, got {value!r}")
    return float(value)


def _extra(label: str, value: Any) -> dict[str, Any]:
    return read_keys(label, json_object(label, value, '{"peers": ["127.0.0.1:14579"]}'), _EXTRA)


_EXTRA: Mapping[str, Reader] = {"peers": _peers, "timeout_seconds": _seconds}

_READERS: Mapping[str, Reader] = {
    "kv_connector": _one_of(*CONNECTORS),
    "kv_role": _one_of(PRODUCER, CONSUMER, BOTH),
    "kv_ip": _host,
    "kv_port": whole_number(0, 65_535),
    "engine_id": text,
    "kv_buffer_size": whole_number(1, 1 << 40),
    "kv_load_failure_policy": _one_of("recompute"),
    "kv_connector_extra_config": _extra,
}
