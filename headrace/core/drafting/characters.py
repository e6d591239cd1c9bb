"""Tokens as a string, in which they are searched faster than in a list."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def characters(tokens: Sequence[int]) -> str:
    """A character for each token. Ids beyond Unicode share characters: what is proposed is verified in any case."""
    try:
        return "".join(map(chr, tokens))
    except (ValueError, OverflowError):
        return "".join(chr(token % (sys.maxunicode + 1)) for token in tokens)
