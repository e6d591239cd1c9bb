"""The model as the API sees it: a name, a context length, and its ways between text and tokens."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Sequence
from functools import lru_cache

from headrace.serve.http.errors import invalid, model_not_found
from headrace.serve.http.generation.scheduling_fields import Rules
from headrace.serve.http.tools.dialect import Dialect
from headrace.serve.text.segments import Segments
from headrace.serve.text.stream import TextStreams
from headrace.serve.text.template import ChatTemplate
from headrace.serve.text.tokenizer import Tokenizer

INLINE_CHARACTERS = 4096
"""Texts up to here are rendered and tokenized where they are met (under a millisecond or two); longer ones on a worker
thread."""


class ServedModel:
    """What routes need to know of the model that is served.

    Args:
        name: what clients call it.
        tokenizer, template: its text side.
        max_model_len: tokens of one sequence, prompt and answer together.
        vocab_size: rows of the model's output; ids from there on do not exist.
        root: where it was loaded from, for ``/v1/models``.
        rules: what may be asked of the scheduler.
        stream_interval: tokens of a sequence that a part of a stream holds, after its first.
        dialect: how its template offers tools, and how its answers are read; by the template's text if left out.
    """

    def __init__(
        self,
        name: str,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        max_model_len: int,
        vocab_size: int,
        root: str = "",
        rules: Rules | None = None,
        stream_interval: int = 1,
        dialect: Dialect | None = None,
    ) -> None:
        self.name = name
        self.tokenizer = tokenizer
        self.template = template
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.rules = rules or Rules()
        self.stream_interval = stream_interval
        self.dialect = dialect or Dialect(template)
        self.streams = TextStreams(tokenizer)
        self._special = {
            token: text for token in tokenizer.special_token_ids if (text := tokenizer.token(token))
        }
        self.tokens_of = lru_cache(maxsize=64)(self._tokens_of)
        self._segments = Segments(tokenizer)
        self.created = int(time.time())
        described = f"{name} {root} {max_model_len} {vocab_size}"
        self.fingerprint = "fp_" + hashlib.sha256(described.encode()).hexdigest()[:10]
        self.card = {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "headrace",
            "root": root or name,
            "parent": None,
            "max_model_len": max_model_len,
        }

    def check_name(self, asked: str | None) -> None:
        """Raise `ApiError` 404 unless ``asked`` is this model or nothing."""
        if asked is not None and asked != self.name:
            raise model_not_found(asked)

    def _tokens_of(self, markers: frozenset[str]) -> frozenset[int]:
        """The special tokens that are part of one of ``markers``."""
        return frozenset(
            token for token, text in self._special.items() if any(text in marker for marker in markers)
        )

    def check_tokens(self, tokens: list[int] | tuple[int, ...], param: str) -> None:
        """Raise `ApiError` 400 unless all ids exist."""
        if tokens and not (min(tokens) >= 0 and max(tokens) < self.vocab_size):
            wrong = next(token for token in tokens if not 0 <= token < self.vocab_size)
            raise invalid(f"{param} has the token id {wrong}; ids are 0 to {self.vocab_size - 1}", param)

    async def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """The tokens of ``text``, without holding the loop up over a long one."""
        return (await self.encode_batch([text], add_special_tokens))[0]

    async def encode_prompt(self, text: str, scope: str) -> list[int]:
        """The tokens of a rendered prompt; long parts of it that ``scope`` has sent before are known."""
        parts = self._segments.cut(text, scope)
        missing = [part.text for part in parts if part.tokens is None]
        tokenized = await self.encode_batch(missing, add_special_tokens=False) if missing else []
        return self._segments.join(parts, tokenized, scope)

    async def encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[list[int]]:
        """The tokens of each text, without holding the loop up over long or many ones."""
        if sum(map(len, texts)) <= INLINE_CHARACTERS:
            return self.tokenizer.encode_batch(texts, add_special_tokens)
        return await asyncio.to_thread(self.tokenizer.encode_batch, texts, add_special_tokens)

    def token_text(self, token: int) -> str:
        """What one token spells by itself; half a character is a replacement character."""
        return self.streams.token_bytes(token).decode("utf-8", "replace")
