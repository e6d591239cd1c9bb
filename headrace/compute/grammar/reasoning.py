"""The reasoning budget of one sequence: counts reasoning tokens, and forces the end marker at the limit.

```
 before --begin marker--> inside, counted --limit--> the end marker's tokens, one by one --> before, or over
                              `-- end marker, written by the model itself --------------------^
```
Markers are found in the text, as in `text.parsing`, so the model's tokenization of markers does not matter. A forced
marker uses the tokenizer's tokens.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import copy
from enum import Enum, auto

from llguidance import LLMatcher, LLTokenizer

from headrace.core.constraint import ReasoningLimit

MOST_DELAY = 3
"""Maximum number of tokens by which a forced marker is delayed until a multi-token character is complete."""


def spelt(marker: str, added: Mapping[str, int], tokenizer: LLTokenizer) -> tuple[int, ...]:
    """The tokens of a marker; ``added`` are the tokens outside the vocabulary's merges, by their text."""
    if not added:
        return _plain(marker, tokenizer)
    longest_first = sorted(added, key=len, reverse=True)
    tokens: list[int] = []
    for part in re.split("(" + "|".join(map(re.escape, longest_first)) + ")", marker):
        if part:
            tokens += [added[part]] if part in added else _plain(part, tokenizer)
    return tuple(tokens)


def _plain(text: str, tokenizer: LLTokenizer) -> tuple[int, ...]:
    tokens = tokenizer.tokenize_str(text)
    if tokenizer.decode_bytes(tokens) == text.encode():
        return tuple(tokens)
    return tuple(tokenizer.greedy_tokenize(text))  # the tokenizer adds a space before a text's first word


class _Where(Enum):
    BEFORE = auto()
    INSIDE = auto()
    OVER = auto()  # no reasoning can follow


class ReasoningCount:
    """Counts the reasoning of one sequence. ``forced`` is the token that must come next; None: any."""

    def __init__(self, limit: ReasoningLimit, marker: Sequence[int], tokenizer: LLTokenizer) -> None:
        self._limit = limit
        self._marker = tuple(marker)
        self._tokenizer = tokenizer
        self._begins = tuple(text.encode() for text in limit.begin)
        self._ends = tuple(text.encode() for text in limit.end)
        self._longest = max(map(len, (*self._begins, *self._ends)))
        self._where = _Where.BEFORE
        self._text = b""  # since the last marker, as far as another one may be in it
        self._used = 0
        self._pending: tuple[int, ...] = ()
        if limit.opened:
            self._begin(b"")

    @property
    def forced(self) -> int | None:
        return self._pending[0] if self._pending else None

    @property
    def pending(self) -> tuple[int, ...]:
        """All tokens that must come next."""
        return self._pending

    def consume(self, token: int) -> None:
        """The sequence has drawn ``token``."""
        if self._where is _Where.OVER:
            return
        if self._pending and token == self._pending[0]:
            self._pending = self._pending[1:]
            if not self._pending:
                self._end(b"")
            return
        known = 0 <= token < self._tokenizer.vocab_size
        self._text += self._tokenizer.decode_bytes([token]) if known else b""
        if self._where is _Where.BEFORE:
            self._look_for_begin()
        else:
            self._used += 1
            self._look_for_end()

    def _look_for_begin(self) -> None:
        if self._limit.first:
            said = self._text.lstrip()
            marker = next((each for each in self._begins if said.startswith(each)), None)
            if marker is not None:
                self._begin(said[len(marker) :])
            elif said and not any(each.startswith(said) for each in self._begins):
                self._where = _Where.OVER
            return
        found = _first(self._text, self._begins)
        if found is None:
            self._text = self._text[-self._longest :]
        else:
            self._begin(self._text[found:])

    def _look_for_end(self) -> None:
        found = _first(self._text, self._ends)
        if found is not None:
            self._end(self._text[found:])
            return
        self._text = self._text[-self._longest :]
        self._force()

    def _begin(self, rest: bytes) -> None:
        self._where, self._text = _Where.INSIDE, rest
        self._look_for_end()

    def _end(self, rest: bytes) -> None:
        self._where = _Where.OVER if self._limit.first else _Where.BEFORE
        self._text, self._pending = rest, ()

    def _force(self) -> None:
        """Force the marker if the limit is reached, but not within a character."""
        over = self._used - self._limit.tokens
        whole = over >= MOST_DELAY or not _is_cut(self._text)
        self._pending = self._marker if over >= 0 and whole else ()


class SequenceMatcher:
    """The allowed tokens of one sequence: those of its ``grammar``, or the token forced by the reasoning limit."""

    def __init__(self, grammar: LLMatcher | None, reasoning: ReasoningCount | None = None) -> None:
        self.grammar = grammar
        self._reasoning = reasoning

    @property
    def forced(self) -> int | None:
        """The token forced by the reasoning limit; None if the grammar decides."""
        return None if self._reasoning is None else self._reasoning.forced

    @property
    def stopped(self) -> bool:
        """Whether only an end may follow."""
        return self.grammar is not None and self.forced is None and self.grammar.is_stopped()

    @property
    def error(self) -> str:
        """The grammar's error; empty if there is none."""
        return self.grammar.get_error() if self.grammar is not None and self.grammar.is_error() else ""

    def copy(self) -> SequenceMatcher:
        """A copy in the same state, for following a draft."""
        grammar = None if self.grammar is None else self.grammar.deep_copy()
        return SequenceMatcher(grammar, copy(self._reasoning))

    def allows(self, token: int) -> bool:
        """Whether ``token`` may come next."""
        if self.forced is not None:
            return token == self.forced
        return self.grammar is None or self.grammar.validate_tokens([token]) == 1

    def forced_run(self) -> Sequence[int]:
        """The tokens that must come next, as far as they are certain: an end marker's, or the grammar's."""
        if self._reasoning is not None and self._reasoning.pending:
            return self._reasoning.pending
        return () if self.grammar is None else self.grammar.compute_ff_tokens()

    def consume(self, tokens: Sequence[int]) -> bool:
        """Whether the grammar allows ``tokens``, which the sequence has drawn."""
        if self._reasoning is not None:
            for token in tokens:
                self._reasoning.consume(token)
        return not tokens or self.grammar is None or bool(self.grammar.consume_tokens(list(tokens)))


def _first(text: bytes, markers: Sequence[bytes]) -> int | None:
    """The end of the marker that ends first; None if there is no marker."""
    found = [at + len(marker) for marker in markers if (at := text.find(marker)) >= 0]
    return min(found, default=None)


def _is_cut(text: bytes) -> bool:
    """Whether ``text`` ends within a character of UTF-8."""
    for back, byte in enumerate(reversed(text[-3:]), start=1):
        if byte < 0x80:
            return False
        if byte >= 0xC0:
            return back < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
    return False
