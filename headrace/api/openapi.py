"""The API description: ``/openapi.json`` for programs, ``/docs`` for people.

It is generated from the rows of the routes and the types that parse request bodies, so it always matches the server.
The page loads nothing from other hosts, so it also works without internet access.
"""

from __future__ import annotations

import json
from functools import cached_property
from importlib.resources import files
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from headrace.api.anthropic.routes import Messages
from headrace.api.auth.access import Access
from headrace.api.batch.routes import BatchRoutes, Files
from headrace.api.cache.routes import CacheApi, PairsApi
from headrace.api.cache.warm import Warm
from headrace.api.embedding.routes import EmbeddingApi
from headrace.api.openai.routes import Api
from headrace.api.operations.requests import Abort, RequestTimeline, SessionsApi
from headrace.api.operations.served_model import AdapterRoutes, SleepRoutes
from headrace.api.operations.status import Pause, Status, UsageReport
from headrace.api.operations.steps import StepRoutes
from headrace.api.operations.tuning import ExperimentRoutes, TunerRoutes
from headrace.api.pages import Pages
from headrace.api.responses.routes import ResponsesApi
from headrace.api.routing import Endpoints, Row, route

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


def described() -> list[Row]:
    """The rows of all routes, in the order of the document."""
    return [row for each in ENDPOINTS for rows in each.declared.values() for row in rows]


def describe(version: str) -> dict[str, Any]:
    """The OpenAPI 3.1 document."""
    schemas: dict[str, Any] = {"Error": _ERROR}
    paths: dict[str, Any] = {}
    for row in described():
        if row.listed and row.summary:
            paths.setdefault(row.shown_path, {})[row.method.lower()] = _operation(row, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Headrace", "version": version},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}, {}],
    }


def _operation(row: Row, schemas: dict[str, Any]) -> dict[str, Any]:
    """One operation; the schemas of its body are added to ``schemas``."""
    entry: dict[str, Any] = {
        "summary": row.summary,
        "x-required-access": row.access,
        "responses": {
            "200": {"description": "OK"},
            "default": {
                "description": "Error",
                "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}},
            },
        },
    }
    names = [part[1:-1] for part in row.shown_path.split("/") if part.startswith("{")]
    if names:
        entry["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    if row.body is not None:
        schema = row.body.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= schema.pop("$defs", {})
        schemas[row.body.__name__] = schema
        content: dict[str, Any] = {"schema": {"$ref": f"#/components/schemas/{row.body.__name__}"}}
        if row.example is not None:
            content["example"] = row.example
        entry["requestBody"] = {"required": True, "content": {row.media: content}}
    return entry


class Docs(Endpoints):
    """Both documents are built at the first request and never change."""

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

    @route("GET /openapi.json", Access.PUBLIC, "The OpenAPI document of the API.", listed=False)
    async def openapi(self, request: Request) -> Response:
        root = request.scope.get("root_path", "")  # where the application is mounted
        return JSONResponse(self._json | {"servers": [{"url": root}]} if root else self._json)

    @route("GET /docs", Access.PUBLIC, "Interactive API documentation.", listed=False)
    async def page(self, request: Request) -> Response:
        return HTMLResponse(self._page)


ENDPOINTS: tuple[type[Endpoints], ...] = (
    *(Api, ResponsesApi, Messages, EmbeddingApi, Status, RequestTimeline, StepRoutes, SessionsApi, Abort),
    *(
        UsageReport,
        Pages,
        CacheApi,
        PairsApi,
        Warm,
        Pause,
        SleepRoutes,
        AdapterRoutes,
        ExperimentRoutes,
        TunerRoutes,
        Files,
        BatchRoutes,
    ),
    Docs,
)
"""All classes whose routes are described, whether or not the options of a server mount them."""
