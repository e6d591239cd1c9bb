"""A cache query: one sequence as the caches see it."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.core.request import Request
from headrace.response_cache.rules.response.cacheability import CacheClass
from headrace.response_cache.rules.response.control import CacheDirectives


@dataclass(frozen=True, slots=True)
class Turn:
    """The last user message, separate from everything else that shapes the prompt.

    ``text`` is what a similar request may differ in. ``context`` is a digest of all that must be equal: the earlier
    messages, the template and its variables.
    """

    text: str
    context: bytes


@dataclass(frozen=True, slots=True)
class CacheQuery:
    """A request with its keys.

    ``key`` is its own. ``beginning`` is shared by all requests that differ only in ``max_tokens``, ``partition`` by
    those that also differ in ``turn.text`` (empty without a turn). ``allowed`` says which caches may be used.
    ``origin`` names the call in the request history (empty: none).
    """

    request: Request
    control: CacheDirectives
    allowed: CacheClass
    key: bytes
    beginning: bytes = b""
    turn: Turn | None = None
    partition: bytes = b""
    origin: bytes = b""
