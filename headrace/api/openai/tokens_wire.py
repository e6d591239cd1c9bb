"""The bodies of ``POST /tokenize`` and ``POST /detokenize``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from headrace.api.generation.fields import TokenId
from headrace.api.openai.chat_wire import Conversation
from headrace.api.wire import Wire, valid


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


def tokenize_body(given: Mapping[str, Any]) -> TokenizeBody | TokenizeChatBody:
    """The body of ``POST /tokenize``: of a conversation if it has messages, otherwise of a text.

    Raises:
        ApiError: a field is wrong or unknown.
    """
    known = TokenizeBody.model_fields.keys() | TokenizeChatBody.model_fields.keys()
    body = {name: value for name, value in given.items() if value is not None or name not in known}
    return valid(TokenizeChatBody, body) if "messages" in body else valid(TokenizeBody, body)


class DetokenizeBody(Wire):
    """Tokens to turn into text."""

    model: str | None = None
    tokens: list[TokenId] = Field(max_length=4_000_000)
