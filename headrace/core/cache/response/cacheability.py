"""Which requests may be answered by which cache: one table, asked before any look-up.

Every row that fits a request takes something away; what none takes away is allowed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from headrace.core.cache.response.control import CacheDirectives
from headrace.core.request import SamplingParams


class CacheClass(NamedTuple):
    """What the caches may do for a request.

    ``exact``: keep and serve its own earlier answer. ``semantic``: serve a near question's. ``coalesce``: one
    computation serves all who ask at the same time. ``pool``: keep several samples instead of one answer.
    ``why`` names the first row that forbade the exact cache.
    """

    exact: bool
    semantic: bool
    coalesce: bool
    pool: int = 0
    why: str = ""


EVERYTHING = CacheClass(exact=True, semantic=True, coalesce=True)


class Rule(NamedTuple):
    """A row: whom it fits, and what it leaves them."""

    name: str
    fits: Callable[[SamplingParams, CacheDirectives], bool]
    exact: bool
    semantic: bool
    coalesce: bool


def _sampled(params: SamplingParams) -> bool:
    return params.temperature > 0


RULES = (
    # A caller's own words come first.
    Rule("no_store", lambda p, c: c.no_store, exact=False, semantic=False, coalesce=False),
    Rule("no_cache", lambda p, c: c.no_cache, exact=True, semantic=False, coalesce=False),
    # One kept sample would stand for the whole distribution, and two callers would share one draw.
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
    # The generator is counter-based: a seed names one answer, and only to the very same question.
    Rule(
        "seeded",
        lambda p, c: _sampled(p) and p.seed is not None,
        exact=True,
        semantic=False,
        coalesce=True,
    ),
    # Scores of the prompt depend on what the prefix cache spared computing: they are not told for spared tokens.
    Rule(
        "prompt_logprobs",
        lambda p, c: p.prompt_logprobs is not None,
        exact=False,
        semantic=False,
        coalesce=False,
    ),
    # Scores are kept with the tokens, but another question's scores are nobody's.
    Rule("logprobs", lambda p, c: p.logprobs is not None, exact=True, semantic=False, coalesce=True),
)


def classify(params: SamplingParams, control: CacheDirectives) -> CacheClass:
    """What the caches may do for a request sampled by ``params``, under the wishes of its caller."""
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
