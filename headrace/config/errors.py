"""The error of an invalid setting, and a suggestion for a name that does not exist."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

MAX_MESSAGE = 2400
"""Characters of a message; the names of all model families have 1,900."""


def shortened(message: str) -> str:
    """A message without its middle if it is long: what it quotes of a file may have any length."""
    left = MAX_MESSAGE // 2
    return message if len(message) <= MAX_MESSAGE else f"{message[:left]} … {message[-left:]}"


class ConfigError(ValueError):
    """An invalid setting. The message names the setting and what would be valid."""

    def __init__(self, message: str) -> None:
        super().__init__(shortened(message))


def suggestion(name: str, known: Iterable[str]) -> str:
    """``; did you mean NAME?`` for the known name closest to ``name``, or nothing."""
    close = get_close_matches(name, list(known), n=1, cutoff=0.7)
    return f"; did you mean {close[0]}?" if close else ""
