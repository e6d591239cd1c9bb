"""OpenAI's routes that generate, and vLLM's routes that tokenize."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from headrace.api.auth.access import Access
from headrace.api.auth.api_keys import tenant
from headrace.api.body import read_body
from headrace.api.edge import CALLER
from headrace.api.generation import unsupported
from headrace.api.generation.call import Call
from headrace.api.generation.caller import Caller
from headrace.api.generation.fields import Generation
from headrace.api.generation.serving import Serving
from headrace.api.generation.unsupported import NotYet, refuse_unsupported
from headrace.api.generation.writing import Writer
from headrace.api.openai.chat import ChatWriter, open_chat, render
from headrace.api.openai.chat_wire import ChatBody
from headrace.api.openai.completions import CompletionWriter, open_completion
from headrace.api.openai.completions_wire import CompletionBody
from headrace.api.openai.tokens_wire import DetokenizeBody, TokenizeBody, tokenize_body
from headrace.api.replies import StreamedAnswer, WholeAnswer, writer_of
from headrace.api.routing import Endpoints, route
from headrace.api.wire import WireT, beside, json_object, parse_beside
from headrace.service.service import Pieces
from headrace.text.content import PromptText

LISTED_AT_ONCE = 20_000
"""Tokens in one piece of a JSON list, which takes about a millisecond."""

GenerationT = TypeVar("GenerationT", bound=Generation)


class Api(Endpoints):
    """The endpoints."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._recall, self._model = serving.recall, serving.model

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
        """``POST /v1/chat/completions``."""
        body, caller = await self._read_generation(request, ChatBody, unsupported.CHAT)
        call = await open_chat(self._recall, self._model, body, caller, self._serving.request_timeout)
        return self._answer(call, lambda: ChatWriter(call, body), body.metadata, bool(body.stream))

    @route(
        "POST /v1/completions",
        Access.INFERENCE,
        "Create a text completion.",
        body=CompletionBody,
        example={"prompt": "Once upon a time", "max_tokens": 100, "stream": True},
    )
    async def completions(self, request: Request) -> Response:
        """``POST /v1/completions``."""
        body, caller = await self._read_generation(request, CompletionBody, unsupported.COMPLETIONS)
        call = await open_completion(self._recall, self._model, body, caller, self._serving.request_timeout)
        return self._answer(call, lambda: CompletionWriter(call, body), body.metadata, bool(body.stream))

    @route(
        "POST /tokenize",
        Access.INFERENCE,
        "Convert text or messages to tokens.",
        body=TokenizeBody,
        example={"prompt": "Hello"},
    )
    async def tokenize(self, request: Request) -> Response:
        """``POST /tokenize``: the tokens of a text or of a rendered conversation."""
        raw = await read_body(request, self._serving.max_body_bytes)
        body = await beside(
            raw, lambda: tokenize_body(refuse_unsupported(json_object(raw), unsupported.TOKENIZE))
        )
        if isinstance(body, TokenizeBody):
            prompt = PromptText(body.prompt)
        else:
            caller: Caller = request.scope[CALLER]
            prompt = await render(self._model, body, tenant(caller.key_id, caller.tenant_header, None))
        self._model.check_name(body.model)
        tokens = await self._model.encode_prompt(prompt, body.add_special_tokens)
        pieces = self._model.intake.pieces()
        ids = await _listed(pieces, tokens, lambda token: token)
        texts = "null"
        if body.return_token_strs:
            texts = await _listed(pieces, tokens, self._model.tokenizer.token)
        head = f'{{"count":{len(tokens)},"max_model_len":{self._model.max_model_len}'
        return Response(f'{head},"tokens":{ids},"token_strs":{texts}}}', media_type="application/json")

    @route(
        "POST /detokenize",
        Access.INFERENCE,
        "Convert tokens to text.",
        body=DetokenizeBody,
        example={"tokens": [1, 2, 3]},
    )
    async def detokenize(self, request: Request) -> Response:
        """``POST /detokenize``: the text of tokens, special ones included."""
        body = await self._body(request, DetokenizeBody, unsupported.DETOKENIZE)
        self._model.check_name(body.model)
        self._model.check_tokens(body.tokens, "tokens")
        decode = partial(self._model.tokenizer.decode, body.tokens, skip_special_tokens=False)
        return JSONResponse({"prompt": await asyncio.to_thread(decode)})

    async def _read_generation(
        self, request: Request, form: type[GenerationT], not_yet: NotYet
    ) -> tuple[GenerationT, Caller]:
        """The parsed body, and the client."""
        self._recall.service.expect()
        raw = await read_body(request, self._serving.max_body_bytes)
        body = await parse_beside(raw, form, not_yet)
        self._model.check_name(body.model)
        caller: Caller = request.scope[CALLER]
        if self._serving.recorder is not None:
            caller = self._serving.recorder.note(request.url.path, raw, body, caller)
        return body, caller

    async def _body(self, request: Request, form: type[WireT], not_yet: NotYet) -> WireT:
        return await parse_beside(await read_body(request, self._serving.max_body_bytes), form, not_yet)

    def _answer(
        self, call: Call, make_writer: Callable[[], Writer], metadata: dict[str, str] | None, streamed: bool
    ) -> Response:
        writer = writer_of(call, make_writer)
        self._serving.notes.put(call, metadata)
        headers = self._serving.headers(call.tenant)
        return StreamedAnswer(call, writer, headers) if streamed else WholeAnswer(call, writer, headers)


async def _listed(pieces: Pieces, tokens: Sequence[int], value: Callable[[int], object]) -> str:
    """The JSON list of each token's ``value``; millions of tokens do not hold up the event loop."""
    parts = []
    for start in range(0, len(tokens), LISTED_AT_ONCE):
        await pieces.turn()
        values = list(map(value, tokens[start : start + LISTED_AT_ONCE]))
        parts.append(json.dumps(values, ensure_ascii=False, separators=(",", ":"))[1:-1])
    return f"[{','.join(parts)}]"
