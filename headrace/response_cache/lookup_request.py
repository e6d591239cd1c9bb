"""One sequence to look up in the caches: the request, its cache directives, and access to its text."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from headrace.core.request import Request
from headrace.response_cache.rules.response.control import NO_DIRECTIVES, CacheDirectives
from headrace.response_cache.rules.response.query import Turn
from headrace.text.stream import Texts


def no_turn() -> None:
    """Return None, for a prompt that is no conversation."""


class LookupRequest(NamedTuple):
    """One sequence of a call.

    ``continues`` says that the response continues the prompt's text. ``stops`` makes a text stream that finds the
    request's stop strings (None: it has none). ``turn`` returns the last user message, for the semantic cache. ``bars``
    names a field that forbids caching, or is empty. ``origin`` is the key of the request in the history.
    """

    request: Request
    control: CacheDirectives = NO_DIRECTIVES
    continues: bool = False
    stops: Callable[[], Texts] | None = None
    turn: Callable[[], Turn | None] = no_turn
    bars: str = ""
    origin: bytes = b""
