"""What the edge hands in to have answered: a request, and what only text and its caller know of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from headrace.core.cache.response.control import NO_DIRECTIVES, CacheDirectives
from headrace.core.cache.response.query import Turn
from headrace.core.request import Request
from headrace.serve.text.stream import TextStream


def no_turn() -> None:
    """Of a prompt that is no conversation, or whose last word is not the user's."""


class LookupRequest(NamedTuple):
    """One sequence of a call.

    ``continues`` says that the answer goes on with the prompt's text. ``stops`` makes a text stream that finds the
    request's stop strings, None where it has none. ``turn`` finds out what the user said last, for who asks by meaning.
    ``bars`` names a field that forbids caching, if one does. ``origin`` names the call in the history of questions.
    """

    request: Request
    control: CacheDirectives = NO_DIRECTIVES
    continues: bool = False
    stops: Callable[[], TextStream] | None = None
    turn: Callable[[], Turn | None] = no_turn
    bars: str = ""
    origin: bytes = b""
