"""Opens the publisher of ``--kv-events-config`` on an engine's prefix cache."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from headrace.config import ConfigError, Options
from headrace.config.objects import read_kv_events
from headrace.wiring.model import Loaded

if TYPE_CHECKING:
    from headrace.observe.kv_events import Publisher


OPTION = "--kv-events-config"


def open_kv_events(loaded: Loaded, options: Options) -> Publisher | None:
    """The publisher of a loaded engine's prefix cache, which runs until it is closed; None without the option.

    Raises:
        ConfigError: there is no prefix cache, an address cannot be used, or the extra ``kv-events`` is not installed.
    """
    if options.observability.kv_events_config is None:
        return None
    config = read_kv_events(OPTION, options.observability.kv_events_config)
    if not config.enable_kv_cache_events or config.publisher == "null":
        return None
    if not options.cache.enable_prefix_caching:
        raise ConfigError(f"{OPTION} publishes the prefix cache, but --no-enable-prefix-caching is given")
    try:
        from headrace.observe.kv_events import AddressFailed, Changes, Publisher
    except ImportError as error:
        raise ConfigError(
            f"{OPTION} needs pyzmq and msgspec ({error}); install them with: pip install 'headrace[kv-events]'"
        ) from error
    changes = Changes(config.max_queue_size)
    pool = loaded.engine.scheduler.pool
    try:
        publisher = Publisher(
            changes,
            block_size=pool.block_size,
            endpoint=config.endpoint,
            replay_endpoint=config.replay_endpoint,
            topic=config.topic,
            waiting=config.hwm,
            kept=config.buffer_steps,
            host=_address(options.server.host),
        )
    except AddressFailed as failed:
        raise ConfigError(f"{OPTION}: {failed}") from failed
    pool.notifier.listeners.append(changes)
    return publisher


def _address(host: str) -> str:
    """The address of the server, at which ZeroMQ's ``*`` listens: ZeroMQ itself would listen at all addresses."""
    try:
        address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError(f"--host {host}: {(error.strerror or str(error)).lower()}") from error
    return f"[{address}]" if ":" in address else address
