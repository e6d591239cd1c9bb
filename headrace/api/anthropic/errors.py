"""Errors in Anthropic's format: ``{"type": "error", "error": {"type", "message"}, "request_id"}``.

The errors are those of `api.errors`. Where Anthropic documents another status for one, the response has that.
"""

from __future__ import annotations

import json
from collections.abc import MutableMapping
from typing import Any

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
