"""Anthropic's format on routes that both APIs have: errors, and the model card."""

from __future__ import annotations

import json
from collections.abc import MutableMapping, Sequence
from datetime import UTC, datetime
from typing import Any, Protocol

from starlette.datastructures import Headers
from starlette.responses import Response

from headrace.api.auth.access import route_path
from headrace.api.errors import DEADLINE, ApiError

SPEAKS = "anthropic-version"
"""The header that identifies Anthropic's clients on routes that both APIs have."""


_STATUSES = {408: 504, 503: 529}
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    408: "timeout_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def speaks_anthropic(scope: MutableMapping[str, Any], headers: Headers) -> bool:
    """Whether a request belongs to Anthropic's API: by its path, or by the header ``anthropic-version``."""
    path = route_path(scope["path"], scope.get("root_path", ""))
    return path == "/v1/messages" or path.startswith("/v1/messages/") or SPEAKS in headers


def error_body(error: ApiError, request_id: str | None = None) -> tuple[int, bytes]:
    """The status and the JSON of an error."""
    own_deadline = error.status == 408 and error.param == DEADLINE  # the client's deadline, not the server's
    status = 408 if own_deadline else _STATUSES.get(error.status, error.status)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    if error.status == 504:  # nothing is cached, and the client forbade computing
        kind = "not_found_error"
    inner: dict[str, Any] = {"type": kind, "message": str(error)}
    if error.details is not None:
        inner["details"] = error.details
    shown: dict[str, Any] = {"type": "error", "error": inner}
    return status, json.dumps(shown | ({"request_id": request_id} if request_id else {})).encode()


def error_response(error: ApiError, request_id: str) -> Response:
    """The error as an HTTP response."""
    status, body = error_body(error, request_id)
    return Response(body, status, error.headers, media_type="application/json")


class NamedModel(Protocol):
    """What is shown of a model."""

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def created(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...


def card(model: NamedModel, name: str) -> dict[str, Any]:
    """``GET /v1/models/{model}`` under one of its names."""
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(model.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": model.max_model_len - 1,
        "max_tokens": model.max_model_len - 1,
    }


def listing(models: Sequence[NamedModel]) -> dict[str, Any]:
    """``GET /v1/models``: the only page."""
    cards = [card(model, name) for model in models for name in model.names]
    return {"data": cards, "has_more": False, "first_id": cards[0]["id"], "last_id": cards[-1]["id"]}
