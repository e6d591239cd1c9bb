"""Cache directives of a request, and which caches it may use: one table of rules, evaluated before any lookup.

Every rule that matches a request takes something away; what no rule takes away is allowed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from headrace.core.request import SamplingParams


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


class CacheClass(NamedTuple):
    """What the caches may do for a request.

    ``exact``: store its response, and serve it again to an exact match. ``semantic``: serve the response of a similar
    request. ``coalesce``: one computation serves all equal requests at the same time. ``pool``: store several samples
    instead of one response. ``why`` names the first rule that disabled the exact cache.
    """

    exact: bool
    semantic: bool
    coalesce: bool
    pool: int = 0
    why: str = ""


EVERYTHING = CacheClass(exact=True, semantic=True, coalesce=True)


class Rule(NamedTuple):
    """A rule: which requests it matches, and what it leaves them."""

    name: str
    fits: Callable[[SamplingParams, CacheDirectives], bool]
    exact: bool
    semantic: bool
    coalesce: bool


def _sampled(params: SamplingParams) -> bool:
    return params.temperature > 0


RULES = (
    # The client's own directives come first.
    Rule("no_store", lambda p, c: c.no_store, exact=False, semantic=False, coalesce=False),
    Rule("no_cache", lambda p, c: c.no_cache, exact=True, semantic=False, coalesce=False),
    # One cached sample would stand for the whole distribution, and two requests would share one draw.
    Rule(
        "sampled without a seed",
        lambda p, c: _sampled(p) and p.seed is None and not c.samples,
        exact=False,
        semantic=False,
        coalesce=False,
    ),
    Rule(
        "sample pool",
        lambda p, c: _sampled(p) and p.seed is None and c.samples > 0,
        exact=True,
        semantic=False,
        coalesce=False,
    ),
    # The generator is counter-based: a seed determines one answer, but only for an exact match.
    Rule(
        "seeded",
        lambda p, c: _sampled(p) and p.seed is not None,
        exact=True,
        semantic=False,
        coalesce=True,
    ),
    # Prompt log-probabilities exist only for computed tokens, so they depend on what the prefix cache saved.
    Rule(
        "prompt_logprobs",
        lambda p, c: p.prompt_logprobs is not None,
        exact=False,
        semantic=False,
        coalesce=False,
    ),
    # Log-probabilities are stored with the tokens, but those of another request do not apply.
    Rule("logprobs", lambda p, c: p.logprobs is not None, exact=True, semantic=False, coalesce=True),
)


def classify(params: SamplingParams, control: CacheDirectives) -> CacheClass:
    """What the caches may do for a request with these sampling parameters and cache directives."""
    rows = [rule for rule in RULES if rule.fits(params, control)]
    if not rows:
        return EVERYTHING
    exact = all(rule.exact for rule in rows)
    pooled = exact and any(rule.name == "sample pool" for rule in rows)
    return CacheClass(
        exact,
        exact and all(rule.semantic for rule in rows),
        exact and all(rule.coalesce for rule in rows),
        control.samples if pooled else 0,
        next((rule.name for rule in rows if not rule.exact), ""),
    )
