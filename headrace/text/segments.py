"""Caches the tokens of long prompt parts, so that a system prompt is not tokenized again for every request.

```
 <|system|>…two pages…<|end|>\n<|user|>…a question…<|end|>\n<|assistant|>
 └─ cached ─────────────────┘└─ to be tokenized ──────────────────────┘
```
Tokenizers find special tokens first and then process the text between two of them separately. So a text may be cut
before any special token, and its parts tokenized separately. If a special token also absorbs adjacent white space,
nothing is cut. Parts are cached per scope, so tokenizing time reveals nothing about prompts of other scopes.
"""

from __future__ import annotations

import re
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from headrace.text.tokenizer import Tokenizer

KEPT_CHARACTERS = 4 << 20
"""Maximum characters of all cached parts; with their tokens they take about 10 MB."""

SHORTEST = 256
"""Shorter parts are not cached, because tokenizing them is fast."""


class Part(NamedTuple):
    """A part of a text. ``tokens`` is None if they are not cached; a part with ``kept`` will be cached."""

    text: str
    kept: bool
    tokens: array[int] | None


class Segments:
    """The cached parts of one tokenizer. For one thread; the tokenizing itself may run on another."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = tokenizer.backend.get_added_tokens_decoder().values()
        # Tokens that are searched for in the raw text, before anything else.
        found_first = [token for token in added if not token.normalized]
        marks = sorted((re.escape(token.content) for token in found_first), key=len, reverse=True)
        greedy = any(token.lstrip or token.rstrip or token.single_word for token in found_first)
        self._mark = re.compile("|".join(marks)) if marks and not greedy else None
        self._known: OrderedDict[tuple[str, str], array[int]] = OrderedDict()
        self._characters = 0

    def cut(self, text: str, scope: str) -> list[Part]:
        """The parts of ``text``, with short ones merged; the whole text if it may not be cut."""
        starts = [] if self._mark is None else [match.start() for match in self._mark.finditer(text)]
        if not starts:
            return [Part(text, kept=False, tokens=None)]
        parts: list[Part] = []
        begun = 0
        for start, end in zip([0, *starts], [*starts, len(text)], strict=True):
            if end - start >= SHORTEST:
                if begun < start:
                    parts.append(Part(text[begun:start], kept=False, tokens=None))
                part = text[start:end]
                parts.append(Part(part, kept=True, tokens=self._known.get((scope, part))))
                begun = end
        if begun < len(text):
            parts.append(Part(text[begun:], kept=False, tokens=None))
        return parts

    def join(self, parts: Sequence[Part], tokenized: Iterable[list[int]], scope: str) -> list[int]:
        """The tokens of all ``parts``; ``tokenized`` are those of the parts that were not cached, in order."""
        rest = iter(tokenized)
        tokens: list[int] = []
        for part in parts:
            found = next(rest) if part.tokens is None else part.tokens.tolist()
            tokens += found
            if part.kept:
                self._keep((scope, part.text), array("i", found) if part.tokens is None else part.tokens)
        return tokens

    def _keep(self, name: tuple[str, str], tokens: array[int]) -> None:
        if name not in self._known:
            self._characters += len(name[1])
        self._known[name] = tokens
        self._known.move_to_end(name)
        while self._characters > KEPT_CHARACTERS:
            (_, text), _ = self._known.popitem(last=False)
            self._characters -= len(text)
