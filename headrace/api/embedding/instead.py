"""The text generation routes of a server without a model for them: a 404 that names the model it has."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from headrace.api.auth.access import Access
from headrace.api.errors import ApiError
from headrace.api.routing import Endpoints, route

PATHS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/tokenize",
    "/detokenize",
)


class NoGeneration(Endpoints):
    """Routes that return 404; ``model`` is the name of the server's model."""

    def __init__(self, model: str) -> None:
        self._model = model

    @route("POST /v1/chat/completions", Access.INFERENCE)
    @route("POST /v1/completions", Access.INFERENCE)
    @route("POST /v1/responses", Access.INFERENCE)
    @route("POST /v1/responses/input_tokens", Access.INFERENCE)
    @route("POST /v1/messages", Access.INFERENCE)
    @route("POST /v1/messages/count_tokens", Access.INFERENCE)
    @route("POST /tokenize", Access.INFERENCE)
    @route("POST /detokenize", Access.INFERENCE)
    async def refuse(self, request: Request) -> Response:
        """Return 404."""
        raise ApiError(
            404,
            f"This server has only {self._model}, which generates no text: start headrace serve with a model that "
            f"does, and name {self._model} with --embedding-model or --rerank-model.",
            code="model_not_found",
        )
