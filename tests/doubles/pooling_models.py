"""Models without torch: a text's vector counts its letters, a pair's score is the share of common letters."""

from __future__ import annotations

import threading
from collections.abc import Generator, Mapping, Sequence

import numpy as np

from headrace.core.embedding import TokenRow
from headrace.service.embedding_models import Values

LETTERS = 26


class LetterTokenizer:
    """A token for each letter, between 26 and 27."""

    def texts(self, texts: Sequence[str], limit: int | None = None) -> list[TokenRow]:
        return [TokenRow((26, *_letters(text)[: None if limit is None else limit - 2], 27)) for text in texts]

    def pairs(
        self, pairs: Sequence[tuple[str, str]], limit: int | None = None, second_limit: int | None = None
    ) -> list[TokenRow]:
        rows = []
        for one, other in pairs:
            first = (26, *_letters(one), 27)
            second = _letters(other)[:second_limit]
            tokens = (*first, *second)[: None if limit is None else limit - 1]
            rows.append(TokenRow((*tokens, 27), len(first)))
        return rows


def _letters(text: str) -> tuple[int, ...]:
    if any(ord(letter) >= 0xD800 for letter in text):
        raise ValueError("text must be valid Unicode")
    return tuple(ord(letter) - ord("a") for letter in text.lower() if "a" <= letter <= "z")


class LetterModel:
    """An embedding model; ``pauses`` are those of each batch, ``batches`` the numbers of inputs of those computed."""

    def __init__(self, name: str = "letters", pauses: int = 2, max_tokens: int = 12) -> None:
        self.name = name
        self.tokenizer = LetterTokenizer()
        self.vocab_size = LETTERS + 2
        self.dimensions = LETTERS
        self.max_tokens = max_tokens
        self.batch_tokens = 64
        self.unit_tokens = 1
        self.normalize = True
        self.prompts: Mapping[str, str] = {"query": "qq", "document": ""}
        self.default_prompt: str | None = None
        self.pauses = pauses
        self.batches: list[int] = []
        self.poison: int | None = None
        self.endless = threading.Event()
        """While it is set, a batch goes on and on."""
        self.begun = threading.Event()
        """Set when a batch goes on and on."""
        self.closed = threading.Event()
        """Set when a batch was given up."""

    def run(self, rows: Sequence[TokenRow]) -> Generator[None, None, Values]:
        try:
            for _ in range(self.pauses):
                yield
            while self.endless.is_set():
                self.begun.set()
                yield
        except GeneratorExit:
            self.closed.set()
            raise
        self.batches.append(len(rows))
        if any(self.poison in row.tokens for row in rows):
            raise ValueError("a secret of the inside")
        return np.stack([self._value(row) for row in rows])

    def _value(self, row: TokenRow) -> Values:
        counts = np.zeros(LETTERS, np.float32)
        for token in row.tokens:
            if token < LETTERS:
                counts[token] += 1
        return counts


class LetterPairs(LetterModel):
    """A cross-encoder."""

    def _value(self, row: TokenRow) -> Values:
        one, other = set(row.tokens[1 : row.second - 1]), set(row.tokens[row.second : -1])
        return np.array([len(one & other) / max(1, len(one | other))], np.float32)
