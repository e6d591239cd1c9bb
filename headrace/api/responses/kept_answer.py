"""Delays the end of a response until it is stored, so that a client never has a complete response that is lost.

If it cannot be stored (a full disk), the response says so: its ``store`` is false.
"""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from headrace.api.edge import SEND
from headrace.api.responses.writer import ResponseWriter


class KeptAnswer(Response):
    """A response whose last part is sent once it is known whether the response of ``writer`` is stored."""

    def __init__(self, answer: Response, writer: ResponseWriter) -> None:
        self._answer = answer
        self._writer = writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope = {**scope, SEND: self._waiting(scope.get(SEND, send))}
        await self._answer(scope, receive, self._waiting(send))

    def _waiting(self, send: Send) -> Send:
        held: list[Message] = []  # the head of a whole response, which has the length of its body

        async def forward(message: Message) -> None:
            if message["type"] == "http.response.start" and "content-length" in MutableHeaders(scope=message):
                held.append(message)
                return
            if message["type"] == "http.response.body" and not message.get("more_body"):
                body = await self._writer.truly(message.get("body", b""))
                message = {**message, "body": body}
                for head in held:
                    MutableHeaders(scope=head)["content-length"] = str(len(body))
                    await send(head)
            await send(message)

        return forward
