"""Cache directives of a request, with the meanings that HTTP gives them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheDirectives:
    """Cache directives of one call; the default sets none.

    ``no_store``: neither store nor look up. ``no_cache``: compute again, and store the result. ``only_if_cached``:
    never compute. ``ttl`` (seconds) is how long the response to this call is stored, ``max_age`` the maximum age of a
    cached response that may be served. ``stale_while_revalidate``: for this many seconds after its expiry a response
    is still served, while a new one is computed. ``samples``: without a seed, store this many independent responses,
    and serve one of them once there are as many (0: none). ``tags`` name the response for `POST /v1/cache/clear`.
    """

    no_store: bool = False
    no_cache: bool = False
    only_if_cached: bool = False
    ttl: float | None = None
    max_age: float | None = None
    stale_while_revalidate: float = 0.0
    samples: int = 0
    tags: tuple[str, ...] = ()


NO_DIRECTIVES = CacheDirectives()
