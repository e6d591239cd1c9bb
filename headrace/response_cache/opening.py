"""Opens the response caches from their options: stores, levels, and the lookup in front of the service."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from headrace.config import ConfigError, ResponseCacheOptions, SemanticOptions, WarmOptions
from headrace.core.events import StoreFaulted
from headrace.core.ports import Store
from headrace.response_cache.exact import ExactCache
from headrace.response_cache.history import History, HistoryListener
from headrace.response_cache.lookup import CacheLookup
from headrace.response_cache.partial import Partial
from headrace.response_cache.ports import CacheListener, PastOutputs
from headrace.response_cache.rules.key import KEY_BYTES, Engine
from headrace.response_cache.rules.tags import TagVersions
from headrace.response_cache.semantic.opening import SemanticParts, open_semantic
from headrace.response_cache.single_flight import Pace
from headrace.response_cache.stores.opening import open_stores
from headrace.response_cache.stores.tier import Tier
from headrace.service.service import Service

if TYPE_CHECKING:
    from headrace.response_cache.semantic.rows import SharedRows


class CacheParts(NamedTuple):
    """What the caches need of the engine and of other packages.

    ``engine`` returns the identity of the engine; with True it must hold in other processes too, so it covers the
    weight files. ``plugged_in`` opens a store of another package. ``outputs`` is the engine's index of past outputs.
    """

    engine: Callable[[bool], Engine]
    plugged_in: Callable[[str], Store]
    semantic: SemanticParts
    outputs: PastOutputs | None = None


def open_caches(
    options: ResponseCacheOptions,
    semantic: SemanticOptions,
    service: Service,
    parts: CacheParts,
    history: History | None = None,
) -> CacheLookup:
    """The cache lookup in front of ``service``; without a store it forwards every request.

    ``history`` records the cost of responses.

    Raises:
        ConfigError: a store is not available, a shared store has no secret, or the semantic cache cannot meet its error
            bound.
    """
    if not options.response_cache:
        if semantic.semantic_cache != "off":
            raise ConfigError("--semantic-cache needs a store for the responses: --response-cache memory")
        return CacheLookup(service, outputs=parts.outputs)
    tiers = open_stores(options, service.note, parts.plugged_in)
    persistent = any(not tier.at_hand for tier in tiers)
    exact = ExactCache(tiers, TagVersions())
    fingerprint = parts.engine(persistent).fingerprint()
    share = partial(_shared_rows, tiers, fingerprint, service.note)
    similar = open_semantic(semantic, parts.semantic, exact, service.note, _semantic_file(options), share)
    if similar is not None:
        exact.heard = similar.cleared_elsewhere
    listeners: list[CacheListener] = [similar] if similar else []
    if history is not None:
        history.engine = fingerprint if persistent else secrets.token_bytes(KEY_BYTES)
        listeners.append(HistoryListener(history))
    return CacheLookup(
        service,
        exact,
        fingerprint,
        ttl=options.response_cache_ttl,
        pace=Pace(options.response_cache_pace),
        levels=[similar] if similar else [],
        listeners=listeners,
        partial=Partial(options.resume_cache_bytes),
        outputs=parts.outputs,
        pairs=similar.pairs if similar else None,
    )


def open_history(options: WarmOptions) -> History | None:
    """The request history, if one is configured.

    Raises:
        ConfigError: its file cannot be used, or requests are to be recorded without one.
    """
    if options.history_file is None:
        if options.record_history:
            raise ConfigError("--record-history needs --history-file")
        return None
    try:
        return History(Path(options.history_file))
    except OSError as error:
        raise ConfigError(f"--history-file: {error}") from error


def _semantic_file(options: ResponseCacheOptions) -> Path | None:
    """The file of the semantic index, next to the SQLite file of the responses; None without one."""
    files = [address.partition(":")[2] for address in options.response_cache if address.startswith("sqlite:")]
    return Path(f"{files[0]}.semantic").expanduser() if files else None


def _shared_rows(
    tiers: Sequence[Tier],
    fingerprint: bytes,
    tell: Callable[[StoreFaulted], None],
    encoder: str,
    dimensions: int,
) -> SharedRows | None:
    """The rows of the semantic cache in the first store that can share them."""
    from headrace.response_cache.semantic.rows import RowForm, SharedRows, space_of

    space = space_of(encoder, dimensions, fingerprint)
    for tier in tiers:
        if (opened := tier.open_feed(space)) is not None:
            feed, seal = opened
            return SharedRows(tier.name, feed, RowForm(space, dimensions, seal), tell)
    return None
