"""Whether a tokenizer's regular expressions, with which it splits text, may take long for a short text.

Published tokenizers have expressions of which each position of a text is tried in a few ways, or in a few times as many
as the text has characters. What `expressions` does not understand may take long.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import tokenizers

from headrace.expressions import MAX_WAYS, ways

MAX_PARTS = 64
"""Normalizers and pre-tokenizers of a tokenizer, each of which reads the whole text."""


def may_take_long(backend: tokenizers.Tokenizer) -> bool:
    """Whether the tokenizer's regular expressions may take long for a short text."""
    parts = [
        json.loads(part.__getstate__())
        for part in (backend.normalizer, backend.pre_tokenizer)
        if part is not None
    ]
    found = [ways(each) for each in _values(parts, "Regex")]
    if any(each is None or each.fallible > 1 for each in found):
        return True
    many = sum(each.choices for each in found if each is not None) > MAX_WAYS
    return many or sum(1 for _ in _values(parts, "type")) > MAX_PARTS


def _values(value: Any, wanted: str) -> Iterator[str]:
    """The values of this key in all objects."""
    if isinstance(value, dict):
        for key, each in value.items():
            if key == wanted:
                yield str(each)
            else:
                yield from _values(each, wanted)
    elif isinstance(value, list):
        for each in value:
            yield from _values(each, wanted)
