"""Delays the end of a response until it is stored, so that a client never has a complete response that is lost."""

from __future__ import annotations

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from headrace.serve.http.edge import SEND
from headrace.serve.http.responses.store import ResponseStore


class KeptAnswer(Response):
    """A response whose last part is sent once ``store`` has written it."""

    def __init__(self, answer: Response, store: ResponseStore) -> None:
        self._answer = answer
        self._store = store

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope = {**scope, SEND: self._waiting(scope.get(SEND, send))}
        await self._answer(scope, receive, self._waiting(send))

    def _waiting(self, send: Send) -> Send:
        async def forward(message: Message) -> None:
            if message["type"] == "http.response.body" and not message.get("more_body"):
                await self._store.written()
            await send(message)

        return forward
