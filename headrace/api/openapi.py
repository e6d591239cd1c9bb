"""The API description: ``/openapi.json`` for programs, ``/docs`` for people.

It is generated from the types that parse request bodies and from the table of roles, so it always matches the server.
The page loads nothing from other hosts, so it also works without internet access.
"""

from __future__ import annotations

import json
from functools import cached_property
from importlib.resources import files
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from headrace.api.anthropic.wire import CountBody, MessagesBody
from headrace.api.auth.roles import ROUTES, Access
from headrace.api.batch.wire import BatchBody, UploadForm
from headrace.api.cache.routes import ClearBody, FeedbackBody
from headrace.api.cache.warm_wire import WarmBody
from headrace.api.compile.bodies import ChatBody, CompletionBody
from headrace.api.embedding.wire import EmbeddingBody, RerankBody, ScoreBody
from headrace.api.openai.routes import DetokenizeBody, TokenizeBody
from headrace.api.operations.abort import AbortBody
from headrace.api.operations.experiments import ExperimentBody
from headrace.api.operations.steps import SimulationBody
from headrace.api.operations.tuner import TunerBody
from headrace.api.responses.items import CompactBody
from headrace.api.responses.wire import InputTokensBody, ResponsesBody
from headrace.api.wire import Wire


class Operation(NamedTuple):
    """One route in the description; ``example`` is a body to start from, ``media`` the body's content type."""

    method: str
    path: str
    summary: str
    body: type[Wire] | None = None
    example: dict[str, Any] | None = None
    media: str = "application/json"

    @property
    def access(self) -> Access:
        """The access that the route needs once API keys are configured."""
        return _ACCESS[f"{self.method.upper()} {self.path}"]


_ACCESS = {route.replace(":path", ""): access for route, access in ROUTES.items()}

OPERATIONS = (
    Operation(
        "post",
        "/v1/chat/completions",
        "Create a chat completion.",
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
        "Create a text completion.",
        CompletionBody,
        {"prompt": "Once upon a time", "max_tokens": 100, "stream": True},
    ),
    Operation(
        "post",
        "/v1/responses",
        "Create a response (OpenAI's Responses API).",
        ResponsesBody,
        {"input": "Tell me a short story.", "max_output_tokens": 200, "stream": True},
    ),
    Operation(
        "post",
        "/v1/responses/compact",
        "Compact a conversation into one item that replaces it.",
        CompactBody,
        {"model": "builtin", "input": "Tell me a short story."},
    ),
    Operation(
        "post",
        "/v1/responses/input_tokens",
        "Count the tokens of a response request's prompt.",
        InputTokensBody,
        {"input": "Tell me a short story."},
    ),
    Operation(
        "get",
        "/v1/responses/{id}",
        "Return a stored response; ?stream=true replays its events, from ?starting_after= on.",
    ),
    Operation("delete", "/v1/responses/{id}", "Delete a stored response."),
    Operation("post", "/v1/responses/{id}/cancel", "Cancel a response that runs in the background."),
    Operation(
        "get",
        "/v1/responses/{id}/input_items",
        "List the input items of a stored response; ?limit=, ?order= and ?after= select a page.",
    ),
    Operation(
        "post",
        "/v1/messages",
        "Create a message, in Anthropic's format.",
        MessagesBody,
        {
            "messages": [{"role": "user", "content": "Tell me a short story."}],
            "max_tokens": 200,
            "stream": True,
        },
    ),
    Operation(
        "post",
        "/v1/messages/count_tokens",
        "Count the tokens of a message request's prompt.",
        CountBody,
        {"messages": [{"role": "user", "content": "Hello"}]},
    ),
    Operation(
        "post",
        "/v1/embeddings",
        "Convert texts to vectors. Needs the server's option --embedding-model.",
        EmbeddingBody,
        {"input": ["A first text.", "A second text."]},
    ),
    Operation(
        "post",
        "/v1/rerank",
        "Order documents by their relevance for a query. Needs --rerank-model or --embedding-model.",
        RerankBody,
        {"query": "What is a fox?", "documents": ["A fox is an animal.", "A box is a thing."], "top_n": 1},
    ),
    Operation("post", "/rerank", "Alias of /v1/rerank.", RerankBody),
    Operation("post", "/v2/rerank", "Alias of /v1/rerank.", RerankBody),
    Operation(
        "post",
        "/v1/score",
        "Score pairs of texts. Needs --rerank-model or --embedding-model.",
        ScoreBody,
        {"text_1": "What is a fox?", "text_2": ["A fox is an animal.", "A box is a thing."]},
    ),
    Operation("post", "/score", "Alias of /v1/score.", ScoreBody),
    Operation("post", "/tokenize", "Convert text or messages to tokens.", TokenizeBody, {"prompt": "Hello"}),
    Operation("post", "/detokenize", "Convert tokens to text.", DetokenizeBody, {"tokens": [1, 2, 3]}),
    Operation("get", "/v1/models", "List the served models."),
    Operation("get", "/v1/models/{model}", "Describe one model."),
    Operation(
        "get",
        "/v1/requests/{id}",
        "Explain a request by id or X-Request-Id: state, position, reasons, tokens.",
    ),
    Operation(
        "get",
        "/v1/requests/{id}/timeline",
        "Report when a request waited, computed its prompt and generated each token; ?format=perfetto for a trace.",
    ),
    Operation(
        "get",
        "/v1/steps",
        "Report the last steps: rows, queue with reasons, blocks. Query: after, limit, request, format=perfetto.",
    ),
    Operation(
        "post",
        "/v1/simulations",
        "Simulate a small workload and report each of its steps; ?format=perfetto for a trace.",
        SimulationBody,
        {"requests": [{"prompt_tokens": 64, "output_tokens": 16}], "max_num_seqs": 2},
    ),
    Operation("get", "/v1/tour", "List the stops of the guided tour, with their simulations."),
    Operation("delete", "/v1/sessions/{id}", "End a session: its prompt is retained no longer."),
    Operation(
        "post", "/abort_request", "Cancel a running request, by its id or its X-Request-Id.", AbortBody
    ),
    Operation(
        "get",
        "/v1/usage",
        "Report usage and remaining quotas: of the key's tenant, or of all; ?tenant= selects one.",
    ),
    Operation("get", "/health", "Liveness: 200 while steps make progress, otherwise 503 with the reason."),
    Operation(
        "get",
        "/health/ready",
        "Readiness: 200 while the server accepts requests and its caches are warm.",
    ),
    Operation("get", "/ping", "Alias of /health."),
    Operation("get", "/livez", "Alias of /health."),
    Operation("get", "/healthz", "Alias of /health."),
    Operation("get", "/readyz", "Alias of /health/ready."),
    Operation("get", "/version", "Report the version of the server."),
    Operation("get", "/server_info", "Report the model, the settings and the current load."),
    Operation(
        "get",
        "/v1/dashboard/stream",
        "Stream snapshots for the dashboard; ?part= adds requests, caches or tenants, ?count= ends after so many.",
    ),
    Operation("get", "/metrics", "Report metrics in Prometheus' text format."),
    Operation(
        "get",
        "/v1/cache/stats",
        "Report cache hits and savings by layer: of the key's tenant, or of all.",
    ),
    Operation(
        "post",
        "/v1/cache/clear",
        "Invalidate cached responses: by tag, of the tenant, or all.",
        ClearBody,
        {"scope": "tenant"},
    ),
    Operation(
        "post",
        "/v1/cache/feedback",
        "Report a wrong response: it is deleted from the cache and not stored again.",
        FeedbackBody,
    ),
    Operation(
        "post",
        "/v1/cache/warm",
        "Compute responses and prompt prefixes into the caches during idle time.",
        WarmBody,
        {"prefixes": [{"messages": [{"role": "system", "content": "You are brief."}]}]},
    ),
    Operation("get", "/v1/cache/warm", "Report the progress of cache warming."),
    Operation("post", "/reset_prefix_cache", "Empty the prefix cache."),
    Operation("post", "/pause", "Reject new requests; queued and running ones continue."),
    Operation("post", "/resume", "Accept new requests again."),
    Operation(
        "post",
        "/v1/experiments",
        "Start an experiment: compare a setting's current value with another one on live traffic.",
        ExperimentBody,
        {"setting": "mixed_prefill_ratio", "treatment": 0.4, "metric": "itl_p99_seconds"},
    ),
    Operation(
        "post",
        "/v1/experiments/dry-run",
        "Simulate an experiment with the server's own load and step times, and report it.",
        ExperimentBody,
        {"setting": "mixed_prefill_ratio", "treatment": 0.4, "metric": "itl_p99_seconds"},
    ),
    Operation("get", "/v1/tuner", "Report the tuner: mode, settings with their bounds, changes."),
    Operation("post", "/v1/tuner", "Change the tuner's mode.", TunerBody, {"mode": "advise"}),
    Operation(
        "get", "/v1/experiments", "List the experiments, the settings that may change, and the metrics."
    ),
    Operation(
        "get", "/v1/experiments/{id}", "Report one experiment: effect, interval, guards, windows, curve."
    ),
    Operation(
        "delete", "/v1/experiments/{id}", "Stop an experiment, or roll back the treatment that it adopted."
    ),
    Operation(
        "post",
        "/v1/files",
        "Upload a file of requests for a batch. All file routes need the server's option --batch-path.",
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
            "x-required-access": operation.access,
            "responses": {
                "200": {"description": "OK"},
                "default": {
                    "description": "Error",
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
    """The two routes. Both documents are built at the first request and never change."""

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
        """The routes to mount."""
        return [Route("/openapi.json", self.openapi), Route("/docs", self.page)]

    async def openapi(self, request: Request) -> Response:
        """``GET /openapi.json``."""
        root = request.scope.get("root_path", "")  # where the application is mounted
        return JSONResponse(self._json | {"servers": [{"url": root}]} if root else self._json)

    async def page(self, request: Request) -> Response:
        """``GET /docs``."""
        return HTMLResponse(self._page)
