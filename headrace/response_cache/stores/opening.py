"""Opens the stores of the response cache from their addresses."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from urllib.parse import SplitResult, urlsplit

from headrace.config import ConfigError, ResponseCacheOptions
from headrace.core.events import StoreFaulted
from headrace.core.ports import Store
from headrace.response_cache.rules.entry import Seal
from headrace.response_cache.stores.memory import MemoryStore
from headrace.response_cache.stores.sqlite import SQLiteStore
from headrace.response_cache.stores.tier import Tier

FORMS = ("memory", "sqlite:PATH", "redis://HOST:PORT/DB", "memcached://HOST:PORT")
MEMCACHED_PORT = 11211

_HOST = re.compile(r"[A-Za-z0-9._-]+")
_DATABASE = re.compile(r"/?|/\d+")


def open_stores(
    options: ResponseCacheOptions,
    tell: Callable[[StoreFaulted], None],
    plugged_in: Callable[[str], Store],
) -> list[Tier]:
    """The stores of ``--response-cache``, in its order; ``plugged_in`` opens those of other packages.

    Raises:
        ConfigError: a store is not available, or a shared store has no secret.
    """
    tiers = [_tier(address, options, tell, plugged_in) for address in options.response_cache]
    if len({tier.name for tier in tiers}) < len(tiers):
        raise ConfigError("--response-cache: two stores of the same kind")
    return tiers


def describe_caches(options: ResponseCacheOptions) -> list[str]:
    """The stores of the response cache, as lines for the terminal."""
    stores = ", ".join(map(shown, options.response_cache))
    return [f"responses    cached for {options.response_cache_ttl:g} s in {stores}"] if stores else []


def shown(address: str) -> str:
    """A store's address without its password, also if it is mistyped."""
    secret, mark, rest = address.partition("?")[0].rpartition("@")
    scheme = re.match(r"\w+:(//)?", secret)
    return f"{scheme[0] if scheme else ''}{rest}" if mark else rest


def _tier(
    address: str,
    options: ResponseCacheOptions,
    tell: Callable[[StoreFaulted], None],
    plugged_in: Callable[[str], Store],
) -> Tier:
    kind, _, rest = address.partition(":")
    seconds = options.response_cache_timeout
    try:
        match kind:
            case "memory" if not rest:
                return Tier(MemoryStore(options.response_cache_bytes))
            case "sqlite" if rest and not rest.startswith("//"):  # a URL of other programs has its own rules
                return Tier(SQLiteStore(rest, options.response_cache_disk_bytes), seconds, tell=tell)
            case "redis" | "rediss" | "unix":
                return Tier(_redis(address), seconds, _seal(options), tell)
            case "memcached":
                return Tier(_memcached(address), seconds, _seal(options), tell)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--response-cache {shown(address)}: {error}") from error
    except ImportError as error:
        extra = "memcached" if kind == "memcached" else "redis"
        raise ConfigError(f"--response-cache {kind} needs: pip install 'headrace[{extra}]'") from error
    return Tier(plugged_in(address), seconds, _seal(options), tell)


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
