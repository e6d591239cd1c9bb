"""OpenAI's routes that generate, and vLLM's routes that tokenize."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from headrace.api.auth.access import Access
from headrace.api.body import (
    beside,
    json_object,
    parse_beside,
    read_body,
    refuse_unsupported,
    typed_body,
    valid,
)
from headrace.api.compile.bodies import (
    CHAT,
    COMPLETIONS,
    DETOKENIZE,
    TOKENIZE,
    ChatBody,
    CompletionBody,
    Conversation,
)
from headrace.api.compile.call import Call
from headrace.api.compile.fields import Generation, TokenId
from headrace.api.compile.pictures import SentImage, sent_images
from headrace.api.compile.render import render
from headrace.api.compile.submit import open_chat, open_completion
from headrace.api.exchange import CALLER, Caller
from headrace.api.openai.writers import ChatWriter, CompletionWriter, Writer
from headrace.api.replies import StreamedAnswer, WholeAnswer, writer_of
from headrace.api.routing import Endpoints, route
from headrace.api.serving import Serving
from headrace.api.wire import NotYet, Wire, WireT
from headrace.service.service import Pieces
from headrace.text.content import PromptText


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


LISTED_AT_ONCE = 20_000
"""Tokens in one piece of a JSON list, which takes about a millisecond."""


GenerationT = TypeVar("GenerationT", bound=Generation)


class Api(Endpoints):
    """The endpoints."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._lookup, self._model = serving.lookup, serving.model

    @route(
        "POST /v1/chat/completions",
        Access.INFERENCE,
        "Create a chat completion.",
        body=ChatBody,
        example={
            "messages": [{"role": "user", "content": "Tell me a short story."}],
            "max_tokens": 200,
            "stream": True,
        },
    )
    async def chat_completions(self, request: Request) -> Response:
        body, caller = await self._read_generation(request, ChatBody, CHAT)
        call = await open_chat(self._lookup, self._model, body, caller, self._serving.request_timeout)
        return self._answer(call, lambda: ChatWriter(call, body), body.metadata, bool(body.stream))

    @route(
        "POST /v1/completions",
        Access.INFERENCE,
        "Create a text completion.",
        body=CompletionBody,
        example={"prompt": "Once upon a time", "max_tokens": 100, "stream": True},
    )
    async def completions(self, request: Request) -> Response:
        body, caller = await self._read_generation(request, CompletionBody, COMPLETIONS)
        call = await open_completion(self._lookup, self._model, body, caller, self._serving.request_timeout)
        return self._answer(call, lambda: CompletionWriter(call, body), body.metadata, bool(body.stream))

    @route(
        "POST /tokenize",
        Access.INFERENCE,
        "Convert text or messages to tokens.",
        body=TokenizeBody,
        example={"prompt": "Hello"},
    )
    async def tokenize(self, request: Request) -> Response:
        """The tokens of a text or of a rendered conversation."""
        raw = await read_body(request, self._serving.max_body_bytes)
        body = await beside(raw, lambda: tokenize_body(refuse_unsupported(json_object(raw), TOKENIZE)))
        images: tuple[SentImage, ...] = ()
        tenant_name = request.scope[CALLER].tenant()
        if isinstance(body, TokenizeBody):
            prompt = PromptText(body.prompt)
        else:
            images = sent_images(body)
            self._model.check_images(images)
            prompt = await render(self._model, body, tenant_name)
        self._model.check_name(body.model)
        tokens = await self._model.encode_prompt(prompt, body.add_special_tokens)
        if images:
            tokens = [*(await self._model.place(tokens, images, f"{tenant_name}\0")).tokens]
        pieces = self._model.intake.pieces()
        ids = await _listed(pieces, tokens, lambda token: token)
        texts = "null"
        if body.return_token_strs:
            texts = await _listed(pieces, tokens, self._model.tokenizer.token)
        head = f'{{"count":{len(tokens)},"max_model_len":{self._model.max_model_len}'
        while tokens:  # freeing millions at once would hold up the event loop
            await pieces.turn()
            del tokens[-LISTED_AT_ONCE:]
        return Response(f'{head},"tokens":{ids},"token_strs":{texts}}}', media_type="application/json")

    @route(
        "POST /detokenize",
        Access.INFERENCE,
        "Convert tokens to text.",
        body=DetokenizeBody,
        example={"tokens": [1, 2, 3]},
    )
    async def detokenize(self, request: Request) -> Response:
        """The text of tokens, special ones included."""
        body = await self._body(request, DetokenizeBody, DETOKENIZE)
        self._model.check_name(body.model)
        self._model.check_tokens(body.tokens, "tokens")
        decode = partial(self._model.tokenizer.decode, body.tokens, skip_special_tokens=False)
        return JSONResponse({"prompt": await asyncio.to_thread(decode)})

    async def _read_generation(
        self, request: Request, form: type[GenerationT], not_yet: NotYet
    ) -> tuple[GenerationT, Caller]:
        """The parsed body, and the client."""
        self._lookup.expect()
        raw = await read_body(request, self._serving.max_body_bytes)
        body = await parse_beside(raw, form, not_yet)
        self._model.check_name(body.model)
        caller: Caller = request.scope[CALLER]
        if self._serving.recorder is not None:
            caller = self._serving.recorder.note(request.url.path, raw, body, caller)
        return body, caller

    async def _body(self, request: Request, form: type[WireT], not_yet: NotYet) -> WireT:
        return await typed_body(request, self._serving.max_body_bytes, form, not_yet)

    def _answer(
        self, call: Call, make_writer: Callable[[], Writer], metadata: dict[str, str] | None, streamed: bool
    ) -> Response:
        writer = writer_of(call, make_writer)
        self._serving.notes.put(call, metadata)
        headers = self._serving.headers(call.tenant, call.model_name)
        return StreamedAnswer(call, writer, headers) if streamed else WholeAnswer(call, writer, headers)


async def _listed(pieces: Pieces, tokens: Sequence[int], value: Callable[[int], object]) -> str:
    """The JSON list of each token's ``value``; millions of tokens do not hold up the event loop."""
    parts = []
    for start in range(0, len(tokens), LISTED_AT_ONCE):
        await pieces.turn()
        values = list(map(value, tokens[start : start + LISTED_AT_ONCE]))
        parts.append(json.dumps(values, ensure_ascii=False, separators=(",", ":"))[1:-1])
    return f"[{','.join(parts)}]"
