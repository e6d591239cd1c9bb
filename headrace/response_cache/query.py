"""What is looked up: one sequence of a call as the API describes it, and the same with its cache keys (`lookup`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from headrace.core.request import Request
from headrace.response_cache.rules.cacheability import NO_DIRECTIVES, CacheClass, CacheDirectives
from headrace.text.stream import Texts


@dataclass(frozen=True, slots=True)
class Turn:
    """The last user message, separate from everything else that shapes the prompt.

    ``text`` is what a similar request may differ in. ``context`` is a digest of all that must be equal: the earlier
    messages, the template and its variables.
    """

    text: str
    context: bytes


def no_turn() -> None:
    """Return None, for a prompt that is no conversation."""


class LookupRequest(NamedTuple):
    """One sequence of a call.

    ``continues`` says that the response continues the prompt's text. ``stops`` makes a text stream that finds the
    request's stop strings (None: it has none). ``turn`` returns the last user message, for the semantic cache. ``bars``
    names a field that forbids caching, or is empty. ``origin`` is the key of the request in the history (empty: none).
    ``prompted`` is for `api` alone.
    """

    request: Request
    control: CacheDirectives = NO_DIRECTIVES
    continues: bool = False
    stops: Callable[[], Texts] | None = None
    turn: Callable[[], Turn | None] = no_turn
    bars: str = ""
    origin: bytes = b""
    prompted: object = None


@dataclass(frozen=True, slots=True)
class CacheQuery:
    """A `LookupRequest` with its keys, as the caches see it.

    ``key`` is its own. ``beginning`` is shared by all requests that differ only in ``max_tokens``, ``partition`` by
    those that also differ in ``turn.text`` (empty without a turn). ``allowed`` says which caches may be used.
    ``origin`` and ``stops`` are as in `LookupRequest`.
    """

    request: Request
    control: CacheDirectives
    allowed: CacheClass
    key: bytes
    beginning: bytes = b""
    turn: Turn | None = None
    partition: bytes = b""
    origin: bytes = b""
    stops: Callable[[], Texts] | None = None
