"""Tokens as a string, because a string is searched faster than a list."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def characters(tokens: Sequence[int]) -> str:
    """One character per token. Ids beyond Unicode may share a character: a wrong proposal is only rejected."""
    try:
        return "".join(map(chr, tokens))
    except (ValueError, OverflowError):
        return "".join(chr(token % (sys.maxunicode + 1)) for token in tokens)
