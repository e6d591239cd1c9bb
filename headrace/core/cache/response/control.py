"""What a caller asks of the response caches, with the meanings that HTTP gave the words."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheDirectives:
    """Wishes of one call; the default has none.

    ``no_store``: neither keep nor look up. ``no_cache``: compute anew, and keep that. ``only_if_cached``: never
    compute. ``ttl`` (seconds) is how long the answer to this call is kept, ``max_age`` how old one may be that is
    taken instead of it. ``stale_while_revalidate``: so many seconds after its end an answer still serves, while a
    new one is computed. ``samples``: without a seed, keep so many independent answers and serve one of them,
    once there are as many (0: none). ``tags`` name the answer for `POST /v1/cache/clear`.
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
