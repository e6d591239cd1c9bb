"""Response headers with a tenant's rate limits, in OpenAI's format."""

from __future__ import annotations

import math
from collections.abc import Mapping

from headrace.core.tenancy.quota import Limit, Room

_HEADERS = (
    ("requests", (Limit.REQUESTS_PER_MINUTE,)),
    ("tokens", (Limit.TOKENS_PER_MINUTE, Limit.TOKENS_PER_DAY)),
)

RATE_HEADERS = tuple(
    f"x-ratelimit-{kind}-{name}" for name, _ in _HEADERS for kind in ("limit", "remaining", "reset")
)
"""All headers that `rate_headers` can return."""


def rate_headers(rooms: Mapping[Limit, Room]) -> dict[str, str]:
    """``x-ratelimit-{limit,remaining,reset}-{requests,tokens}`` for the limits that the tenant has.

    If tokens are limited per minute and per day, the limit with fewer remaining tokens is reported.
    """
    headers = {}
    for name, limits in _HEADERS:
        found = [rooms[limit] for limit in limits if limit in rooms]
        if found:
            room = min(found, key=lambda each: each.remaining)
            headers[f"x-ratelimit-limit-{name}"] = str(room.allowed)
            headers[f"x-ratelimit-remaining-{name}"] = str(room.remaining)
            headers[f"x-ratelimit-reset-{name}"] = duration(room.reset_seconds)
    return headers


def duration(seconds: float) -> str:
    """Seconds in OpenAI's format, rounded up: ``120ms``, ``1.5s``, ``6m0s``, ``1h0m2s``."""
    if seconds < 1.0:
        return f"{math.ceil(1000 * seconds)}ms"
    tenths = math.ceil(10 * seconds)
    if tenths < 600:
        return f"{tenths / 10:g}s"
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes}m{rest}s" if hours else f"{minutes}m{rest}s"
