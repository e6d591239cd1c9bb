"""One sequence on its way to the engine, as the caches see it."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.core.cache.response.cacheability import CacheClass
from headrace.core.cache.response.control import CacheDirectives
from headrace.core.request import Request


@dataclass(frozen=True, slots=True)
class Turn:
    """The last thing a user said, apart from everything else that shapes the prompt.

    ``text`` is what a near question may differ in; ``context`` is a digest of all that must be equal: the turns
    before, the template and its variables.
    """

    text: str
    context: bytes


@dataclass(frozen=True, slots=True)
class CacheQuery:
    """A request with its names: ``key`` is its own, ``beginning`` that of all requests that differ from it in
    ``max_tokens`` alone, ``partition`` that of those that differ in ``turn.text`` too (empty without a turn).
    ``allowed`` says which caches may be asked at all. ``origin`` names the call in the history of questions (empty:
    none).
    """

    request: Request
    control: CacheDirectives
    allowed: CacheClass
    key: bytes
    beginning: bytes = b""
    turn: Turn | None = None
    partition: bytes = b""
    origin: bytes = b""
