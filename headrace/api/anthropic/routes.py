"""The routes of Anthropic's Messages API."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from headrace.api.anthropic.conversation import chat_body, counted, tool_places
from headrace.api.anthropic.wire import CountBody, MessagesBody, refuse
from headrace.api.anthropic.writer import MessageWriter
from headrace.api.auth.access import Access
from headrace.api.body import beside, json_object, read_body, valid
from headrace.api.compile.call import Call
from headrace.api.compile.encode import conversation_tokens
from headrace.api.compile.submit import open_chat
from headrace.api.exchange import CALLER, Caller
from headrace.api.replies import StreamedAnswer, WholeAnswer, writer_of
from headrace.api.routing import Endpoints, route
from headrace.api.serving import Serving
from headrace.api.wire import named

NAMES = {
    "response_format": "output_config.format",
    "thinking_token_budget": "thinking.budget_tokens",
    "stop": "stop_sequences",
    "user": "metadata.user_id",
}
"""The fields of a chat request that have other names in this API."""


class Messages(Endpoints):
    """The endpoints."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self._lookup, self._model = serving.lookup, serving.model

    @route(
        "POST /v1/messages",
        Access.INFERENCE,
        "Create a message, in Anthropic's format.",
        body=MessagesBody,
        example={
            "messages": [{"role": "user", "content": "Tell me a short story."}],
            "max_tokens": 200,
            "stream": True,
        },
    )
    async def create(self, request: Request) -> Response:
        self._lookup.expect()
        raw = await read_body(request, self._serving.max_body_bytes)
        call, writer, body = await self.open(raw, request.scope[CALLER])
        headers = self._serving.headers(call.tenant, call.model_name)
        return (
            StreamedAnswer(call, writer, headers, writer.ping)
            if body.stream
            else WholeAnswer(call, writer, headers)
        )

    async def open(self, raw: bytes, caller: Caller) -> tuple[Call, MessageWriter, MessagesBody]:
        """Submit a request for a message.

        Raises:
            ApiError: the request is invalid, or the server rejects it.
        """
        body = await beside(raw, lambda: valid(MessagesBody, refuse(json_object(raw))))
        self._model.check_name(body.model)
        chat = chat_body(self._model.dialect, body)
        if self._serving.recorder is not None:
            caller = self._serving.recorder.note_chat(chat, caller)
        with named(NAMES, tool_places):
            call = await open_chat(
                self._lookup,
                self._model,
                chat,
                caller,
                self._serving.request_timeout,
                id_prefix="msg_",
                shorten=True,
            )
        writer = writer_of(call, lambda: MessageWriter(call, body))
        self._serving.notes.put(call, None)
        return call, writer, body

    @route(
        "POST /v1/messages/count_tokens",
        Access.INFERENCE,
        "Count the tokens of a message request's prompt.",
        body=CountBody,
        example={"messages": [{"role": "user", "content": "Hello"}]},
    )
    async def count_tokens(self, request: Request) -> Response:
        """The tokens of a request's prompt."""
        raw = await read_body(request, self._serving.max_body_bytes)
        body = await beside(raw, lambda: valid(CountBody, refuse(json_object(raw))))
        self._model.check_name(body.model)
        caller: Caller = request.scope[CALLER]
        conversation = counted(self._model.dialect, body)
        tokens = await conversation_tokens(self._model, conversation, caller.tenant())
        return JSONResponse({"input_tokens": len(tokens)})
