"""The routes described for machines (``/openapi.json``) and for people (``/docs``).

The description is made from the wire types, so it cannot tell another story than the parser. The page needs
nothing from outside: a machine without internet shows it too.
"""

from __future__ import annotations

import json
from functools import cached_property
from importlib.resources import files
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from headrace.serve.http.batch.wire import BatchBody, UploadForm
from headrace.serve.http.cache.routes import ClearBody, FeedbackBody
from headrace.serve.http.cache.warm_wire import WarmBody
from headrace.serve.http.openai.chat_wire import ChatBody
from headrace.serve.http.openai.completions_wire import CompletionBody
from headrace.serve.http.openai.tokens_wire import DetokenizeBody, TokenizeBody
from headrace.serve.http.operations.abort import AbortBody
from headrace.serve.http.wire import Wire


class Operation(NamedTuple):
    """A route as a reader meets it; ``example`` is a body to begin with, ``media`` the body's content type."""

    method: str
    path: str
    summary: str
    body: type[Wire] | None = None
    example: dict[str, Any] | None = None
    media: str = "application/json"


OPERATIONS = (
    Operation(
        "post",
        "/v1/chat/completions",
        "The next turn of a conversation.",
        ChatBody,
        {
            "messages": [{"role": "user", "content": "Tell me a short story."}],
            "max_tokens": 200,
            "stream": True,
        },
    ),
    Operation(
        "post",
        "/v1/completions",
        "Go on with a text.",
        CompletionBody,
        {"prompt": "Once upon a time", "max_tokens": 100, "stream": True},
    ),
    Operation("post", "/tokenize", "Text or messages to tokens.", TokenizeBody, {"prompt": "Hello"}),
    Operation("post", "/detokenize", "Tokens to text.", DetokenizeBody, {"tokens": [1, 2, 3]}),
    Operation("get", "/v1/models", "The model that is served."),
    Operation("get", "/v1/models/{model}", "One model's card."),
    Operation(
        "get", "/v1/requests/{id}", "What happened to a request: state, position, reasons, tokens so far."
    ),
    Operation("post", "/abort_request", "End a request that is being answered.", AbortBody),
    Operation("get", "/v1/usage", "What tenants have used, and how their limits stand; of one: ?tenant=."),
    Operation("get", "/health", "200 while steps progress, else 503 with the reason."),
    Operation(
        "get",
        "/health/ready",
        "200 while new requests are taken and the caches are as warm as they shall be.",
    ),
    Operation("get", "/ping", "As /health."),
    Operation("get", "/version", "The server's version."),
    Operation("get", "/server_info", "What runs here, and how much of it."),
    Operation("get", "/metrics", "Metrics in Prometheus' text format."),
    Operation("get", "/v1/cache/stats", "What the response caches saved, by layer."),
    Operation(
        "post", "/v1/cache/clear", "Forget kept answers: by tag, or all.", ClearBody, {"scope": "tenant"}
    ),
    Operation(
        "post",
        "/v1/cache/feedback",
        "Say that an answer was wrong: it is deleted and not kept again.",
        FeedbackBody,
    ),
    Operation(
        "post",
        "/v1/cache/warm",
        "Compute answers, and beginnings of prompts, when there is time.",
        WarmBody,
        {"prefixes": [{"messages": [{"role": "system", "content": "You are brief."}]}]},
    ),
    Operation("get", "/v1/cache/warm", "How far warming is, and whether there is time for it."),
    Operation("post", "/reset_prefix_cache", "Forget all computed prefixes."),
    Operation(
        "post",
        "/v1/files",
        "Upload a file of requests for a batch. Needs the server's option --batch-path, as all routes of files.",
        UploadForm,
        media="multipart/form-data",
    ),
    Operation("get", "/v1/files", "List the tenant's files. Query: purpose, after, limit, order."),
    Operation("get", "/v1/files/{id}", "Get a file's metadata."),
    Operation("get", "/v1/files/{id}/content", "Download a file's contents."),
    Operation("delete", "/v1/files/{id}", "Delete a file."),
    Operation("post", "/v1/batches", "Create a batch from an uploaded file. Needs --batch-path.", BatchBody),
    Operation("get", "/v1/batches", "List the tenant's batches, newest first. Query: after, limit."),
    Operation("get", "/v1/batches/{id}", "Get a batch: its status, counts and output files."),
    Operation("post", "/v1/batches/{id}/cancel", "Cancel a batch. Results so far stay available."),
)

_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def describe(version: str) -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    schemas: dict[str, Any] = {"Error": _ERROR}
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        entry: dict[str, Any] = {
            "summary": operation.summary,
            "responses": {
                "200": {"description": "OK"},
                "default": {
                    "description": "Refused or failed",
                    "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
                },
            },
        }
        names = [part[1:-1] for part in operation.path.split("/") if part.startswith("{")]
        if names:
            entry["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
            ]
        if operation.body is not None:
            schema = operation.body.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas |= schema.pop("$defs", {})
            schemas[operation.body.__name__] = schema
            content: dict[str, Any] = {"schema": {"$ref": f"#/components/schemas/{operation.body.__name__}"}}
            if operation.example is not None:
                content["example"] = operation.example
            entry["requestBody"] = {"required": True, "content": {operation.media: content}}
        paths.setdefault(operation.path, {})[operation.method] = entry
    return {
        "openapi": "3.1.0",
        "info": {"title": "Headrace", "version": version},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}, {}],
    }


class Docs:
    """The two routes; made when somebody first asks, they never change."""

    def __init__(self, version: str) -> None:
        self._version = version

    @cached_property
    def _json(self) -> dict[str, Any]:
        return describe(self._version)

    @cached_property
    def _page(self) -> str:
        page = files(__package__).joinpath("docs.html").read_text(encoding="utf-8")
        embedded = json.dumps(self._json).replace("<", "\\u003c")
        return page.replace("/*OPENAPI*/null", embedded)

    def routes(self) -> list[Route]:
        """What to mount."""
        return [Route("/openapi.json", self.openapi), Route("/docs", self.page)]

    async def openapi(self, request: Request) -> Response:
        """``GET /openapi.json``."""
        root = request.scope.get("root_path", "")  # where the application is mounted
        return JSONResponse(self._json | {"servers": [{"url": root}]} if root else self._json)

    async def page(self, request: Request) -> Response:
        """``GET /docs``."""
        return HTMLResponse(self._page)
