"""The error of an invalid setting, and a suggestion for a name that does not exist."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class ConfigError(ValueError):
    """An invalid setting. The message names the setting and what would be valid."""


def suggestion(name: str, known: Iterable[str]) -> str:
    """``; did you mean NAME?`` for the known name closest to ``name``, or nothing."""
    close = get_close_matches(name, list(known), n=1, cutoff=0.7)
    return f"; did you mean {close[0]}?" if close else ""
