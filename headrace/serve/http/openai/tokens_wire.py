"""The bodies of ``POST /tokenize`` and ``POST /detokenize``."""

from __future__ import annotations

from pydantic import Field

from headrace.serve.http.generation.fields import TokenId
from headrace.serve.http.openai.chat_wire import Conversation
from headrace.serve.http.wire import Wire


class TokenizeBody(Wire):
    """A text to tokenize."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class TokenizeChatBody(Conversation):
    """A conversation to render and tokenize."""

    model: str | None = None
    add_special_tokens: bool = False
    return_token_strs: bool | None = None


class DetokenizeBody(Wire):
    """Tokens to turn into text."""

    model: str | None = None
    tokens: list[TokenId] = Field(max_length=4_000_000)
