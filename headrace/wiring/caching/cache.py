"""Builds the response caches from their options: stores, the fingerprint of the engine, the lookup before the
service. Also builds the prompt policy: normalization, explanation, sessions.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
import secrets
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import NamedTuple, cast
from urllib.parse import SplitResult, urlsplit

from headrace import __version__
from headrace.api.prompts.markers import chosen
from headrace.api.prompts.policy import PromptPolicy
from headrace.compute.gguf.file import GgufFile, is_gguf
from headrace.config import ConfigError, Options, ResponseCacheOptions, SemanticOptions, TuningOptions
from headrace.core.drafting.suffix import SuffixProposer
from headrace.core.events import Layer, StoreFaulted
from headrace.core.ports import Store, StoreFacts, Watcher
from headrace.core.prefix.prompt_memory import PromptMemory
from headrace.core.prefix.sessions import SessionBook
from headrace.observe.metrics_page import MetricsPage
from headrace.observe.prefixes.book import PrefixBook
from headrace.response_cache.exact import ExactCache
from headrace.response_cache.history import History, HistoryListener
from headrace.response_cache.lookup import CacheLookup, Pace
from headrace.response_cache.partial import Partial
from headrace.response_cache.ports import CacheListener
from headrace.response_cache.rules.entry import Seal
from headrace.response_cache.rules.key import KEY_BYTES, Engine
from headrace.response_cache.rules.tags import TagVersions
from headrace.response_cache.rules.verdicts import Verdicts
from headrace.response_cache.stores.memory import MemoryStore
from headrace.response_cache.stores.sqlite import SQLiteStore
from headrace.response_cache.stores.tier import Tier
from headrace.service.service import Service
from headrace.service.sessions import Sessions
from headrace.wiring.caching.semantic import make_semantic
from headrace.wiring.drafting import proposer_of
from headrace.wiring.model import Loaded
from headrace.wiring.plugins import Port, make_plugin

FORMS = ("memory", "sqlite:PATH", "redis://HOST:PORT/DB", "memcached://HOST:PORT")
STORE = Port("--response-cache", "headrace.stores", Store, FORMS)
_BUILT_IN = ("memory", "sqlite")
_PLUGIN = re.compile(r"[\w.]+:[A-Za-z_].*")
_HOST = re.compile(r"[A-Za-z0-9._-]+")
_DATABASE = re.compile(r"/?|/\d+")
MEMCACHED_PORT = 11211
WEIGHTS = "*.safetensors"
_SNAPSHOTS = "snapshots"
"""The folder in which the hub library stores revisions, each in a folder named by its commit."""

LEAST_COMPARED = 256
"""Shorter prompts (in tokens) are not compared with earlier ones: if many short prompts arrive, comparing each takes
6 % of the server's time."""


def make_recall(
    options: ResponseCacheOptions,
    semantic: SemanticOptions,
    loaded: Loaded,
    service: Service,
    history: History | None = None,
    tuning: TuningOptions | None = None,
    verdicts: Verdicts | None = None,
) -> CacheLookup:
    """The cache lookup in front of ``service``; without a store it forwards every request.

    ``history`` records the cost of responses. With the tuner on, the share of audits adapts to the errors that they
    find. ``verdicts`` are the served model's, where it is the second judge of the semantic cache.

    Raises:
        ConfigError: a store is not available, a shared store has no secret, or the semantic cache cannot meet its error
            bound.
    """
    outputs = proposer_of(loaded.engine.scheduler.drafter, SuffixProposer)
    if not options.response_cache:
        if semantic.semantic_cache != "off":
            raise ConfigError("--semantic-cache needs a store for the responses: --response-cache memory")
        return CacheLookup(service, outputs=outputs)
    tiers = [_tier(spec, options, service.note) for spec in options.response_cache]
    names = [tier.name for tier in tiers]
    if len({*names}) < len(names):
        raise ConfigError("--response-cache: two stores of the same kind")
    persistent = any(not tier.at_hand for tier in tiers)
    exact = ExactCache(tiers, TagVersions())
    near = make_semantic(
        semantic,
        loaded,
        exact,
        service.note,
        _semantic_file(options),
        adapts_audit=tuning is not None and tuning.tuner == "on",
        verdicts=verdicts,
    )
    fingerprint = _fingerprint(loaded, persistent, options.response_cache_secret or "")
    listeners: list[CacheListener] = [near] if near else []
    if history is not None:
        history.engine = fingerprint if persistent else secrets.token_bytes(KEY_BYTES)
        listeners.append(HistoryListener(history))
    return CacheLookup(
        service,
        exact,
        fingerprint,
        ttl=options.response_cache_ttl,
        pace=Pace(options.response_cache_pace),
        levels=[near] if near else [],
        listeners=listeners,
        partial=Partial(options.resume_cache_bytes),
        outputs=outputs,
    )


def describe_caches(options: ResponseCacheOptions) -> list[str]:
    """The stores of the response cache, as lines for the terminal."""
    stores = ", ".join(map(_shown, options.response_cache))
    return [f"responses    cached for {options.response_cache_ttl:g} s in {stores}"] if stores else []


def _shown(spec: str) -> str:
    """A store's address without its password, also if it is mistyped."""
    secret, mark, rest = spec.partition("?")[0].rpartition("@")
    scheme = re.match(r"\w+:(//)?", secret)
    return f"{scheme[0] if scheme else ''}{rest}" if mark else rest


def _semantic_file(options: ResponseCacheOptions) -> Path | None:
    """The file of the semantic index, next to the SQLite file of the responses; None without one."""
    files = [spec.partition(":")[2] for spec in options.response_cache if spec.startswith("sqlite:")]
    return Path(f"{files[0]}.semantic").expanduser() if files else None


def prefix_sizes(loaded: Loaded) -> dict[Layer, dict[str, StoreFacts]]:
    """The size of the prefix cache; its evictions are events of the engine."""
    blocks = loaded.engine.scheduler.pool.num_cached
    return {Layer.PREFIX: {"device": StoreFacts(blocks, blocks * loaded.ledger.block_bytes, 0)}}


def _tier(spec: str, options: ResponseCacheOptions, tell: Callable[[StoreFaulted], None]) -> Tier:
    kind, _, rest = spec.partition(":")
    seconds = options.response_cache_timeout
    try:
        match kind:
            case "memory" if not rest:
                return Tier(MemoryStore(options.response_cache_bytes))
            case "sqlite" if rest and not rest.startswith(
                "//"
            ):  # a URL of other programs, with its own rules
                return Tier(SQLiteStore(rest, options.response_cache_disk_bytes), seconds, tell=tell)
            case "redis" | "rediss" | "unix":
                return Tier(_redis(spec), seconds, _seal(options), tell)
            case "memcached":
                return Tier(_memcached(spec), seconds, _seal(options), tell)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--response-cache {_shown(spec)}: {error}") from error
    except ImportError as error:
        extra = "memcached" if kind == "memcached" else "redis"
        raise ConfigError(f"--response-cache {kind} needs: pip install 'headrace[{extra}]'") from error
    return Tier(_plugged_in(spec, options), seconds, _seal(options), tell)


def _plugged_in(spec: str, options: ResponseCacheOptions) -> Store:
    """A store of another package: ``MODULE:CLASS`` or an entry point, with its address after another colon.

    Its class may take the ``address`` and ``max_bytes``, the memory limit of the in-process response cache.
    """
    first, _, rest = spec.partition(":")
    if first in _BUILT_IN or (rest and not _PLUGIN.fullmatch(spec)):
        raise ConfigError(f"--response-cache {_shown(spec)}: expected {', '.join(FORMS)} or MODULE:CLASS")
    name, address = first, rest
    if rest and not any(each.name == first for each in entry_points(group=STORE.group)):
        path, _, address = rest.partition(":")
        name = f"{first}:{path}"
    return cast(Store, make_plugin(STORE, name, address=address, max_bytes=options.response_cache_bytes))


def _redis(url: str) -> Store:
    """The store at ``url``. The client library would take another server or database for one that it cannot read."""
    from headrace.response_cache.stores.redis import RedisStore

    if url.partition(":")[0] == "unix":
        parts = urlsplit(url)
        if not url.startswith("unix://") or parts.netloc.rpartition("@")[2] or len(parts.path) < 2:
            raise ValueError("expected unix:///PATH/TO/SOCKET, with ?db=NUMBER if needed")
    else:
        parts = _server_address(url, "redis://HOST:PORT/DB")
        if not _DATABASE.fullmatch(parts.path) or (len(parts.path) > 1 and "db=" in parts.query):
            raise ValueError("expected one database number after the port, as in redis://HOST:PORT/0")
    try:
        return RedisStore(url)
    except TypeError as error:
        raise ValueError(f"?{parts.query}: not an option of the Redis client") from error


def _memcached(url: str) -> Store:
    from headrace.response_cache.stores.memcached import MemcachedStore

    parts = _server_address(url, "memcached://HOST:PORT")
    if parts.path.strip("/") or parts.query or parts.username is not None:
        raise ValueError("expected memcached://HOST:PORT and nothing else")
    assert parts.hostname is not None
    return MemcachedStore(parts.hostname, parts.port or MEMCACHED_PORT)


def _server_address(url: str, form: str) -> SplitResult:
    """The parts of ``url``.

    Raises:
        ValueError: it has not the ``form``, or no usable host or port.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    if not url.startswith(f"{parts.scheme}://") or not host or parts.fragment:
        escape = "; write # / ? @ in a password as %23 %2F %3F %40" if "@" in url else ""
        raise ValueError(f"expected {form}{escape}")
    if ":" in host:
        ipaddress.IPv6Address(host)
    elif not _HOST.fullmatch(host):
        raise ValueError(f"expected {form}: there is no host {host!r}")
    if parts.port == 0 or parts.netloc.endswith(":"):
        raise ValueError(f"expected {form}, with a port from 1 to 65535")
    return parts


def _seal(options: ResponseCacheOptions) -> Seal:
    if not options.response_cache_secret:
        raise ConfigError(
            "--response-cache-secret is needed for a store that others can write to: it authenticates its entries "
            "(set it as HEADRACE_RESPONSE_CACHE_SECRET)"
        )
    return Seal(options.response_cache_secret.encode())


def _fingerprint(loaded: Loaded, persistent: bool, secret: str) -> bytes:
    """The fingerprint of the engine. For ``persistent`` or shared stores it covers the weight files."""
    computed = f"{loaded.facts.kind} {loaded.facts.isa} {loaded.dtype} {loaded.kv_dtype} {loaded.kernels} {loaded.isa}"
    return Engine(
        model=loaded.name,
        weights=_weights(loaded) if persistent else "",
        tokenizer=hashlib.sha256(loaded.tokenizer.backend.to_str().encode()).hexdigest(),
        template=loaded.template.digest,
        numerics=f"{computed} {loaded.quantization}" if loaded.quantization else computed,
        max_model_len=loaded.ledger.max_model_len,
        version=__version__,
        secret=hashlib.sha256(secret.encode()).hexdigest() if secret else "",
    ).fingerprint()


def _weights(loaded: Loaded) -> str:
    """A digest of the weights, or a substitute: the commit they were downloaded from, or the seed of dummy weights."""
    if loaded.dummy:
        return f"dummy {loaded.seed}"
    folder = loaded.folder.absolute()
    if folder.parent.name == _SNAPSHOTS:
        return folder.name
    digest = hashlib.sha256()
    own = GgufFile.open(folder).paths if is_gguf(folder) else ()
    for path in own or sorted([*folder.glob(WEIGHTS), *folder.glob("config.json")]):
        digest.update(path.name.encode())
        digest.update(_digest_of(path))
    return digest.hexdigest()


def _digest_of(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


SESSION_SHARE = 0.5
"""Share of the KV cache's blocks that the sessions of one tenant may retain."""


class Prompts(NamedTuple):
    """The policy, and the explanation of prefixes (None: disabled)."""

    policy: PromptPolicy
    book: PrefixBook | None

    @property
    def watchers(self) -> list[Watcher]:
        """The watchers of the engine's events, without tokens."""
        return [each for each in (self.book, self.policy.sessions) if each is not None]

    def explain(self, request_id: str, all_tenants: bool) -> dict[str, object] | None:
        """Where the prompt of a request stopped matching the prefix cache; None if that is not known."""
        return None if self.book is None else self.book.explain(request_id, all_tenants)


def make_prompts(loaded: Loaded, options: Options, page: MetricsPage, service: Service) -> Prompts:
    """The prompt policy and its parts, connected to the engine behind ``service``.

    Raises:
        ConfigError: ``--normalize-prompts`` names no marker.
    """
    try:
        markers = chosen(options.server.normalize_prompts)
    except ValueError as error:
        raise ConfigError(f"--normalize-prompts: {error}") from None
    ledger, caching = loaded.ledger, options.cache.enable_prefix_caching
    memory = options.server.prefix_memory_bytes
    book = None
    if memory:
        show = options.server.explain_prompt_text
        book = PrefixBook(
            PromptMemory(memory),
            ledger.block_size,
            page,
            caching=caching,
            show_text=show,
            least_tokens=LEAST_COMPARED,
        )
    sessions = None
    if caching and options.server.record_trace is None:  # a replay could not repeat the effects of sessions
        sessions = Sessions(
            SessionBook(max(1, int(SESSION_SHARE * ledger.num_blocks))),
            ledger.block_size,
            lambda keys, priority: service.thread.call(lambda: loaded.engine.retain(keys, priority)),
        )
    return Prompts(PromptPolicy(markers, None if book is None else book.enter, sessions), book)
