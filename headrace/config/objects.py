"""Options whose values are JSON objects, with vLLM's keys where they exist.

The annotation of a field says which values it accepts, for the check and for the message of an error.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

from pydantic import AfterValidator, BeforeValidator, Field

from headrace.config.errors import ConfigError, suggestion
from headrace.config.values import BYTES, expected_of, parse_value

ObjectT = TypeVar("ObjectT")

Text = Annotated[str | None, Field(strict=True, min_length=1)]
Switch = Annotated[bool, Field(strict=True)]

# --speculative-config

METHODS = ("ngram", "suffix", "prediction", "cached", "draft_model", "eagle3")

HEADS = ("eagle3",)
"""Methods that use a draft head, which reads hidden states of the served model."""

LOADED = ("draft_model", *HEADS)
"""Methods that load the weights of ``model``."""

HEADS_ONLY = "EAGLE-3 heads are the only supported ones (method eagle3)"
NO_MTP = "MTP layers are not supported, and no supported architecture has them; use draft_model or eagle3"
REFUSED = dict.fromkeys(("eagle", "medusa", "mlp_speculator"), HEADS_ONLY)
"""vLLM's methods that are refused, with the reason; so are names that end with ``mtp``."""

MOST_TOKENS = 64
"""Maximum ``num_speculative_tokens``: longer drafts are rarely worth their cost."""

DraftTokens = Annotated[int, Field(strict=True, ge=1, le=MOST_TOKENS)]


def _methods(value: Any) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not names:
        raise ValueError(f"expected one of {', '.join(METHODS)}, or a list of them, got {value!r:.200}")
    for name in names:
        if name not in METHODS:
            why = NO_MTP if str(name).endswith("mtp") else REFUSED.get(str(name))
            if why is not None:
                raise ValueError(f"{name}: {why}")
            near = suggestion(name, METHODS) if isinstance(name, str) else ""
            raise ValueError(f"expected one of {', '.join(METHODS)}, got {name!r:.200}{near}")
    return tuple(dict.fromkeys(names))


_METHODS: dict[str, Any] = {"expected": f"one of {', '.join(METHODS)}, or a list of them"}


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """How drafts are made, and how many draft tokens are verified.

    All methods propose drafts; for each request the most promising one is used. ``num_speculative_tokens`` is the
    maximum number of draft tokens of a request in a step. If ``adaptive``, only as many are verified as are worth their
    cost. ``prompt_lookup_min`` and ``prompt_lookup_max`` bound the number of tokens that ``ngram`` looks up.
    ``suffix_max_bytes`` is the memory of the past outputs that ``suffix`` searches. ``model`` is the draft model of
    ``draft_model`` (a folder, a Hugging Face name or builtin-draft) or the head of ``eagle3``, ``revision`` its branch,
    tag or commit, and ``quantization`` quantizes the weights of a draft model while loading.
    """

    method: Annotated[tuple[str, ...], Field(json_schema_extra=_METHODS), BeforeValidator(_methods)]
    num_speculative_tokens: DraftTokens = 16
    adaptive: Switch = True
    prompt_lookup_min: DraftTokens = 2
    prompt_lookup_max: DraftTokens = 16
    suffix_max_bytes: Annotated[int, Field(strict=True, ge=1, le=1 << 50, json_schema_extra=BYTES)] = 64 << 20
    model: Text = None
    revision: Text = None
    quantization: Annotated[Literal["int8", "int4", "w4a8"] | None, Field()] = None

    def __post_init__(self) -> None:
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        if low > high:
            raise ValueError(f"prompt_lookup_min {low} is above prompt_lookup_max {high}")
        loaded = [method for method in self.methods if method in LOADED]
        if len(loaded) > 1:
            raise ValueError(f"methods {' and '.join(loaded)} exclude each other: use one of them")
        if loaded and self.model is None:
            raise ValueError(f"method {loaded[0]} needs the key 'model', the draft model or head to load")
        for key, methods in (("model", LOADED), ("revision", LOADED), ("quantization", LOADED[:1])):
            if getattr(self, key) is not None and not set(methods) & set(loaded):
                raise ValueError(f"{key} needs the method {' or '.join(methods)}")

    @property
    def methods(self) -> tuple[str, ...]:
        """All methods."""
        return self.method

    @property
    def has_head(self) -> bool:
        """Whether a head drafts."""
        return not set(HEADS).isdisjoint(self.methods)


def read_speculation(label: str, value: str | Mapping[str, Any]) -> SpeculativeConfig:
    """The configuration from JSON text or an object; an error names it ``label``. Raises `ConfigError`."""
    return _read(label, value, SpeculativeConfig, '{"method": "ngram", "num_speculative_tokens": 8}')


# --kv-events-config

MOST_EVENTS = 10_000_000
"""The largest ``buffer_steps``, ``hwm`` and ``max_queue_size``."""

EventCount = Annotated[int, Field(strict=True, ge=1, le=MOST_EVENTS)]

_PUBLISHER: dict[str, Any] = {"expected": "zmq, or null to publish nothing"}
_ZEROMQ: dict[str, Any] = {"expected": "a ZeroMQ address such as tcp://*:5557"}
_ADDRESS = r"^(tcp|ipc|inproc)://(?s:.)+$"


@dataclass(frozen=True, slots=True)
class KVEventsConfig:
    """Where events of the prefix cache are published.

    ``endpoint`` is the ZeroMQ address of the publisher: it binds to it if the host is ``*``, and connects to it
    otherwise. ``replay_endpoint`` is bound, and replays the last ``buffer_steps`` batches on request. At most ``hwm``
    batches wait for a slow subscriber, and at most ``max_queue_size`` events for the publisher. ``topic`` is the first
    frame of each message.
    """

    enable_kv_cache_events: Switch = True
    publisher: Annotated[Literal["zmq", "null"], Field(json_schema_extra=_PUBLISHER)] = "zmq"
    endpoint: Annotated[str, Field(strict=True, pattern=_ADDRESS, json_schema_extra=_ZEROMQ)] = "tcp://*:5557"
    replay_endpoint: Annotated[
        str | None, Field(strict=True, pattern=_ADDRESS, json_schema_extra=_ZEROMQ)
    ] = None
    buffer_steps: EventCount = 10_000
    hwm: EventCount = 100_000
    max_queue_size: EventCount = 100_000
    topic: Annotated[str, Field(strict=True)] = ""


def read_kv_events(label: str, value: str | Mapping[str, Any]) -> KVEventsConfig:
    """The configuration from JSON text or an object; an error names it ``label``. Raises `ConfigError`."""
    return _read(label, value, KVEventsConfig, '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}')


# --kv-transfer-config

CONSUMER, PRODUCER = "kv_consumer", "kv_producer"

NOT_SUPPORTED: Mapping[str, str] = {
    "kv_rank": "servers are named by their addresses",
    "kv_parallel_size": "any number of servers may take part",
    "kv_buffer_device": "blocks are exchanged through host memory",
    "kv_connector_module_path": "connectors are part of this package",
    "enable_permute_local_kv": "servers must have the same layout of blocks",
}
"""Keys of vLLM's ``--kv-transfer-config`` that are not supported, with the reasons."""


@dataclass(frozen=True, slots=True)
class Address:
    """The address at which a server publishes its blocks."""

    host: str
    port: int


def _address(value: Any) -> Address:
    host, _, port = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    if not host or not port.isdecimal() or not 1 <= int(port) <= 65_535:
        raise ValueError(f"expected HOST:PORT, got {value!r:.200}")
    return Address(host.strip("[]"), int(port))


def _each_once(values: tuple[Address, ...]) -> tuple[Address, ...]:
    return tuple(dict.fromkeys(values))


def _reachable(host: str) -> str:
    try:
        wildcard = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        wildcard = False
    if wildcard:
        raise ValueError(f"{host} is no address that a peer can connect to")
    return host


_PEERS: dict[str, Any] = {"expected": "a list of HOST:PORT"}
_TIMEOUT: dict[str, Any] = {"expected": "seconds from 0.001 to 5"}


@dataclass(frozen=True, slots=True)
class KVTransferExtra:
    """The keys of ``kv_connector_extra_config``: servers to pull from, and the time that each has to respond."""

    peers: Annotated[
        tuple[Annotated[Address, BeforeValidator(_address)], ...],
        Field(min_length=1, json_schema_extra=_PEERS),
        AfterValidator(_each_once),
    ] = ()
    timeout_seconds: Annotated[float, Field(strict=True, ge=0.001, le=5, json_schema_extra=_TIMEOUT)] = 0.5


@dataclass(frozen=True, slots=True)
class KVTransferConfig:
    """How this server exchanges KV blocks with others.

    A producer publishes its prefix cache at ``kv_ip`` and ``kv_port``, a consumer pulls from `peers`. ``engine_id``
    is the server's name for clients (None: its address). ``kv_buffer_size`` is the memory for each reading peer, in
    bytes. If a peer does not respond within `timeout_seconds`, the blocks are computed.
    """

    kv_connector: Annotated[Literal["SharedMemoryConnector", "NixlConnector"], Field()]
    kv_role: Annotated[Literal["kv_producer", "kv_consumer", "kv_both"], Field()]
    kv_ip: Annotated[str, Field(strict=True, min_length=1), AfterValidator(_reachable)] = "127.0.0.1"
    kv_port: Annotated[int, Field(strict=True, ge=0, le=65_535)] = 14579
    engine_id: Text = None
    kv_buffer_size: Annotated[int, Field(strict=True, ge=1, le=1 << 40)] = 64 << 20
    kv_load_failure_policy: Annotated[Literal["recompute"], Field()] = "recompute"
    kv_connector_extra_config: KVTransferExtra = KVTransferExtra()

    def __post_init__(self) -> None:
        if self.kv_role == CONSUMER and not self.peers:
            raise ValueError(
                f"a {CONSUMER} needs servers to pull from: "
                '"kv_connector_extra_config": {"peers": ["HOST:PORT"]}'
            )
        if self.peers and not self.consumes:
            raise ValueError(f"a {PRODUCER} pulls from no peers; leave kv_connector_extra_config.peers out")

    @property
    def produces(self) -> bool:
        """Whether peers may read the prefix cache of this server."""
        return self.kv_role != CONSUMER

    @property
    def consumes(self) -> bool:
        """Whether this server reads those of its peers."""
        return self.kv_role != PRODUCER

    @property
    def peers(self) -> tuple[Address, ...]:
        """The servers to pull from."""
        return self.kv_connector_extra_config.peers

    @property
    def timeout_seconds(self) -> float:
        """The time that a peer has to respond."""
        return self.kv_connector_extra_config.timeout_seconds


def read_kv_transfer(label: str, value: str | Mapping[str, Any]) -> KVTransferConfig:
    """The configuration from JSON text or an object; an error names it ``label``. Raises `ConfigError`."""
    example = '{"kv_connector": "SharedMemoryConnector", "kv_role": "kv_both", "kv_port": 14579}'
    given = json_object(label, value, example)
    for key, why in NOT_SUPPORTED.items():
        if key in given:
            raise ConfigError(f"{label}: {key} is not supported: {why}")
    return _read(label, given, KVTransferConfig, example)


# --override-generation-config

GENERATION_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
"""The fields of a ``generation_config.json`` that become defaults of requests, as in vLLM."""


def read_generation(label: str, value: str | Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields, which must be known. Their values are checked together with those of the model's file.

    Raises:
        ConfigError: it is no JSON object, or a field is unknown.
    """
    given = json_object(label, value, '{"temperature": 0.6, "top_k": 20}')
    for field in given:
        if field not in GENERATION_FIELDS:
            near = suggestion(field, GENERATION_FIELDS)
            known = ", ".join(GENERATION_FIELDS)
            raise ConfigError(f"{label}: there is no field {field!r:.200}{near}; known: {known}")
    return given


OBJECTS: Mapping[str, Callable[[str, Any], object]] = {
    "kv_events_config": read_kv_events,
    "kv_transfer_config": read_kv_transfer,
    "override_generation_config": read_generation,
    "speculative_config": read_speculation,
}
"""The options whose values are JSON objects, and what reads each."""


def object_text(name: str, label: str, value: Any) -> Any:
    """The value of such an option as JSON text, checked; None stays None.

    Raises:
        ConfigError: it is no JSON object, or a key or a value is invalid.
    """
    if value is None:
        return None
    OBJECTS[name](label, value)
    return json.dumps(json_object(label, value, ""), sort_keys=True)


def json_object(label: str, value: Any, example: str) -> Mapping[str, Any]:
    """The object from JSON text, or the object itself.

    Raises:
        ConfigError: it is neither; the message shows the ``example``.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value, object_pairs_hook=_each_key_once)
        except ValueError as error:
            raise ConfigError(f"{label}: expected a JSON object such as {example}: {error}") from None
    if not isinstance(value, Mapping):
        raise ConfigError(f"{label}: expected a JSON object such as {example}, got {value!r:.200}")
    return value


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r:.200} stands twice")
        found[key] = value
    return found


def _read(label: str, value: Any, kind: type[ObjectT], example: str) -> ObjectT:
    """The object of this class from JSON text or a mapping, checked key by key."""
    given = json_object(label, value, example)
    hints = get_type_hints(kind, include_extras=True)
    for key in given:
        if key not in hints:
            near = suggestion(key, hints)
            raise ConfigError(f"{label}: there is no key {key!r:.200}{near}; known: {', '.join(hints)}")
    read: dict[str, Any] = {}
    for key, each in given.items():
        hint = hints[key]
        of = f"{label}: {key}"
        read[key] = (
            _read(of, each, hint, '{"peers": ["127.0.0.1:14579"]}')
            if isinstance(hint, type) and is_dataclass(hint)
            else parse_value(of, hint, each)
        )
    for field in fields(kind):  # type: ignore[arg-type]  # every kind is a dataclass
        if field.default is MISSING and field.name not in given:
            raise ConfigError(
                f"{label}: the key {field.name!r} is missing: {expected_of(hints[field.name])}; for example {example}"
            )
    try:
        return kind(**read)
    except ValueError as error:  # two keys contradict each other
        raise ConfigError(f"{label}: {error}") from None
